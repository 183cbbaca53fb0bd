"""The entry point of `nanovllm-bench`. Imports a command's module late, which keeps --help fast."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm_server.bench.conversations import conversation_flags
from nanovllm_server.bench.flags import API_KEY_VARIABLE, DEFAULT_URL, build_parser
from nanovllm_server.bench.interference import interference_flags
from nanovllm_server.bench.workload import WorkloadShape
from nanovllm_server.engine_flags import find_draft_model_error, make_engine_config

if TYPE_CHECKING:
    from nanovllm_core import ModelSpec
    from nanovllm_models import ModelDirectory
    from nanovllm_server.bench.client import Endpoint
    from nanovllm_server.bench.offline.cases import OfflineBenchmark
    from nanovllm_server.bench.offline.peer_process import GGUFWeights, Peer
    from nanovllm_server.bench.report import OutputFiles
    from nanovllm_server.settings import LoadFormat

# Modules that only the extra `bench` installs.
EXTRA_MODULES = ("matplotlib", "tqdm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0 (success), 1 (failure), 2 (invalid settings) or 130 (Ctrl-C)."""
    exit_status = _run_command(build_parser().parse_args(arguments))
    from nanovllm_core.engine.thread_names import is_engine_thread_alive

    if is_engine_thread_alive():
        # A rank has failed, and the engine's thread waits for a GPU. A normal exit would wait for this thread forever.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_status)
    return exit_status


