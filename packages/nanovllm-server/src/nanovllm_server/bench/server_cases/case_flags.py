"""Flags of commands that measure cases on several servers. Imports nothing slow, because --help needs this module."""

import argparse
import secrets
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nanovllm_server.bench.argument_types import integer_at_least_1
from nanovllm_server.bench.server_cases.workload_sizes import WorkloadSizes
from nanovllm_server.flag_types import positive_number

if TYPE_CHECKING:
    from nanovllm_server.bench.server_cases.case_client import ServerUnderTest
    from nanovllm_server.bench.server_cases.case_command import CaseOptions, CaseRunner, CaseSettings

SizesT = TypeVar("SizesT", bound=WorkloadSizes)


def add_flags(
    parser: argparse.ArgumentParser,
    default_url: str,
    key_variable: str,
    case_names: Sequence[str],
    sizes_class: type[WorkloadSizes],
    *,
    repeat: int,
) -> None:
    """Adds all flags of a command.

    key_variable: the environment variable that holds the API key.
    sizes_class: declares one flag per field.
    repeat: default of --repeat.
    """

    def parse_cases(text: str) -> tuple[str, ...]:
        cases = tuple(text.split(","))
        if unknown := [case for case in cases if case not in case_names]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a case; cases are {', '.join(case_names)}")
        return cases

    add = parser.add_argument
    add(
        "url",
        nargs="*",
        default=[],
        metavar="[NAME=]URL[,URL...]",
        help="base URLs of servers, measured one after the other, one column of the table per server; a server may "
        f"have several replicas, which get requests in turn; default: {default_url}; ${key_variable} holds the "
        "API key of all servers",
    )
    add(
        "--cases", type=parse_cases, default=",".join(case_names), metavar="CASE,...", help="cases, separated by commas"
    )
    add("--model", dest="served_model", help="requested model; by default, each server's first model")
    add("--seed", type=int, help="selects all texts and times; without a seed, every run has new ones")
    add("--temperature", type=float, default=0.6, help="0 selects the likeliest token")
    add("--timeout", type=positive_number, default=120.0, metavar="S", help="maximum time of one request")
    repeat_help = "repetitions with new texts; percentiles cover all repetitions"
    add("--repeat", type=integer_at_least_1, default=repeat, help=repeat_help)
    add("--json", type=Path, metavar="FILE", help="write all figures to FILE")

    for title, size_fields in groupby(fields(sizes_class), lambda size: size.metadata["group"]):
        group = parser.add_argument_group(title)
        for size in size_fields:
            group.add_argument("--" + size.name.replace("_", "-"), **size.metadata["options"])


def make_options(
    flags: argparse.Namespace,
    default_url: str,
    api_key: str | None,
    sizes_class: type[SizesT],
    make_runner: "Callable[[ServerUnderTest, CaseSettings[SizesT]], CaseRunner]",
) -> "CaseOptions[SizesT]":
    """Makes the options from the flags. api_key: sent to all servers. Raises InvalidSettingsError for invalid URLs."""
    from nanovllm_server.bench.client import parse_base_url
    from nanovllm_server.bench.report import OutputFiles
    from nanovllm_server.bench.server_cases.case_command import CaseOptions, CaseSettings

    return CaseOptions(
        benchmark=flags.command,
        make_runner=make_runner,
        endpoints=[
            (label, [parse_base_url(url, api_key) for url in urls.split(",")])
            for label, urls in map(_split_label, flags.url or [default_url])
        ],
        model=flags.served_model,
        cases=flags.cases,
        settings=CaseSettings(
            sizes=sizes_class(**{size.name: getattr(flags, size.name) for size in fields(sizes_class)}),
            seed=str(secrets.randbits(32) if flags.seed is None else flags.seed),
            temperature=flags.temperature,
            timeout_s=flags.timeout,
            repeat=flags.repeat,
        ),
        files=OutputFiles(flags.json),
    )


def _split_label(text: str) -> tuple[str, str]:
    """Splits `NAME=URL,...` into a label and the URLs. Without a name, the label is the hosts and ports of the URLs."""
    label, equals, urls = text.partition("=")
    if equals and "/" not in label:
        return label, urls
    return ",".join(url.partition("://")[2].partition("/")[0] or url for url in text.split(",")), text
