"""The flags of `nanovllm-bench interference`. Imports nothing slow, because --help needs this module."""

import argparse
import secrets
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm_server.bench.argument_types import integer_from_1, integer_from_2
from nanovllm_server.bench.interference.case_sizes import CASE_NAMES, CaseSizes
from nanovllm_server.flag_types import seconds

if TYPE_CHECKING:
    from nanovllm_server.bench.interference.interference_command import InterferenceOptions

SUMMARY = "how long prompts, short requests, decoding streams and chat turns delay each other on a server"


def add_flags(parser: argparse.ArgumentParser, default_url: str, key_variable: str) -> None:
    """Adds all flags of the command. key_variable: the environment variable that holds the API key."""
    parser.add_argument(
        "url",
        nargs="*",
        default=[],
        metavar="[NAME=]URL",
        help="base URLs, measured one after the other, one column of the table per URL; without any, "
        f"{default_url}; ${key_variable} holds the API key of all servers",
    )
    parser.add_argument(
        "--cases", type=_case_names, default=",".join(CASE_NAMES), metavar="CASE,...", help="cases, separated by commas"
    )
    parser.add_argument("--model", dest="served_model", help="model to request; without it, the first one listed")
    parser.add_argument("--seed", type=int, help="decides all texts; without it, every run has new texts")
    parser.add_argument("--temperature", type=float, default=0.6, help="0 selects the likeliest token")
    parser.add_argument("--timeout", type=seconds, default=120.0, metavar="S", help="limit of one request")
    parser.add_argument(
        "--repeat", type=integer_from_1, default=3, help="repetitions; percentiles are over the samples of all of them"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")

    add = parser.add_argument_group("long-alone and short-beside-long").add_argument
    add("--long-len", type=integer_from_1, default=100_000, help="tokens of the long prompt")
    add("--num-short", type=integer_from_1, default=20, help="short requests beside the long prompt")
    add("--short-len", type=integer_from_1, default=100, help="tokens of a short prompt")
    add("--output-len", type=integer_from_1, default=16, help="tokens of the answer to a short prompt, and to a turn")
    add = parser.add_argument_group("decodes-beside-long").add_argument
    add("--streams", type=integer_from_1, default=64, help="decoding streams")
    add("--stream-len", type=integer_from_2, default=4096, help="maximum tokens of a decoding stream, in each case")
    add("--baseline-s", type=seconds, default=2.0, metavar="S", help="time that the streams decode alone")
    add("--num-prompts", type=integer_from_1, default=3, help="prompts that arrive at once beside the streams")
    add("--prompt-len", type=integer_from_1, default=30_000, help="tokens of each of these prompts")
    add = parser.add_argument_group("turn and turns-beside-decodes").add_argument
    add("--num-turns", type=integer_from_1, default=5, help="conversations of the case turn")
    add("--conversations", type=integer_from_1, default=20, help="conversations of the case turns-beside-decodes")
    add("--conversation-len", type=integer_from_1, default=32_000, help="cached tokens of a conversation")
    add("--message-len", type=integer_from_1, default=400, help="tokens of each message of a conversation")
    add("--turn-len", type=integer_from_2, default=100, help="new tokens of a turn")
    add("--turn-streams", type=integer_from_1, default=32, help="decoding streams of the case turns-beside-decodes")
    add("--turn-interval-ms", type=seconds, default=100.0, metavar="MS", help="time between turns that arrive spaced")


def interference_options(flags: argparse.Namespace, default_url: str, api_key: str | None) -> "InterferenceOptions":
    """The options of a run. api_key: sent to all servers. Raises BenchError for an invalid base URL."""
    from nanovllm_server.bench.client import parse_base_url
    from nanovllm_server.bench.interference.case_runner import CaseSettings
    from nanovllm_server.bench.interference.interference_command import InterferenceOptions
    from nanovllm_server.bench.report import OutputFiles

    seed = flags.seed if flags.seed is not None else secrets.randbits(32)
    return InterferenceOptions(
        endpoints=[
            (label, parse_base_url(url, api_key)) for label, url in map(_split_label, flags.url or [default_url])
        ],
        model=flags.served_model,
        cases=flags.cases,
        settings=CaseSettings(
            sizes=CaseSizes(**{field.name: getattr(flags, field.name) for field in fields(CaseSizes)}),
            seed=str(seed),
            temperature=flags.temperature,
            timeout_s=flags.timeout,
            repeat=flags.repeat,
        ),
        files=OutputFiles(flags.json),
    )


def _case_names(text: str) -> tuple[str, ...]:
    cases = tuple(text.split(","))
    if unknown := [case for case in cases if case not in CASE_NAMES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a case; cases are {', '.join(CASE_NAMES)}")
    return cases


def _split_label(text: str) -> tuple[str, str]:
    """A label and a URL from `NAME=URL`, or from `URL`, whose label is its host and port."""
    label, equals, url = text.partition("=")
    if equals and "/" not in label:
        return label, url
    return text.partition("://")[2].partition("/")[0] or text, text
