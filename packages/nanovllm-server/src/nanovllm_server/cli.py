"""The command line of `nanovllm-server`. Slow imports are in functions, which keeps --help fast."""

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm_server.engine_flags import (
    add_draft_model_flag,
    add_engine_flags,
    find_draft_model_error,
    make_engine_config,
)
from nanovllm_server.flag_types import HelpFormatter, integer_in_range, positive_number

if TYPE_CHECKING:
    from nanovllm_server.settings import Settings

REASONING_PARSERS = ("auto", "none", "think")
TOOL_CALL_PARSERS = ("auto", "none", "qwen3_coder", "hermes", "minimax_m2", "deepseek_r1", "llama")
METRICS_PREFIXES = ("nanovllm", "vllm")
ROLES = ("prefill", "decode")
API_KEY_VARIABLE = "NANOVLLM_API_KEY"  # An environment variable.

# Default on machines with a GPU: one HTTP worker per CORES_PER_WORKER CPU cores, up to MAX_DEFAULT_WORKERS.
MAX_DEFAULT_WORKERS = 4
CORES_PER_WORKER = 4


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="nanovllm-server",
        description="Serve a language model over HTTP with an OpenAI-compatible chat completions API.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="directory, or repository of the Hugging Face Hub as organisation/name[@revision]; without MODEL, the "
        "default model, SmolLM2-135M-Instruct",
    )
    parser.add_argument("--version", action="version", version=f"nanovllm-server {version('nanovllm-server')}")
    http = parser.add_argument_group("http")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on")
    http.add_argument(
        "--port", type=integer_in_range(0, 65535), default=8000, help="port to listen on; 0: any free port"
    )
    http.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name that requests may use for the model; repeat for several names; default: the name of the directory "
        "or repository",
    )
    http.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"key that requests to /v1 must send; repeat for several keys; safer in a file or in {API_KEY_VARIABLE}",
    )
    http.add_argument(
        "--admin-api-key",
        metavar="KEY",
        help="key for POST /reset_prefix_cache, which does not exist without this flag; must differ from other keys",
    )
    http.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with further keys, one per line")
    http.add_argument(
        "--allowed-hosts",
        action="append",
        metavar="NAME",
        help="further names that the Host header may have, as NAME, *.NAME or *; addresses, names of private networks, "
        "--host and the machine's name are always allowed; repeat or separate by commas; default with an API key: *",
    )
    http.add_argument(
        "--allowed-origins",
        action="append",
        metavar="ORIGIN",
        help="origins whose web pages may use the server, as in https://example.com, or * for all; repeat or separate "
        "by commas; default: none",
    )
    http.add_argument(
        "--http-workers",
        type=integer_in_range(1),
        help=f"processes that serve HTTP; default: 1 on a CPU; with a GPU, one per {CORES_PER_WORKER} cores, at most "
        f"{MAX_DEFAULT_WORKERS}",
    )
    http.add_argument(
        "--max-queue",
        type=integer_in_range(0),
        default=1024,
        help="maximum number of waiting sequences, in addition to running sequences; further requests get a 429",
    )
    http.add_argument(
        "--max-body-mib",
        type=integer_in_range(1, 1024),
        default=16,
        help="maximum size of a request's body, in MiB; a larger body gets a 413",
    )
    http.add_argument(
        "--body-memory-mib",
        type=integer_in_range(1),
        metavar="MIB",
        help="memory for bodies of more than 64 KiB in each HTTP worker, in MiB; further bodies wait, and get a 503 "
        "after 10 s; default: twice --max-body-mib",
    )
    http.add_argument(
        "--request-timeout",
        type=positive_number,
        metavar="SECONDS",
        help="time limit of a request; a longer request gets a 504; default: none",
    )
    http.add_argument(
        "--drain-timeout",
        type=positive_number,
        default=30.0,
        metavar="SECONDS",
        help="time for running requests to end when the server stops",
    )
    http.add_argument(
        "--allow-priority", action="store_true", help="let requests set `priority`; otherwise such requests get a 400"
    )
    http.add_argument(
        "--worker-timeout",
        type=positive_number,
        default=10.0,
        metavar="SECONDS",
        help="an HTTP worker that does not respond for this time is replaced",
    )
    http.add_argument("--chat-template", help="Jinja template instead of the model's, or a file with a template")
    http.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default="auto",
        help="format of the model's reasoning; auto: the chat template determines the format",
    )
    http.add_argument(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        default="auto",
        help="format of the model's tool calls; auto: the chat template or the architecture determines the format",
    )
    model = parser.add_argument_group("model")
    add_engine_flags(model.add_argument, ("device", "dtype", "seed", "attention_backend"))
    model.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    add_draft_model_flag(model.add_argument)
    engine = parser.add_argument_group("engine")
    add_engine_flags(
        engine.add_argument,
        (
            "tensor_parallel_size",
            "expert_parallel",
            "dp_attention",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "target_step_ms",
            "gpu_memory_utilization",
            "cpu_cache_gib",
            "kv_cache_dtype",
            "state_dtype",
            "block_size",
            "prefix_caching",
            "kv_offload_gib",
            "kv_offload_dir",
            "kv_offload_disk_gib",
            "speculate",
            "num_speculative_tokens",
            "graph_mode",
            "compile",
            "depth",
        ),
    )
    engine.add_argument(
        "--multi-tenant",
        dest="prefix_hash",
        action="store_const",
        const="sha256",
        default=argparse.SUPPRESS,
        help="SHA-256 prefix hashes, which can't be forged, for tenants that do not trust each other",
    )
    _add_transfer_flags(parser)
    logs = parser.add_argument_group("logs and metrics")
    add_engine_flags(logs.add_argument, ("trace",))
    logs.add_argument(
        "--metrics-prefix",
        choices=METRICS_PREFIXES,
        default="nanovllm",
        help="prefix of the metrics' names; vllm: use vLLM's names and labels, for dashboards made for vLLM",
    )
    logs.add_argument("--log-format", choices=("text", "json"), default="text", help="format of the log")
    levels = ("debug", "info", "warning", "error")
    logs.add_argument("--log-level", choices=levels, default="info", help="lowest level of messages in the log")
    logs.add_argument("--log-prompts", action="store_true", help="write rendered prompts to the log")
    return parser