def _run_command(flags: argparse.Namespace) -> int:
    from nanovllm_core import EngineDeadError
    from nanovllm_server.bench.report import BenchError

    run_by_command = {
        "serve": _run_serve,
        "grammars": _run_grammars,
        "interference": _run_interference,
        "conversations": _run_conversations,
        "soak": _run_soak,
        "speculation": _run_speculation,
        "trace": _run_trace,
        "kernels": _run_kernels,
    }
    try:
        missing_modules = [name for name in EXTRA_MODULES if importlib.util.find_spec(name) is None]
        if missing_modules:
            raise BenchError(f"{', '.join(missing_modules)} not found: install the extra 'bench' of nanovllm-server")
        run_by_command.get(flags.command, _run_offline)(flags)
    except BenchError as error:
        sys.stderr.write(f"nanovllm-bench: {error}\n")
        return error.exit_status
    except EngineDeadError as error:
        sys.stderr.write(f"nanovllm-bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _run_offline(flags: argparse.Namespace) -> None:
    _set_threads(flags.threads)
    import nanovllm_models
    from nanovllm_core import ConfigError, RequestError
    from nanovllm_server.bench.offline import comparison
    from nanovllm_server.bench.report import InvalidSettingsError

    try:
        model, spec = _load_models(flags, flags.load_format)
        options = comparison.OfflineOptions(
            model=model.path,
            load_format=flags.load_format,
            # Without --prefix-len, prompts share no prefix: a prefix cache would find nothing.
            config=make_engine_config(flags, prefix_caching=flags.command == "throughput" and flags.prefix_len > 0),
            temperature=flags.temperature,
            repeat=flags.repeat,
            peer=_make_peer(flags, model),
            files=_make_output_files(flags),
        )
        comparison.run(options, spec, _make_offline_benchmark(flags, spec.vocab_size))
    except (ConfigError, RequestError, nanovllm_models.ModelError) as error:
        raise InvalidSettingsError(str(error)) from error


def _make_offline_benchmark(flags: argparse.Namespace, vocab_size: int) -> "OfflineBenchmark":
    from nanovllm_server.bench.offline import cases

    if flags.command == "throughput":
        return cases.throughput_benchmark(_make_workload_shape(flags), vocab_size)
    if flags.command == "latency":
        return cases.latency_benchmark(flags.batch, flags.input_len, flags.output_len, vocab_size)
    return cases.prefill_benchmark(flags.num_requests, flags.input_len, vocab_size)


def _run_serve(flags: argparse.Namespace) -> None:
    from nanovllm_server.bench import serve

    options = serve.ServeOptions(
        endpoint=_parse_endpoint(flags),
        model=flags.served_model,
        shape=_make_workload_shape(flags),
        rates=flags.rate,
        concurrencies=flags.concurrency,
        temperature=flags.temperature,
        seed=flags.seed,
        repeat=flags.repeat,
        files=_make_output_files(flags),
    )
    serve.run(options)


def _run_grammars(flags: argparse.Namespace) -> None:
    from nanovllm_server.bench import grammars

    options = grammars.GrammarsOptions(
        endpoint=_parse_endpoint(flags),
        model=flags.served_model,
        num_streams=flags.streams,
        output_len=flags.output_len,
        repeat=flags.repeat,
        files=_make_output_files(flags),
    )
    grammars.run(options)


def _run_interference(flags: argparse.Namespace) -> None:
    from nanovllm_server.bench.server_cases import case_command

    case_command.run(interference_flags.make_options(flags, DEFAULT_URL, os.environ.get(API_KEY_VARIABLE)))


def _run_conversations(flags: argparse.Namespace) -> None:
    from nanovllm_server.bench.server_cases import case_command

    case_command.run(conversation_flags.make_options(flags, DEFAULT_URL, os.environ.get(API_KEY_VARIABLE)))


def _run_soak(flags: argparse.Namespace) -> None:
    from nanovllm_server.bench.report import InvalidSettingsError
    from nanovllm_server.bench.soak import soak_command

    if flags.warm_up_minutes >= flags.minutes:
        raise InvalidSettingsError(
            f"--warm-up-minutes {flags.warm_up_minutes:g} must be less than --minutes {flags.minutes:g}"
        )
    options = soak_command.SoakOptions(
        endpoint=_parse_endpoint(flags),
        model=flags.served_model,
        server_pid=flags.server_pid,
        num_clients=flags.clients,
        max_prompt_words=flags.max_prompt_words,
        duration_s=60 * flags.minutes,
        max_warm_up_s=60 * flags.warm_up_minutes,
        min_flat_s=flags.flat_seconds,
        sample_interval_s=flags.sample_interval,
        max_growth_percent=flags.max_growth,
        seed=flags.seed,
        files=_make_output_files(flags),
    )
    soak_command.run(options)


def _run_speculation(flags: argparse.Namespace) -> None:
    _set_threads(flags.threads)
    import nanovllm_models
    from nanovllm_core import ConfigError, RequestError
    from nanovllm_server.bench.report import InvalidSettingsError
    from nanovllm_server.bench.speculation import speculation_command

    try:
        model, spec = _load_models(flags, "auto")
        options = speculation_command.SpeculationOptions(
            config=make_engine_config(flags),
            max_per_kind=flags.prompts,
            num_rounds=flags.rounds,
            output_len=flags.output_len,
            files=_make_output_files(flags),
        )
        speculation_command.run(options, spec, nanovllm_models.load_tokenizer(model.path))
    except (ConfigError, RequestError, nanovllm_models.ModelError, nanovllm_models.TemplateError) as error:
        raise InvalidSettingsError(str(error)) from error


def _load_models(flags: argparse.Namespace, load_format: "LoadFormat") -> "tuple[ModelDirectory, ModelSpec]":
    """Returns the model's directory and spec. The spec includes the draft model if the flags name one.

    Raises ModelError or InvalidSettingsError.
    """
    import nanovllm_models
    from nanovllm_server.bench.report import InvalidSettingsError

    if (error := find_draft_model_error(flags.speculate, flags.draft_model)) is not None:
        raise InvalidSettingsError(error)
    with_weights = load_format != "dummy"
    model, draft = nanovllm_models.find_model(flags.model, with_weights=with_weights), None
    if flags.draft_model is not None:
        draft = nanovllm_models.find_model(flags.draft_model, with_weights=with_weights)
    return model, nanovllm_models.load(model.path, load_format=load_format, served_name=model.name, draft=draft)


def _set_threads(num_threads: int | None) -> None:
    """Sets how many threads torch uses in this process and its child processes. None keeps torch's default."""
    if num_threads is not None:
        # Torch reads these variables when it is imported. `torch.set_num_threads` would affect only the calling thread.
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(num_threads)


def _run_trace(flags: argparse.Namespace) -> None:
    from nanovllm_server.bench import trace

    trace.run(flags.file, flags.steps, flags.json)


def _run_kernels(flags: argparse.Namespace) -> None:
    from nanovllm_server.bench import kernels

    kernels.run(flags.only, flags.repeat, _make_output_files(flags))


def _make_peer(flags: argparse.Namespace, model: "ModelDirectory") -> "Peer | None":
    from nanovllm_server.bench.offline.peer_process import Peer

    if flags.peer == "none":
        return None
    return Peer(flags.peer, flags.peer_python, dict(flags.peer_env), _find_gguf_weights(flags, model))


def _find_gguf_weights(flags: argparse.Namespace, model: "ModelDirectory") -> "GGUFWeights | None":
    """Finds the GGUF file for llama.cpp. Returns None for other peers. Raises InvalidSettingsError or ModelError."""
    from nanovllm_models.default_model import cache_directory, find_source_file, is_default_model
    from nanovllm_server.bench.offline.peer_process import GGUFWeights
    from nanovllm_server.bench.report import InvalidSettingsError

    if flags.peer != "llamacpp":
        return None
    if flags.load_format == "dummy":
        raise InvalidSettingsError("peer llamacpp has no dummy weights: leave --load-format out")
    gguf_file: Path | None = flags.peer_gguf
    if gguf_file is None and is_default_model(model.path):
        gguf_file = find_source_file()
    if gguf_file is None:
        raise InvalidSettingsError(
            f"peer llamacpp needs the weights of {model.name} as a GGUF file: name it with --peer-gguf"
        )
    if not gguf_file.is_file():
        raise InvalidSettingsError(f"--peer-gguf {gguf_file} is not a file")
    return GGUFWeights(str(gguf_file.resolve()), flags.peer_weights, str(cache_directory() / "llamacpp"))


def _parse_endpoint(flags: argparse.Namespace) -> "Endpoint":
    from nanovllm_server.bench.client import parse_base_url

    return parse_base_url(flags.url, os.environ.get(API_KEY_VARIABLE))


def _make_output_files(flags: argparse.Namespace) -> "OutputFiles":
    from nanovllm_server.bench.report import OutputFiles

    return OutputFiles(flags.json, vars(flags).get("plot"))


def _make_workload_shape(flags: argparse.Namespace) -> WorkloadShape:
    return WorkloadShape(flags.num_requests, flags.input_len, flags.output_len, flags.prefix_len)


if __name__ == "__main__":
    sys.exit(main())
