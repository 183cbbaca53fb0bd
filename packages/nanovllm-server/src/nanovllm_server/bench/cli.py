"""The command line of `nanovllm-bench`. Imports programs late, so that --help responds at once."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm_server.bench.flag_types import (
    DEFAULT_URL,
    assignment,
    at_least_two,
    lengths,
    non_negative,
    positive,
    rate,
)
from nanovllm_server.bench.interference import flags as interference_flags
from nanovllm_server.bench.workload import Lengths, WorkloadShape
from nanovllm_server.engine_flags import add_engine_flags, engine_config

if TYPE_CHECKING:
    from nanovllm_core import EngineConfig
    from nanovllm_server.bench.cases import Program
    from nanovllm_server.bench.peers import GGUF, Peer
    from nanovllm_server.bench.report import Results

KEY_VARIABLE = "NANOVLLM_API_KEY"
PEERS = ("vllm", "transformers", "llamacpp", "none")
NANO_BENCH = Lengths(100, 1024)
# Modules of the extra `bench` that no other dependency of the server installs.
EXTRA_MODULES = ("matplotlib", "tqdm")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, [None], [], "") else super()._get_help_string(action)


def parser() -> argparse.ArgumentParser:
    """The parser of the programs and their flags."""
    flags = argparse.ArgumentParser(prog="nanovllm-bench", description="Measure the engine, a server or the kernels.")
    programs = flags.add_subparsers(dest="program", required=True, metavar="PROGRAM")

    def program(name: str, text: str) -> argparse.ArgumentParser:
        return programs.add_parser(name, formatter_class=_Formatter, help=text, description=text)

    throughput = program("throughput", "tokens per second of many simultaneous requests; by default nano-bench")
    _add_shape(throughput, NANO_BENCH, NANO_BENCH, "; above 0, prefix caching is on")
    _add_engine(throughput, temperature=0.6)

    latency = program("latency", "tokens per second of a few requests, after each has its first token")
    latency.add_argument(
        "--batch", type=positive, nargs="+", default=[1, 8], help="simultaneous requests; one case each"
    )
    latency.add_argument("--input-len", type=positive, default=64, help="tokens of a prompt")
    latency.add_argument("--output-len", type=at_least_two, default=128, help="tokens to generate, at least 2")
    _add_engine(latency, temperature=0.0)

    prefill = program("prefill", "prompt tokens per second of requests that generate one token each")
    prefill.add_argument("--num-requests", type=positive, default=64, help="simultaneous prompts")
    prefill.add_argument("--input-len", type=positive, default=2048, help="tokens of a prompt")
    _add_engine(prefill, temperature=0.0)

    serve = program(
        "serve", "latencies and tokens per second of any OpenAI-compatible server over streamed chat completions"
    )
    serve.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"base URL; its key comes from ${KEY_VARIABLE}")
    serve.add_argument("--model", dest="served_model", help="model to request; without it, the first one listed")
    _add_shape(serve, Lengths(512, 512), Lengths(512, 512), "")
    serve.add_argument(
        "--rate",
        type=rate,
        nargs="+",
        default=[None],
        help="requests per second, arriving as a Poisson process; inf: all at once; several: one after another",
    )
    serve.add_argument(
        "--concurrency", type=positive, nargs="+", default=[None], help="most requests at once; several: in turn"
    )
    serve.add_argument("--seed", type=int, default=0, help="a new seed makes prompts that no prefix cache has")
    _add_common(serve, temperature=0.6, repeat=1)

    grammars = program("grammars", "gaps between tokens of free streams beside streams that follow schemas")
    grammars.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"base URL; its key comes from ${KEY_VARIABLE}")
    grammars.add_argument("--model", dest="served_model", help="model to request; without it, the first one listed")
    grammars.add_argument("--streams", type=at_least_two, default=64, help="simultaneous streams; half follow a schema")
    grammars.add_argument("--output-len", type=at_least_two, default=256, help="tokens of each answer")
    grammars.add_argument("--repeat", type=positive, default=5, help="rounds of all mixes")
    grammars.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")

    interference_flags.add_flags(program("interference", interference_flags.SUMMARY), KEY_VARIABLE)

    trace = program("trace", "times of steps on host and device, and idle times of the device, from a file of --trace")
    trace.add_argument("file", type=Path, help="file that --trace wrote")
    trace.add_argument("--steps", type=lengths, metavar="N[..M]", help="only step N, or steps N to M")
    trace.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")

    kernels = program("kernels", "bytes and operations per second of the kernels; needs a GPU")
    kernels.add_argument("--only", default="", metavar="WORD", help="only kernels with WORD in their names")
    _add_results(kernels, repeat=1)
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark. Returns the exit status: 0 for success, 1 after a failure, 2 for invalid settings."""
    options = parser().parse_args(arguments)
    from nanovllm_server.bench.report import BenchError

    try:
        _check_extra()
        if options.program == "serve":
            _serve(options)
        elif options.program == "grammars":
            _grammars(options)
        elif options.program == "interference":
            from nanovllm_server.bench.interference import program

            program.run(interference_flags.job_from(options, os.environ.get(KEY_VARIABLE)))
        elif options.program == "trace":
            from nanovllm_server.bench import trace
            from nanovllm_server.bench.report import Results

            trace.run(options.file, options.steps, Results(options.json, None))
        elif options.program == "kernels":
            from nanovllm_server.bench import kernels

            kernels.run(options.only, options.repeat, _results(options))
        else:
            return _compare(options)
    except BenchError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    return 0


