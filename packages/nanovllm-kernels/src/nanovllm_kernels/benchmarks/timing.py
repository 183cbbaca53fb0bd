"""Times benchmark cases. A case supplies a call and its cost: the bytes or operations that the call requires."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

# A graph calls the kernel on several copies of the inputs, so that no input is in the L2 cache. The copies together
# exceed COLD_BYTES, unless this takes more than MAX_COPIES copies.
COLD_BYTES, MAX_COPIES, NUM_REPLAYS = 256 << 20, 32, 20


@dataclass(frozen=True)
class KernelFigure:
    """The result of a case. microseconds: time per call. rate: cost per time, in `unit`."""

    name: str
    microseconds: float
    rate: float
    unit: str


@dataclass(frozen=True)
class BenchmarkCase:
    """A call to measure. `make_call` creates the inputs and returns the call.

    cost: number of bytes or operations.
    input_bytes: assumed size of one copy of the inputs, from which the number of copies follows.
    """

    name: str
    make_call: Callable[[], Callable[[], object]]
    cost: float
    unit: str  # The unit of the rate: TB/s, GB/s or TFLOP/s.
    input_bytes: float


def measure(case: BenchmarkCase) -> KernelFigure:
    """Capture a graph of calls on different inputs, replay the graph, and return median time per call and rate."""
    # Free the memory of the previous case's inputs.
    torch.cuda.empty_cache()
    num_copies = max(1, min(MAX_COPIES, int(COLD_BYTES // case.input_bytes) + 1))
    calls = [case.make_call() for _ in range(num_copies)]
    # Inputs are filled on the default stream, but the calls run on another stream.
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(NUM_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / num_copies)
    microseconds = statistics.median(times)
    unit_cost = {"TB/s": 1e6, "GB/s": 1e3, "TFLOP/s": 1e6}[case.unit]  # 1 TB/s is 1e6 bytes per microsecond
    return KernelFigure(case.name, microseconds, case.cost / microseconds / unit_cost, case.unit)
