"""Replays a CUDA graph of many collectives, and checks every result of every replay on the device."""

import os
import random
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm_kernels.benchmarks.inputs import DTYPE
from nanovllm_kernels.collective import Communicator

# (rows, hidden size): few and many rows, so that every kernel of this number of ranks runs. With more than two ranks,
# some operators use NCCL on the last shape.
SHAPES = ((1, 4096), (8, 8192), (64, 2048), (3, 7168), (130, 3072), (256, 4096))
REPLAYS_PER_CHECK = 1000
MAX_SKEW_S = 0.002  # Maximum random delay of a rank before it starts replays.


class GraphInputs:
    """Inputs that change in every replay. Every rank can compute the inputs of every rank.

    Values are integers below 240 / size, so sums over all ranks are below 240. bf16 holds integers up to 256 exactly.
    """

    def __init__(self, device: torch.device) -> None:
        self.size = dist.get_world_size()
        self.num_errors = torch.zeros((), dtype=torch.int64, device=device)
        self._step = torch.zeros((), dtype=torch.int32, device=device)
        self._modulus = 240 // self.size
        max_elements = self.size * max(num_rows * hidden_size for num_rows, hidden_size in SHAPES)
        self._indices = torch.arange(max_elements, dtype=torch.int32, device=device)

    def advance(self) -> None:
        """Change the values for the next replay."""
        self._step += 1

    def make(self, rank: int, shape: tuple[int, int], dtype: torch.dtype = DTYPE) -> Tensor:
        """Return the values of `rank` in this replay."""
        indices = self._indices[: shape[0] * shape[1]].view(shape)
        return ((indices + (self._step * 5 + rank * 13)) % self._modulus).to(dtype)

    def make_all(self, shape: tuple[int, int], dtype: torch.dtype = DTYPE) -> list[Tensor]:
        """Return the values of all ranks in this replay."""
        return [self.make(rank, shape, dtype) for rank in range(self.size)]

    def count_errors(self, actual: Tensor, expected: Tensor) -> None:
        """Count elements of `actual` that differ from `expected`."""
        self.num_errors += (actual != expected).sum()


def run_collectives(communicator: Communicator, inputs: GraphInputs, normed_sum: Tensor) -> None:
    """Call the collectives on inputs of all shapes, and count wrong elements.

    normed_sum: float64 scalar, to which the sum of all normed rows is added. The result must be equal on all ranks.
    """
    rank, size = communicator.rank, communicator.size
    inputs.advance()
    for num_rows, hidden_size in SHAPES:
        shape = (num_rows, hidden_size)
        # Fill the weight early: the norm kernel may load the weight while the kernel before the norm still runs.
        weight = torch.ones(hidden_size, dtype=DTYPE, device=normed_sum.device)
        parts = inputs.make_all(shape)
        total = torch.stack(parts).sum(0)
        inputs.count_errors(communicator.all_reduce(parts[rank].clone()), total)
        residual, normed = communicator.all_reduce_norm(parts[rank], torch.ones_like(total), weight, 1e-5, DTYPE)
        inputs.count_errors(residual, total + 1)
        normed_sum += normed.double().sum()
        int32_parts = inputs.make_all(shape, torch.int32)
        inputs.count_errors(communicator.all_gather(int32_parts[rank]), torch.cat(int32_parts))
        wide_parts = inputs.make_all((size * num_rows, hidden_size))
        own_parts = [part.chunk(size)[rank] for part in wide_parts]
        inputs.count_errors(communicator.reduce_scatter(wide_parts[rank]), torch.stack(own_parts).sum(0))
        inputs.count_errors(communicator.exchange_columns(wide_parts[rank]), torch.cat(own_parts, 1))


def replay_collectives(device: torch.device, num_replays: int, timeout_s: float) -> None:
    """Replay a CUDA graph of collectives `num_replays` times, and check the results.

    timeout_s: time limit of REPLAYS_PER_CHECK replays. A rank that takes longer ends its process.
    Raises: RuntimeError if a result is wrong or differs between ranks.
    """
    torch.set_grad_enabled(False)
    communicator = Communicator(dist.group.WORLD, device)
    inputs, normed_sum = GraphInputs(device), torch.zeros((), dtype=torch.float64, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run_collectives(communicator, inputs, normed_sum)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        run_collectives(communicator, inputs, normed_sum)
    begin = time.monotonic()
    for first in range(0, num_replays, REPLAYS_PER_CHECK):
        # Wait for a random time, so that the ranks do not start together.
        time.sleep(random.uniform(0, MAX_SKEW_S))
        count = min(REPLAYS_PER_CHECK, num_replays - first)
        for _ in range(count):
            graph.replay()
        wait_or_exit(timeout_s, f"rank {communicator.rank}: replays {first + 1} to {first + count} did not end")
        check_results(inputs, normed_sum, first + count)
    if communicator.rank == 0:
        seconds = time.monotonic() - begin
        calls = 5 * len(SHAPES) * num_replays
        print(f"{num_replays} replays, {calls} collectives on {inputs.size} GPUs in {seconds:.1f} s: all correct")  # noqa: T201
    communicator.close()


def wait_or_exit(timeout_s: float, message: str) -> None:
    """Wait for the device. If it does not finish in time, end this process, because nothing can stop the kernels."""
    end = torch.cuda.Event()
    end.record()
    deadline = time.monotonic() + timeout_s
    while not end.query():
        if time.monotonic() > deadline:
            print(f"{message} in {timeout_s} s", file=sys.stderr, flush=True)  # noqa: T201
            os._exit(1)
        time.sleep(0.001)


def check_results(inputs: GraphInputs, normed_sum: Tensor, num_replays: int) -> None:
    """Raise RuntimeError if an element was wrong, or if the normed rows differ between ranks."""
    if num_errors := int(inputs.num_errors):
        raise RuntimeError(f"{num_errors} wrong elements after {num_replays} replays")
    sums = [torch.empty_like(normed_sum) for _ in range(inputs.size)]
    dist.all_gather(sums, normed_sum)
    if any(not torch.equal(other, normed_sum) for other in sums):
        raise RuntimeError(f"the ranks' normed rows differ after {num_replays} replays")
