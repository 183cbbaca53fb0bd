"""The flags of all commands. Imports nothing slow, because --help needs this module."""

import argparse
import sys
from pathlib import Path

from nanovllm_server.bench.argument_types import (
    assignment,
    integer_at_least_0,
    integer_at_least_1,
    integer_at_least_2,
    integer_range,
    request_rate,
    step_range,
)
from nanovllm_server.bench.conversations import conversation_flags
from nanovllm_server.bench.interference import interference_flags
from nanovllm_server.bench.speculation import speculation_flags
from nanovllm_server.bench.workload import IntegerRange
from nanovllm_server.engine_flags import add_draft_model_flag, add_engine_flags
from nanovllm_server.flag_types import HelpFormatter, positive_number

API_KEY_VARIABLE = "NANOVLLM_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000/v1"
PEERS = ("vllm", "transformers", "llamacpp", "none")  # A peer is the engine to compare to.
THROUGHPUT_DEFAULT_LENGTHS = IntegerRange(100, 1024)
# Fields of `EngineConfig` that have a flag. Every peer also gets the shared settings. The peer vLLM also gets
# `speculate`, `num_speculative_tokens` and `acceptance_length`.
SHARED_ENGINE_SETTINGS = (
    *("device", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"),
    *("state_dtype", "tensor_parallel_size", "expert_parallel"),
)
UNSHARED_ENGINE_SETTINGS = (
    *("cpu_cache_gib", "kv_cache_dtype", "depth", "graph_mode", "compile", "trace"),
    *("dp_attention", "speculate", "num_speculative_tokens", "acceptance_length"),
)


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of all commands."""
    parser = argparse.ArgumentParser(prog="nanovllm-bench", description="Measure the engine, a server or the kernels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add_command(name: str, summary: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, formatter_class=HelpFormatter, help=summary, description=summary)

    throughput = add_command("throughput", "tokens per second of a batch of requests")
    _add_workload_flags(throughput, THROUGHPUT_DEFAULT_LENGTHS, "; above 0, prefix caching is on")
    _add_offline_flags(throughput, temperature=0.6)

    latency = add_command("latency", "tokens per second of a few requests, after all requests have their first token")
    add = latency.add_argument
    add("--batch", type=integer_at_least_1, nargs="+", default=[1, 8], help="simultaneous requests of each case")
    add("--input-len", type=integer_at_least_1, default=64, help="tokens of a prompt")
    add("--output-len", type=integer_at_least_2, default=128, help="tokens to generate, at least 2")
    _add_offline_flags(latency, temperature=0.0)

    prefill = add_command("prefill", "prompt tokens per second of requests that generate one token each")
    prefill.add_argument("--num-requests", type=integer_at_least_1, default=64, help="simultaneous prompts")
    prefill.add_argument("--input-len", type=integer_at_least_1, default=2048, help="tokens of a prompt")
    _add_offline_flags(prefill, temperature=0.0)

    serve = add_command(
        "serve", "latencies and tokens per second of any OpenAI-compatible server over streamed chat completions"
    )
    _add_server_flags(serve)
    _add_workload_flags(serve, IntegerRange(512, 512), "")
    add = serve.add_argument
    rate_help = "requests per second (Poisson process); inf: all at once; several rates are measured one by one"
    add("--rate", type=request_rate, nargs="+", default=[None], help=rate_help)
    concurrency_help = "maximum number of simultaneous requests; several limits are measured one by one"
    add("--concurrency", type=integer_at_least_1, nargs="+", default=[None], help=concurrency_help)
    add("--seed", type=int, default=0, help="a new seed makes prompts that no prefix cache holds")
    _add_temperature_flag(serve, 0.6)
    _add_result_flags(serve, repeat=1)

    grammars = add_command("grammars", "token gaps of unconstrained streams while other streams follow schemas")
    _add_server_flags(grammars)
    add = grammars.add_argument
    repeat_help = (
        "rounds; each round measures three mixes of streams: no stream follows a schema; half of the streams do; half "
        "of the streams do while new schemas compile"
    )
    add("--streams", type=integer_at_least_2, default=64, help="simultaneous streams in each mix")
    add("--output-len", type=integer_at_least_2, default=256, help="tokens of each answer")
    add("--repeat", type=integer_at_least_1, default=5, help=repeat_help)
    add("--json", type=Path, metavar="FILE", help="write all figures to FILE")

    interference = add_command("interference", interference_flags.SUMMARY)
    interference_flags.add_flags(interference, DEFAULT_URL, API_KEY_VARIABLE)

    conversations = add_command("conversations", conversation_flags.SUMMARY)
    conversation_flags.add_flags(conversations, DEFAULT_URL, API_KEY_VARIABLE)

    soak = add_command("soak", "memory, leaked blocks and errors of a server on this machine under hostile requests")
    _add_server_flags(soak)
    add = soak.add_argument
    add("--server-pid", type=integer_at_least_1, required=True, help="process id of nanovllm-server; Linux only")
    add("--clients", type=integer_at_least_1, default=64, help="simultaneous clients")
    add("--max-prompt-words", type=integer_at_least_2, default=500, help="words of the longest valid prompt")
    add("--minutes", type=positive_number, default=30.0, help="time of the traffic, including the warm-up")
    add(
        "--warm-up-minutes",
        type=positive_number,
        default=10.0,
        help="start to measure memory after this time at the latest",
    )
    add(
        "--flat-seconds",
        type=positive_number,
        default=60.0,
        help="end a warm-up phase when memory has been flat for this time",
    )
    add(
        "--sample-interval", type=positive_number, default=2.0, metavar="SECONDS", help="time between samples of memory"
    )
    add(
        "--max-growth",
        type=float,
        default=2.0,
        metavar="PERCENT",
        help="fail if the memory of a process grows by this much",
    )
    add("--seed", type=int, default=0, help="seed of the random traffic")
    add("--json", type=Path, metavar="FILE", help="write all figures to FILE")

    speculation_flags.add_flags(add_command("speculation", speculation_flags.SUMMARY))

    trace = add_command("trace", "times of steps on host and device, and idle times of the device, from a trace file")
    trace.add_argument("file", type=Path, help="file that --trace wrote")
    trace.add_argument(
        "--steps", type=step_range, metavar="N[..M]", help="only step N, or steps N to M; the first step is 0"
    )
    trace.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")

    kernels = add_command("kernels", "bytes and operations per second of the kernels; needs a GPU")
    kernels.add_argument("--only", default="", metavar="WORD", help="only kernels with WORD in their names")
    _add_result_flags(kernels, repeat=1)
    return parser


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"base URL; ${API_KEY_VARIABLE} holds the API key")
    parser.add_argument("--model", dest="served_model", help="requested model; by default, the server's first model")


def _add_workload_flags(
    parser: argparse.ArgumentParser, default_lengths: IntegerRange, prefix_help_suffix: str
) -> None:
    add = parser.add_argument_group("workload").add_argument
    add("--num-requests", type=integer_at_least_1, default=256, help="total number of requests")
    add("--input-len", type=integer_range, default=default_lengths, metavar="N[..M]", help="tokens of a prompt")
    output_help = "tokens to generate per request"
    add("--output-len", type=integer_range, default=default_lengths, metavar="N[..M]", help=output_help)
    prefix_help = f"additional tokens with which all prompts begin{prefix_help_suffix}"
    add("--prefix-len", type=integer_at_least_0, default=0, help=prefix_help)


def _add_offline_flags(parser: argparse.ArgumentParser, *, temperature: float) -> None:
    _add_temperature_flag(parser, temperature)
    _add_result_flags(parser, repeat=3)
    add = parser.add_argument_group("engine, and peer").add_argument
    model_help = "directory, or repository of the Hugging Face Hub; SmolLM2-135M-Instruct by default"
    add("model", nargs="?", help=model_help)
    format_help = "dummy: random weights, needs only config.json"
    add("--load-format", choices=("auto", "dummy"), default="auto", help=format_help)
    add("--threads", type=integer_at_least_1, help="number of torch's threads")
    add_engine_flags(add, SHARED_ENGINE_SETTINGS)
    add = parser.add_argument_group("engine").add_argument
    add_engine_flags(add, UNSHARED_ENGINE_SETTINGS)
    add_draft_model_flag(add)
    add = parser.add_argument_group("peer").add_argument
    add("--peer", choices=PEERS, default="none", help="engine to compare to in the same call")
    add("--peer-python", type=Path, default=sys.executable, metavar="PATH", help="interpreter that has the peer")
    env_help = "variable of the peer's environment; may be repeated"
    add("--peer-env", type=assignment, action="append", default=[], metavar="KEY=VALUE", help=env_help)
    add = parser.add_argument_group("peer llamacpp").add_argument
    weights_help = "llama.cpp converts the weights of the GGUF file to this type"
    add("--peer-weights", choices=("F16", "BF16", "Q8_0", "F32"), default="F16", help=weights_help)
    add("--peer-gguf", type=Path, metavar="FILE", help="the model as a GGUF file; not needed for the default model")


def _add_temperature_flag(parser: argparse.ArgumentParser, default: float) -> None:
    parser.add_argument("--temperature", type=float, default=default, help="0 selects the likeliest token")


def _add_result_flags(parser: argparse.ArgumentParser, *, repeat: int) -> None:
    add = parser.add_argument_group("results").add_argument
    add("--repeat", type=integer_at_least_1, default=repeat, help="number of runs; figures are medians of the runs")
    add("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    add("--plot", type=Path, metavar="FILE", help="draw the figures to FILE, a PNG")
