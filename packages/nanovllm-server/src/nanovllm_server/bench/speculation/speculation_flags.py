"""The flags of `nanovllm-bench speculation`. Imports nothing slow, because --help needs this module."""

import argparse
from pathlib import Path
from typing import get_args

from nanovllm_core.config import DraftMethod
from nanovllm_server.bench.argument_types import integer_at_least_1, integer_at_least_2
from nanovllm_server.engine_flags import add_draft_model_flag, add_engine_flags

SUMMARY = "tokens per second of real text with and without drafts, one request at a time, and whether answers are equal"
# Fields of `EngineConfig` that have a flag.
_ENGINE_SETTINGS = (
    *("num_speculative_tokens", "device", "dtype", "max_model_len", "gpu_memory_utilization", "cpu_cache_gib"),
    *("kv_cache_dtype", "graph_mode", "compile"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds all flags of the command."""
    add = parser.add_argument
    add("model", nargs="?", help="directory, or repository of the Hugging Face Hub; SmolLM2-135M-Instruct by default")
    add("--prompts", type=integer_at_least_1, metavar="N", help="prompts of each kind; by default all 20, 20 and 10")
    add("--rounds", type=integer_at_least_1, default=5, help="runs of each prompt; figures are medians of the rounds")
    add("--output-len", type=integer_at_least_2, default=128, help="maximum tokens of an answer, at least 2")
    add("--threads", type=integer_at_least_1, help="number of torch's threads")
    add("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    add = parser.add_argument_group("engine").add_argument
    # If `speculate` were in _ENGINE_SETTINGS, the flag would also allow `none`, which turns drafts off.
    add("--speculate", choices=get_args(DraftMethod), default="ngram", help="method that proposes drafts")
    add_draft_model_flag(add)
    add_engine_flags(add, _ENGINE_SETTINGS)