def _check_extra() -> None:
    from nanovllm_server.bench.report import BenchError

    missing = [name for name in EXTRA_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise BenchError(f"{', '.join(missing)} not found: pip install 'nanovllm-server[bench]'")


def _compare(options: argparse.Namespace) -> int:
    if options.threads is not None:
        # Must precede the import of torch: `set_num_threads` would affect the calling thread only.
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)

    import nanovllm_models
    from nanovllm_core import ConfigError, RequestError
    from nanovllm_server.bench import compare

    results = _results(options)
    try:
        model = options.model or nanovllm_models.default_model_path()
        spec = nanovllm_models.load(model, load_format=options.load_format)
        setting = compare.Setting(
            model=model,
            load_format=options.load_format,
            config=_engine_config(options),
            temperature=options.temperature,
            repeat=options.repeat,
            peer=_peer(options, model),
            results=results,
        )
        compare.run(setting, spec, _program(options, spec.vocab_size))
    except (ConfigError, RequestError, nanovllm_models.ModelError) as error:
        return _fail(error, 2)
    return 0


def _program(options: argparse.Namespace, vocab_size: int) -> "Program":
    from nanovllm_server.bench import cases

    if options.program == "throughput":
        return cases.throughput(_shape(options), vocab_size)
    if options.program == "latency":
        return cases.latency(options.batch, options.input_len, options.output_len, vocab_size)
    return cases.prefill(options.num_requests, options.input_len, vocab_size)


def _serve(options: argparse.Namespace) -> None:
    from nanovllm_server.bench import serve
    from nanovllm_server.bench.client import parse_base_url

    serve.run(
        serve.ServeJob(
            endpoint=parse_base_url(options.url, os.environ.get(KEY_VARIABLE)),
            model=options.served_model,
            shape=_shape(options),
            rates=options.rate,
            concurrencies=options.concurrency,
            temperature=options.temperature,
            seed=options.seed,
            repeat=options.repeat,
            results=_results(options),
        )
    )


def _grammars(options: argparse.Namespace) -> None:
    from nanovllm_server.bench import grammars
    from nanovllm_server.bench.client import parse_base_url
    from nanovllm_server.bench.report import Results

    grammars.run(
        grammars.GrammarsJob(
            endpoint=parse_base_url(options.url, os.environ.get(KEY_VARIABLE)),
            model=options.served_model,
            num_streams=options.streams,
            output_len=options.output_len,
            repeat=options.repeat,
            results=Results(options.json, None),
        )
    )


def _engine_config(options: argparse.Namespace) -> "EngineConfig":
    # Random prompts share only this prefix; without one, lookups in the cache would cost time.
    return engine_config(options, prefix_caching=options.program == "throughput" and options.prefix_len > 0)


def _peer(options: argparse.Namespace, model: Path) -> "Peer | None":
    from nanovllm_server.bench.peers import Peer

    if options.peer == "none":
        return None
    return Peer(options.peer, options.peer_python, dict(options.peer_env), _gguf(options, model))


