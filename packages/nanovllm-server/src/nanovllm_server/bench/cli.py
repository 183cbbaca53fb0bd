"""The command line of `nanovllm-bench`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm_core import EngineConfig


def parser() -> argparse.ArgumentParser:
    """The subcommands and their flags."""
    flags = argparse.ArgumentParser(prog="nanovllm-bench", description="Measure the engine.")
    programs = flags.add_subparsers(dest="program", required=True)
    plain = argparse.ArgumentDefaultsHelpFormatter

    latency = programs.add_parser("latency", formatter_class=plain, help="decode rate of small batches, beside a peer")
    latency.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="requests at once")
    latency.add_argument("--input-len", type=int, default=64, help="tokens of a prompt")
    latency.add_argument("--output-len", type=int, default=128, help="tokens to make")
    latency.add_argument("--repeat", type=int, default=3, help="runs; the median counts")
    latency.add_argument("--peer", choices=("transformers", "none"), default="transformers", help="whom to compare to")

    throughput = programs.add_parser("throughput", formatter_class=plain, help="nano-bench: many requests at once")
    throughput.add_argument("--num-requests", type=int, default=256, help="requests at once")
    throughput.add_argument("--min-len", type=int, default=100, help="fewest tokens in, and out")
    throughput.add_argument("--max-len", type=int, default=1024, help="most tokens in, and out")
    throughput.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")

    for program in (latency, throughput):
        program.add_argument("model", nargs="?", type=Path, help="checkpoint directory; without it, the default model")
        program.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the model runs")
        program.add_argument(
            "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="dtype"
        )
        program.add_argument("--threads", type=int, help="threads of torch, here and in the peer")
        program.add_argument("--max-num-seqs", type=int, help="most requests running at once")
        program.add_argument("--max-num-batched-tokens", type=int, help="most tokens computed in a step")
        program.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="share of the GPU's memory")
        program.add_argument("--cpu-cache-gib", type=float, default=2.0, help="size of the KV cache on a CPU, in GiB")
        program.add_argument("--depth", type=int, choices=(1, 2), default=2, help="steps in flight")
        program.add_argument("--json", type=Path, help="file for all figures")
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns the exit status."""
    options = parser().parse_args(arguments)
    if options.threads is not None:
        # Before torch is imported: a later call reaches only the thread that makes it.
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)

    import nanovllm_models
    from nanovllm_core import ConfigError
    from nanovllm_server.bench import latency, throughput

    try:
        model = options.model or nanovllm_models.default_model_path()
        config = _engine_config(options)
        if options.program == "latency":
            latency.run(
                latency.LatencyJob(
                    model=model,
                    batches=tuple(options.batch),
                    input_len=options.input_len,
                    output_len=options.output_len,
                    repeat=options.repeat,
                    with_peer=options.peer != "none",
                    engine=config,
                    json=options.json,
                )
            )
        else:
            throughput.run(
                throughput.ThroughputJob(
                    model=model,
                    num_requests=options.num_requests,
                    min_len=options.min_len,
                    max_len=options.max_len,
                    load_format=options.load_format,
                    engine=config,
                    json=options.json,
                )
            )
    except (ConfigError, nanovllm_models.ModelError) as error:
        sys.stderr.write(f"nanovllm-bench: {error}\n")
        return 2
    return 0


def _engine_config(options: argparse.Namespace) -> "EngineConfig":
    import torch

    from nanovllm_core import EngineConfig

    return EngineConfig(
        device=None if options.device == "auto" else options.device,
        dtype=None if options.dtype == "auto" else getattr(torch, options.dtype),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        gpu_memory_utilization=options.gpu_memory_utilization,
        cpu_cache_gib=options.cpu_cache_gib,
        # Repetitions would find their prompts there.
        prefix_caching=False,
        depth=options.depth,
    )


if __name__ == "__main__":
    sys.exit(main())