def _add_transfer_flags(parser: argparse.ArgumentParser) -> None:
    transfer = parser.add_argument_group("prefill and decode on different GPUs")
    transfer.add_argument(
        "--prefill-gpus",
        type=integer_in_range(1),
        metavar="N",
        help="start a second engine with N ranks, which computes long prompts; needs --decode-gpus; each engine has "
        "8 GiB of host memory (0.5 GiB on a CPU) unless --kv-offload-gib is set",
    )
    transfer.add_argument(
        "--decode-gpus",
        type=integer_in_range(1),
        metavar="N",
        help="number of ranks of the engine that generates answers; must equal --prefill-gpus",
    )
    transfer.add_argument(
        "--role",
        choices=ROLES,
        help="task of this server behind a router that sets kv_transfer_params; prefill: computes prompts for other "
        "servers; decode: fetches prompts from --transfer-peers; with a role, the server takes 8 GiB of host memory "
        "(0.5 GiB on a CPU) unless --kv-offload-gib is set",
    )
    transfer.add_argument(
        "--transfer-listen",
        metavar="ADDRESS",
        help="HOST:PORT at which a prefill server lets decode servers fetch computed prompts; port 0: any free port; "
        "default with --role prefill: 127.0.0.1:5600",
    )
    transfer.add_argument(
        "--transfer-host",
        metavar="HOST",
        help="name or address of this host for decode servers; default: the host of --transfer-listen",
    )
    transfer.add_argument(
        "--transfer-peers",
        # `make_engine_config` copies options whose names are fields of `EngineConfig`. The values of this option must
        # first be split, so its name is not that of the field `transfer_peers`.
        dest="transfer_peer_lists",
        action="append",
        metavar="ADDRESS",
        help="HOST:PORT of each prefill server from which this decode server may fetch; repeat or separate by commas",
    )
    add_engine_flags(transfer.add_argument, ("transfer_secret_file", "transfer_carrier"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the server. Returns the exit status: 0: stopped, 1: failed, 2: invalid settings, 130: interrupted."""
    options = make_parser().parse_args(arguments)

    # These imports take seconds.
    from nanovllm_core import ConfigError, EngineDeadError
    from nanovllm_models.errors import ModelError
    from nanovllm_server.observability.logs import configure_logs
    from nanovllm_server.processes.server import run
    from nanovllm_server.settings import SettingsError

    configure_logs(options.log_format, options.log_level)
    try:
        return asyncio.run(run(make_settings(options)))
    except (SettingsError, ConfigError, ModelError) as error:
        return _fail(str(error), 2)
    except (EngineDeadError, OSError, RuntimeError) as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130


def make_settings(options: argparse.Namespace) -> "Settings":
    """Makes the settings from the flags and the environment. Raises SettingsError."""
    from nanovllm_server.http.cross_origin import parse_allowed_origins
    from nanovllm_server.http.host_check import ANY_NAME, parse_allowed_hosts
    from nanovllm_server.settings import Settings, SettingsError, check_admin_key, check_keys, read_keys
    from nanovllm_server.transfer_settings import has_gpu, read_transfer_flags

    api_keys = tuple(options.api_key or ())
    if options.api_key_file is not None:
        api_keys += read_keys(options.api_key_file)
    if not api_keys and API_KEY_VARIABLE in os.environ:
        api_keys = (os.environ[API_KEY_VARIABLE],)
    try:
        allowed_hosts = parse_allowed_hosts(options.allowed_hosts or ())
        allowed_origins = parse_allowed_origins(options.allowed_origins or ())
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if not allowed_hosts and api_keys:
        # The key already protects the server: a page that attacks through DNS rebinding does not know the key.
        allowed_hosts = (ANY_NAME,)
    body_memory_mib = options.body_memory_mib or 2 * options.max_body_mib
    if body_memory_mib < options.max_body_mib:
        raise SettingsError(
            f"--body-memory-mib must be at least --max-body-mib, which is {options.max_body_mib}, not {body_memory_mib}"
        )
    transfer, overrides = read_transfer_flags(options)
    engine_config = make_engine_config(options, **overrides)
    if (error := find_draft_model_error(engine_config.speculate, options.draft_model)) is not None:
        raise SettingsError(error)
    return Settings(
        model=options.model,
        draft_model=options.draft_model,
        host=options.host,
        port=options.port,
        model_names=tuple(options.served_model_name) if options.served_model_name else None,
        api_keys=check_keys(api_keys),
        admin_api_key=check_admin_key(options.admin_api_key, api_keys),
        allowed_hosts=(*allowed_hosts, options.host, socket.gethostname()),
        allowed_origins=allowed_origins,
        http_workers=options.http_workers or _default_http_workers(on_gpu=has_gpu(engine_config.device)),
        load_format=options.load_format,
        chat_template=options.chat_template,
        reasoning_parser=None if options.reasoning_parser == "auto" else options.reasoning_parser,
        tool_call_parser=None if options.tool_call_parser == "auto" else options.tool_call_parser,
        max_queue=options.max_queue,
        max_body_bytes=options.max_body_mib << 20,
        body_memory_bytes=body_memory_mib << 20,
        request_timeout_s=options.request_timeout,
        drain_timeout_s=options.drain_timeout,
        worker_timeout_s=options.worker_timeout,
        log_format=options.log_format,
        log_level=options.log_level,
        log_prompts=options.log_prompts,
        metrics_prefix=options.metrics_prefix,
        allow_priority=options.allow_priority,
        transfer=transfer,
        engine_config=engine_config,
    )


def _default_http_workers(*, on_gpu: bool) -> int:
    # On a CPU, the model needs every core. One process can't send tokens as fast as a GPU generates tokens.
    if not on_gpu:
        return 1
    return max(1, min(MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)) // CORES_PER_WORKER))


def _fail(message: str, status: int) -> int:
    sys.stderr.write(f"nanovllm-server: {' '.join(message.split())}\n")
    return status
