"""The flags of `nanovllm-bench interference`. Imports nothing slow, because --help needs this module."""

import argparse
from typing import TYPE_CHECKING

from nanovllm_server.bench.interference.interference_sizes import CASE_NAMES, InterferenceSizes
from nanovllm_server.bench.server_cases import case_flags

if TYPE_CHECKING:
    from nanovllm_server.bench.server_cases.case_command import CaseOptions

SUMMARY = "how long prompts, short requests, decoding streams and chat turns delay each other on a server"


def add_flags(parser: argparse.ArgumentParser, default_url: str, key_variable: str) -> None:
    """Adds all flags of the command. key_variable: the environment variable that holds the API key."""
    case_flags.add_flags(parser, default_url, key_variable, CASE_NAMES, InterferenceSizes, repeat=3)


def make_options(flags: argparse.Namespace, default_url: str, api_key: str | None) -> "CaseOptions[InterferenceSizes]":
    """Makes the options from the flags. Raises BenchError for an invalid base URL. api_key: sent to all servers."""
    from nanovllm_server.bench.interference.interference_runner import InterferenceRunner

    return case_flags.make_options(flags, default_url, api_key, InterferenceSizes, InterferenceRunner)
