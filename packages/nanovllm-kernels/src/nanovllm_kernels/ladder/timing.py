"""Times works. A work supplies the call to time and the cost of the call."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

COLD_BYTES = 256 << 20
MOST_COPIES = 32
ROUNDS = 20


@dataclass(frozen=True)
class Figure:
    """A measured work: `rate` in `unit`, `microseconds` per call."""

    name: str
    microseconds: float
    rate: float
    unit: str


@dataclass(frozen=True)
class Work:
    """A call to time. make: creates inputs and returns the call. cost: bytes or operations per call."""

    name: str
    make: Callable[[int], Callable[[], object]]
    cost: float
    unit: str
    input_bytes: float


def measure(work: Work) -> Figure:
    """Capture a graph of calls on different inputs, replay the graph, and return the median time per call."""
    # Free the memory of the previous work's inputs.
    torch.cuda.empty_cache()
    copies = max(1, min(MOST_COPIES, int(COLD_BYTES // work.input_bytes) + 1))
    calls = [work.make(copy) for copy in range(copies)]
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
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / copies)
    microseconds = statistics.median(times)
    scale = {"TB/s": 1e6, "GB/s": 1e3, "TFLOP/s": 1e6}[work.unit]
    return Figure(work.name, microseconds, work.cost / microseconds / scale, work.unit)