def _gguf(options: argparse.Namespace, model: Path) -> "GGUF | None":
    """The weights for llama.cpp. Raises BenchError if no file is known, and ModelError like `find_source_file`."""
    from nanovllm_models.default_model import cache_directory, find_source_file, is_default_model
    from nanovllm_server.bench.peers import GGUF
    from nanovllm_server.bench.report import BenchError

    if options.peer != "llamacpp":
        return None
    if options.load_format == "dummy":
        raise BenchError("peer llamacpp has no dummy weights: leave --load-format out")
    source: Path | None = options.peer_gguf
    if source is None and is_default_model(model):
        source = find_source_file()
    if source is None:
        raise BenchError(f"peer llamacpp needs the weights of {model.name} as a GGUF file: name it with --peer-gguf")
    if not source.is_file():
        raise BenchError(f"--peer-gguf {source} is not a file")
    return GGUF(str(source.resolve()), options.peer_weights, str(cache_directory() / "llamacpp"))


def _results(options: argparse.Namespace) -> "Results":
    from nanovllm_server.bench.report import Results

    return Results(options.json, options.plot)


def _shape(options: argparse.Namespace) -> WorkloadShape:
    return WorkloadShape(options.num_requests, options.input_len, options.output_len, options.prefix_len)


def _add_shape(program: argparse.ArgumentParser, inputs: Lengths, outputs: Lengths, about_prefix: str) -> None:
    add = program.add_argument_group("work").add_argument
    add("--num-requests", type=positive, default=256, help="total number of requests")
    add("--input-len", type=lengths, default=inputs, metavar="N[..M]", help="tokens of a prompt")
    add("--output-len", type=lengths, default=outputs, metavar="N[..M]", help="tokens to generate per request")
    add(
        "--prefix-len",
        type=non_negative,
        default=0,
        help=f"additional tokens with which all prompts begin{about_prefix}",
    )


def _add_engine(program: argparse.ArgumentParser, *, temperature: float) -> None:
    """Adds the flags of all programs that run an engine, ours or a peer."""
    _add_common(program, temperature=temperature, repeat=3)
    shared = program.add_argument_group("engine, and peer")
    add = shared.add_argument
    add("model", nargs="?", type=Path, help="checkpoint directory; without it, the default model")
    add(
        "--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights, needs only config.json"
    )
    add("--threads", type=positive, help="threads of torch")
    add_engine_flags(
        shared.add_argument,
        (
            "device",
            "dtype",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "gpu_memory_utilization",
            "state_dtype",
        ),
    )
    names = ("cpu_cache_gib", "kv_cache_dtype", "depth", "graph_mode", "compile", "trace")
    add_engine_flags(program.add_argument_group("engine").add_argument, names)
    peer = program.add_argument_group("peer").add_argument
    peer("--peer", choices=PEERS, default="none", help="engine to compare to in the same call")
    peer("--peer-python", type=Path, default=Path(sys.executable), metavar="PATH", help="interpreter that has the peer")
    peer(
        "--peer-env",
        type=assignment,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="variable of the peer's environment; may be repeated",
    )
    llamacpp = program.add_argument_group("peer llamacpp").add_argument
    llamacpp(
        "--peer-weights",
        choices=("F16", "BF16", "Q8_0", "F32"),
        default="F16",
        help="file type of the weights, converted from the GGUF file",
    )
    llamacpp("--peer-gguf", type=Path, metavar="FILE", help="the model as GGUF; the default model has one")


def _add_common(program: argparse.ArgumentParser, *, temperature: float, repeat: int) -> None:
    program.add_argument("--temperature", type=float, default=temperature, help="0 selects the likeliest token")
    _add_results(program, repeat=repeat)


def _add_results(program: argparse.ArgumentParser, *, repeat: int) -> None:
    add = program.add_argument_group("results").add_argument
    add("--repeat", type=positive, default=repeat, help="runs; figures are their medians")
    add("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    add("--plot", type=Path, metavar="FILE", help="draw the figures to FILE, a PNG")


def _fail(error: Exception, status: int) -> int:
    sys.stderr.write(f"nanovllm-bench: {error}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
