"""The command line of `nanovllm-server`. Imports torch and the server late, so that --help responds at once."""

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm_server.settings import Settings

DTYPES = ("auto", "float32", "bfloat16", "float16")
BACKENDS = ("torch", "triton", "flash", "cutedsl", "fastest")
GRAPH_MODES = ("none", "full_decode_only", "piecewise", "full")
STATE_DTYPES = ("float32", "bfloat16")
REASONING_PARSERS = ("auto", "none", "think")
TOOL_CALL_PARSERS = ("auto", "none", "qwen3_coder", "hermes", "minimax_m2", "deepseek_r1", "llama")
KEY_VARIABLE = "NANOVLLM_API_KEY"

# Exists on machines and in containers with a GPU. Importing torch to ask it would take seconds.
NVIDIA = Path("/dev/nvidiactl")
MOST_WORKERS = 4
CORES_PER_WORKER = 4


def parser() -> argparse.ArgumentParser:
    """The parser of the flags."""
    flags = argparse.ArgumentParser(
        prog="nanovllm-server",
        description="Serve a language model over HTTP with an OpenAI-compatible chat completions API.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = flags.add_argument
    add("model", nargs="?", type=Path, help="checkpoint directory; without it, a small bundled model")
    add("--version", action="version", version=f"nanovllm-server {version('nanovllm-server')}")
    http = flags.add_argument_group("http")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on")
    http.add_argument("--port", type=_integer(0, 65535), default=8000, help="port to listen on; 0 for any free one")
    http.add_argument("--served-model-name", nargs="+", help="names that requests may use for the model")
    http.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"key that requests must send; repeat for several keys; safer in a file or in {KEY_VARIABLE}",
    )
    http.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with further keys, one per line")
    http.add_argument("--http-workers", type=_integer(1), help="processes that serve HTTP; by device and cores")
    http.add_argument("--max-queue", type=_integer(0), default=1024, help="sequences that may wait; more get a 429")
    http.add_argument(
        "--max-body-mib", type=_integer(1, 1024), default=16, help="size of a request's body; larger ones get a 413"
    )
    http.add_argument(
        "--request-timeout", type=_seconds, metavar="SECONDS", help="longest time of a request; then it gets a 504"
    )
    http.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="time that running requests have to end when the server is told to stop",
    )
    http.add_argument("--chat-template", help="Jinja template to use instead of the model's, or a file with it")
    http.add_argument("--reasoning-parser", choices=REASONING_PARSERS, default="auto", help="how the model reasons")
    http.add_argument("--tool-call-parser", choices=TOOL_CALL_PARSERS, default="auto", help="how the model calls tools")
    model = flags.add_argument_group("model")
    model.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the model runs")
    model.add_argument("--dtype", choices=DTYPES, default="auto", help="dtype of weights and activations")
    model.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    model.add_argument("--seed", type=int, default=0, help="base of the seeds of requests without a seed")
    model.add_argument("--attention-backend", choices=("auto", *BACKENDS), default="auto", help="attention kernels")
    engine = flags.add_argument_group("engine")
    engine.add_argument("--max-model-len", type=_integer(1), help="most tokens of a request's prompt and output")
    engine.add_argument("--max-num-seqs", type=_integer(1), help="most sequences that run at once")
    engine.add_argument("--max-num-batched-tokens", type=_integer(1), help="most tokens computed in a step")
    engine.add_argument(
        "--target-step-ms",
        type=float,
        metavar="MS",
        help="longest time of a step with prompts and decodes; a shorter one makes streams smoother, prompts slower",
    )
    engine.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="share of the GPU's memory to use")
    engine.add_argument("--cpu-cache-gib", type=float, default=2.0, help="size of the KV cache on a CPU, in GiB")
    engine.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="dtype of keys and values")
    engine.add_argument("--state-dtype", choices=STATE_DTYPES, default="float32", help="dtype of recurrent states")
    engine.add_argument(
        "--block-size", type=int, choices=(16, 32, 64, 128), help="tokens per KV block; by the attention kernels"
    )
    engine.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt from its start")
    engine.add_argument("--multi-tenant", action="store_true", help="SHA-256 prefix hashes, which can't be forged")
    engine.add_argument(
        "--graph-mode",
        choices=("auto", *GRAPH_MODES),
        default="auto",
        help="which steps are replayed from CUDA graphs",
    )
    engine.add_argument("--no-compile", action="store_true", help="no torch.compile between attention operators")
    engine.add_argument("--depth", type=int, choices=(1, 2), help="steps in flight; by default 2 on a GPU")
    logs = flags.add_argument_group("logs")
    logs.add_argument("--trace", type=Path, metavar="FILE", help="write the engine's steps to FILE, for Perfetto")
    logs.add_argument("--log-format", choices=("text", "json"), default="text", help="format of the log")
    logs.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="lowest level")
    logs.add_argument("--log-prompts", action="store_true", help="write rendered prompts to the log")
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the server. Returns the exit status: 0 after a stop, 1 after a failure, 2 for invalid settings."""
    options = parser().parse_args(arguments)

    # These imports take seconds.
    from nanovllm_core import ConfigError, EngineDeadError
    from nanovllm_models.errors import ModelError
    from nanovllm_server.observability.logs import configure_logs
    from nanovllm_server.processes.server import run
    from nanovllm_server.settings import SettingsError

    configure_logs(options.log_format, options.log_level)
    try:
        return asyncio.run(run(settings(options)))
    except (SettingsError, ConfigError, ModelError) as error:
        return _fail(str(error), 2)
    except (EngineDeadError, OSError, RuntimeError) as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130


def settings(options: argparse.Namespace) -> "Settings":
    """The settings from the flags and the environment. Raises SettingsError."""
    from nanovllm_core import EngineConfig
    from nanovllm_server.settings import Settings, check_keys, read_keys

    api_keys = tuple(options.api_key or ())
    if options.api_key_file is not None:
        api_keys += read_keys(options.api_key_file)
    if not api_keys and KEY_VARIABLE in os.environ:
        api_keys = (os.environ[KEY_VARIABLE],)
    return Settings(
        model=options.model,
        host=options.host,
        port=options.port,
        names=tuple(options.served_model_name) if options.served_model_name else None,
        api_keys=check_keys(api_keys),
        http_workers=options.http_workers or _http_workers(options.device),
        load_format=options.load_format,
        dtype=_choice(options.dtype),
        chat_template=options.chat_template,
        reasoning_parser=_choice(options.reasoning_parser),
        tool_call_parser=_choice(options.tool_call_parser),
        max_queue=options.max_queue,
        max_body_bytes=options.max_body_mib << 20,
        request_timeout_s=options.request_timeout,
        drain_timeout_s=options.drain_timeout,
        log_format=options.log_format,
        log_level=options.log_level,
        log_prompts=options.log_prompts,
        engine=EngineConfig(
            device=_choice(options.device),
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            target_step_ms=options.target_step_ms,
            kv_cache_dtype=options.kv_cache_dtype,
            state_dtype=options.state_dtype,
            block_size=options.block_size,
            gpu_memory_utilization=options.gpu_memory_utilization,
            cpu_cache_gib=options.cpu_cache_gib,
            prefix_caching=not options.no_prefix_caching,
            prefix_hash="sha256" if options.multi_tenant else "fast",
            depth=options.depth,
            seed=options.seed,
            attention_backend=_choice(options.attention_backend),
            graph_mode=_choice(options.graph_mode),
            compile=False if options.no_compile else None,
            trace=options.trace,
        ),
    )


def _http_workers(device: str) -> int:
    # On a CPU, the model needs every core. A GPU generates tokens faster than one process can send them.
    if device == "cpu" or not NVIDIA.exists():
        return 1
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) // CORES_PER_WORKER))


def _choice(value: Any) -> Any:
    return None if value == "auto" else value


def _fail(message: str, status: int) -> int:
    sys.stderr.write(f"nanovllm-server: {' '.join(message.split())}\n")
    return status


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"must be at least {low}" + (f" and at most {high}" if high else ""))
        return value

    return integer
