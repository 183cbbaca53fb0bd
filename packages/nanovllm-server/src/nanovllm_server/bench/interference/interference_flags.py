"""The flags of `nanovllm-bench interference`. Imports nothing slow, because --help needs this module."""

import argparse
import secrets
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm_server.bench.argument_types import integer_at_least_1
from nanovllm_server.bench.interference.case_sizes import CASE_NAMES, WorkloadSizes
from nanovllm_server.flag_types import seconds

if TYPE_CHECKING:
    from nanovllm_server.bench.interference.interference_command import InterferenceOptions

SUMMARY = "how long prompts, short requests, decoding streams and chat turns delay each other on a server"


def add_flags(parser: argparse.ArgumentParser, default_url: str, key_variable: str) -> None:
    """Adds all flags of the command. key_variable: the environment variable that holds the API key."""
    add = parser.add_argument
    add(
        "url",
        nargs="*",
        default=[],
        metavar="[NAME=]URL",
        help="base URLs, measured one after the other, one column of the table per URL; without any, "
        f"{default_url}; ${key_variable} holds the API key of all servers",
    )
    add(
        "--cases", type=_case_names, default=",".join(CASE_NAMES), metavar="CASE,...", help="cases, separated by commas"
    )
    add("--model", dest="served_model", help="requested model; by default, each server's first model")
    add("--seed", type=int, help="selects all texts; without a seed, every run has new texts")
    add("--temperature", type=float, default=0.6, help="0 selects the likeliest token")
    add("--timeout", type=seconds, default=120.0, metavar="S", help="maximum time of one request")
    add("--repeat", type=integer_at_least_1, default=3, help="repetitions; percentiles cover all repetitions")
    add("--json", type=Path, metavar="FILE", help="write all figures to FILE")

    for title, size_fields in groupby(fields(WorkloadSizes), lambda size: size.metadata["group"]):
        group = parser.add_argument_group(title)
        for size in size_fields:
            group.add_argument("--" + size.name.replace("_", "-"), **size.metadata["options"])


def interference_options(flags: argparse.Namespace, default_url: str, api_key: str | None) -> "InterferenceOptions":
    """Makes the options from the flags. Raises BenchError for an invalid base URL. api_key: sent to all servers."""
    from nanovllm_server.bench.client import parse_base_url
    from nanovllm_server.bench.interference.case_runner import CaseSettings
    from nanovllm_server.bench.interference.interference_command import InterferenceOptions
    from nanovllm_server.bench.report import OutputFiles

    return InterferenceOptions(
        endpoints=[
            (label, parse_base_url(url, api_key)) for label, url in map(_split_label, flags.url or [default_url])
        ],
        model=flags.served_model,
        cases=flags.cases,
        settings=CaseSettings(
            workload=WorkloadSizes(**{size.name: getattr(flags, size.name) for size in fields(WorkloadSizes)}),
            seed=str(secrets.randbits(32) if flags.seed is None else flags.seed),
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
    """Splits `NAME=URL` into a label and a URL. The label of a URL without a name is its host and port."""
    label, equals, url = text.partition("=")
    if equals and "/" not in label:
        return label, url
    return text.partition("://")[2].partition("/")[0] or text, text
