"""Measure the collectives of this host's GPUs, or replay a graph of collectives many times. Each GPU has a process.

    python -m nanovllm_kernels.benchmarks.collectives [--gpus N] [--only WORD] [--json FILE]
    python -m nanovllm_kernels.benchmarks.collectives --stress REPLAYS [--gpus N] [--timeout-s SECONDS]

Figures are median microseconds per call, over replays of a CUDA graph of many calls on bf16 tensors. Each column
is for one kind of kernel: one-shot, two-shot or NCCL. A dash means that the operator has no kernel of this kind, or
that the kernel's buffers are too small. `all_reduce_norm` also adds a residual and computes RMSNorm. Only one-shot
does this in one kernel.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from nanovllm_kernels.benchmarks.collective_stress import replay_collectives
from nanovllm_kernels.benchmarks.inputs import DTYPE, random
from nanovllm_kernels.benchmarks.ranks import run_ranks
from nanovllm_kernels.collective.collective_reference import TorchCollectives
from nanovllm_kernels.platform import describe_device, has_cuda

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
HIDDEN_SIZES = (4096, 8192)
# Calls in a graph, copies of the inputs, and timed replays. Ranks start a replay at different times: with many calls,
# this difference adds little to the time per call.
NUM_CALLS, NUM_COPIES, NUM_REPLAYS = 320, 16, 11
UNLIMITED = 1 << 40
# For each column of the output: maximum number of bytes for the one-shot kernels, and for the two-shot kernels.
LIMITS = {"one-shot": (UNLIMITED, 0), "two-shot": (0, UNLIMITED), "NCCL": (0, 0)}
OPERATORS = ("all_reduce_norm", "all_reduce", "all_gather", "reduce_scatter", "exchange_columns")


@dataclass(frozen=True)
class CollectiveFigure:
    """Microseconds per call of an operator on [num_rows, hidden_size], by column. None: the column lacks a kernel."""

    operator: str
    num_rows: int
    hidden_size: int
    microseconds: dict[str, float | None]


class NoKernelError(Exception):
    """Says that no kernel of the measured column can do a call."""


class NoFallback(TorchCollectives):
    """Replaces NCCL in the columns that measure our kernels: a call that would use NCCL fails."""

    def __getattribute__(self, name: str) -> object:
        """Raise NoKernelError."""
        raise NoKernelError(name)


def main() -> None:
    """Measure or replay collectives on all GPUs."""
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm_kernels.benchmarks.collectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=int, help="number of GPUs; all by default")
    parser.add_argument("--only", default="", help="measure only operators whose names contain this word")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--stress", type=int, metavar="REPLAYS", help="replay a graph and check its results instead")
    parser.add_argument("--timeout-s", type=float, default=60, help="time limit of 1,000 replays of --stress")
    arguments = parser.parse_args()
    num_gpus_here = torch.cuda.device_count()
    num_gpus = arguments.gpus or num_gpus_here
    if not has_cuda() or not 2 <= num_gpus <= num_gpus_here:
        sys.exit(
            f"needs at least 2 NVIDIA GPUs (Ampere or newer); --gpus is {num_gpus}, this machine has {num_gpus_here}"
        )
    if arguments.stress is not None:
        run_ranks(replay_collectives, num_gpus, "cuda", arguments.stress, arguments.timeout_s)
    else:
        run_ranks(print_figures, num_gpus, "cuda", arguments.only, arguments.json)


def print_figures(device: torch.device, name_part: str, json_path: Path | None) -> None:
    """Measure the operators whose names contain `name_part`. Rank 0 prints the figures and writes them to a file."""
    torch.set_grad_enabled(False)
    info, is_first = describe_device(device), dist.get_rank() == 0
    nccl_version = ".".join(map(str, torch.cuda.nccl.version()))
    lines = [f"{dist.get_world_size()} x {info.name}, torch {torch.__version__}, NCCL {nccl_version}"]
    lines.append(f"{'':16} {'rows x hidden':>13} {'KiB':>6} {' '.join(f'{column:>9}' for column in LIMITS)}")
    if is_first:
        print(*lines, sep="\n", flush=True)  # noqa: T201 - the program's output
    figures = []
    for figure in measure_operators(device, name_part):
        figures.append(figure)
        kib = figure.num_rows * figure.hidden_size * DTYPE.itemsize / 1024
        times = (f"{'-' if time is None else format(time, '.1f'):>9}" for time in figure.microseconds.values())
        line = f"{figure.operator:16} {f'{figure.num_rows} x {figure.hidden_size}':>13} {kib:6.0f} {' '.join(times)}"
        if is_first:
            print(line, flush=True)  # noqa: T201
    document = json.dumps({"device": asdict(info), "figures": [asdict(figure) for figure in figures]})
    if is_first:
        print(document)  # noqa: T201
    if is_first and json_path is not None:
        json_path.write_text(document)


def measure_operators(device: torch.device, name_part: str) -> Iterator[CollectiveFigure]:
    """Yield the figures of all operators whose names contain `name_part`. All ranks call this."""
    from nanovllm_kernels.collective.peer_collectives import PeerCollectives, open_peer_memory
    from nanovllm_kernels.collective.policy import LaunchPolicy

    group = dist.group.WORLD
    peers = open_peer_memory(group, device)
    collectives = {
        column: PeerCollectives(
            group,
            peers,
            LaunchPolicy(peers.size, peers.max_programs, peers.region_bytes, *limits),
            TorchCollectives(group) if column == "NCCL" else NoFallback(group),
        )
        for column, limits in LIMITS.items()
    }
    for operator in (name for name in OPERATORS if name_part in name):
        for hidden_size in HIDDEN_SIZES:
            for num_rows in ROW_COUNTS:
                if num_rows % peers.size and operator in ("reduce_scatter", "exchange_columns"):
                    continue
                microseconds = {
                    column: measure_operator(getattr(collective, operator), operator, num_rows, hidden_size)
                    for column, collective in collectives.items()
                }
                yield CollectiveFigure(operator, num_rows, hidden_size, microseconds)


def measure_operator(method: Callable[..., object], operator: str, num_rows: int, hidden_size: int) -> float | None:
    """Return the median microseconds per call of a PeerCollectives method, or None if no kernel can do the call."""
    argument_lists = [[random(num_rows, hidden_size)] for _ in range(NUM_COPIES)]
    if operator == "all_reduce_norm":
        weight = random(hidden_size)
        argument_lists = [[*inputs, random(num_rows, hidden_size), weight, 1e-5, DTYPE] for inputs in argument_lists]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        try:
            method(*argument_lists[0])
        except NoKernelError:
            return None
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for index in range(NUM_CALLS):
            method(*argument_lists[index % NUM_COPIES])
    graph.replay()
    times = []
    for _ in range(NUM_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / NUM_CALLS)
    return statistics.median(times)


if __name__ == "__main__":
    main()
