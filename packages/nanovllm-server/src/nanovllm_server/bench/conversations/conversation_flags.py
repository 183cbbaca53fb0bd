"""The flags of `nanovllm-bench conversations`. Imports nothing slow, because --help needs this module."""

import argparse
from typing import TYPE_CHECKING

from nanovllm_server.bench.conversations.conversation_sizes import CASE_NAMES, ConversationSizes
from nanovllm_server.bench.server_cases import case_flags

if TYPE_CHECKING:
    from nanovllm_server.bench.server_cases.case_command import CaseOptions

SUMMARY = "latency of conversations that return after a pause, compared with prompts that the server has not seen"


def add_flags(parser: argparse.ArgumentParser, default_url: str, key_variable: str) -> None:
    """Adds all flags of the command. key_variable: the environment variable that holds the API key."""
    case_flags.add_flags(parser, default_url, key_variable, CASE_NAMES, ConversationSizes, repeat=1)


def make_options(flags: argparse.Namespace, default_url: str, api_key: str | None) -> "CaseOptions[ConversationSizes]":
    """Makes the options from the flags. Raises BenchError for an invalid base URL. api_key: sent to all servers."""
    from nanovllm_server.bench.conversations.conversation_runner import ConversationRunner

    return case_flags.make_options(flags, default_url, api_key, ConversationSizes, ConversationRunner)
