"""The flags of `nanovllm-bench interference`. Imports nothing slow, because --help needs this module."""

import argparse
import secrets
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm_server.bench.flag_types import DEFAULT_URL, at_least_two, positive
from nanovllm_server.bench.interference.sizes import CASES, Sizes
from nanovllm_server.flag_types import seconds

if TYPE_CHECKING:
    from nanovllm_server.bench.interference.program import InterferenceJob

SUMMARY = "how long prompts, short requests, decoding streams and chat turns delay each other on a server"


def add_flags(program: argparse.ArgumentParser, key_variable: str) -> None:
    """Add all flags of the program. key_variable: the environment variable that holds the API key."""
    program.add_argument(
        "url",
        nargs="*",
        default=[],
        metavar="[NAME=]URL",
        help="base URLs, measured one after the other, each a column of the table; without one, "
        f"{DEFAULT_URL}; the API key of all servers is taken from ${key_variable}",
    )
    program.add_argument(
        "--cases", type=_cases, default=",".join(CASES), metavar="CASE,...", help="cases, separated by commas"
    )
    program.add_argument("--model", dest="served_model", help="name to ask for; without it, the first that is listed")
    program.add_argument("--seed", type=int, help="decides all texts; without it, every run has new texts")
    program.add_argument("--temperature", type=float, default=0.6, help="0 takes the likeliest token")
    program.add_argument("--timeout", type=seconds, default=120.0, metavar="S", help="limit of one request")
    program.add_argument(
        "--repeat", type=positive, default=3, help="repetitions; percentiles are over the samples of all of them"
    )
    program.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")

    add = program.add_argument_group("long-alone and short-beside-long").add_argument
    add("--long-len", type=positive, default=100_000, help="tokens of the long prompt")
    add("--num-short", type=positive, default=20, help="short requests beside the long prompt")
    add("--short-len", type=positive, default=100, help="tokens of a short prompt")
    add("--output-len", type=positive, default=16, help="tokens of the answer to a short prompt, and to a turn")
    add = program.add_argument_group("decodes-beside-long").add_argument
    add("--streams", type=positive, default=64, help="decoding streams")
    add("--stream-len", type=at_least_two, default=4096, help="most tokens of a decoding stream, in each case")
    add("--baseline-s", type=seconds, default=2.0, metavar="S", help="time that the streams decode alone")
    add("--num-prompts", type=positive, default=3, help="prompts that arrive at once beside the streams")
    add("--prompt-len", type=positive, default=30_000, help="tokens of each of these prompts")
    add = program.add_argument_group("turn and turns-beside-decodes").add_argument
    add("--num-turns", type=positive, default=5, help="conversations of the case turn")
    add("--conversations", type=positive, default=20, help="conversations of the case turns-beside-decodes")
    add("--conversation-len", type=positive, default=32_000, help="cached tokens of a conversation")
    add("--message-len", type=positive, default=400, help="tokens of each message of a conversation")
    add("--turn-len", type=at_least_two, default=100, help="new tokens of a turn")
    add("--turn-streams", type=positive, default=32, help="decoding streams of the case turns-beside-decodes")
    add("--turn-interval-ms", type=seconds, default=100.0, metavar="MS", help="time between turns that arrive spaced")


def job_from(options: argparse.Namespace, key: str | None) -> "InterferenceJob":
    """The options of a run from the flags. key: API key of all servers. Raises BenchError for an invalid base URL."""
    from nanovllm_server.bench.client import parse_base_url
    from nanovllm_server.bench.interference.program import InterferenceJob
    from nanovllm_server.bench.interference.situations import InterferenceSettings

    seed = options.seed if options.seed is not None else secrets.randbits(32)
    return InterferenceJob(
        endpoints=[(label, parse_base_url(url, key)) for label, url in map(_labelled, options.url or [DEFAULT_URL])],
        model=options.served_model,
        cases=options.cases,
        settings=InterferenceSettings(
            sizes=Sizes(**{field.name: getattr(options, field.name) for field in fields(Sizes)}),
            seed=str(seed),
            temperature=options.temperature,
            timeout_s=options.timeout,
            repeat=options.repeat,
        ),
        json=options.json,
    )


def _cases(text: str) -> tuple[str, ...]:
    cases = tuple(text.split(","))
    if unknown := [case for case in cases if case not in CASES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a case; cases are {', '.join(CASES)}")
    return cases


def _labelled(text: str) -> tuple[str, str]:
    """A label and a URL from `NAME=URL`, or from `URL`, whose label is its host and port."""
    label, equals, url = text.partition("=")
    if equals and "/" not in label:
        return label, url
    return text.partition("://")[2].partition("/")[0] or text, text
