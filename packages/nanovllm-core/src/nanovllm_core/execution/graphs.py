"""Steps replayed from CUDA graphs, so that the host launches one thing where the model launches hundreds.

A graph holds a step of one padded shape: decodes of so many requests, or any mix within so many tokens. The forward
pass and the choice of tokens are graphs of their own: a step with log-probabilities or penalties needs only the first.
All share one memory pool: one step runs at a time. This room must not know what is inside a step.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.cuda import _POOL_HANDLE  # pyright: ignore[reportPrivateUsage] - the only name of the type
from tqdm import tqdm

from nanovllm_core.config import GraphMode
from nanovllm_core.scheduling.plan import BatchShape

# A mixed step of more tokens keeps the device busy for longer than the host needs to launch it kernel by kernel.
MAX_MIXED_TOKENS = 2048
MIN_MIXED_TOKENS = 64


class GraphShape(NamedTuple):
    """A padded shape: requests, their tokens, and the most tokens that one of them may have."""

    num_reqs: int
    num_tokens: int
    max_query_len: int


class Logits(NamedTuple):
    """What a forward pass leaves: logits [num_reqs, vocab] and the contexts' lengths, int32 [num_reqs]."""

    logits: Tensor
    seq_lens: Tensor


Forward = Callable[[GraphShape], Logits]
# Chooses tokens and commits them; the needs that it is captured for are given as a number.
Draw = Callable[[int, Logits], Tensor]


@dataclass(slots=True)
class CapturedStep:
    """The graphs of one shape. draws: by needs, the graph that chooses and where it leaves its choice."""

    forward: torch.cuda.CUDAGraph
    logits: Logits
    draws: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = field(default_factory=dict)


class _Alias:
    """Memory of a captured tensor, seen without holding on to it, so that later captures may use it too."""

    def __init__(self, tensor: Tensor):
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": {torch.float32: "<f4", torch.int32: "<i4"}[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(tensor: Tensor) -> Tensor:
    return torch.as_tensor(_Alias(tensor), device=tensor.device)


def decode_sizes(max_num_seqs: int) -> list[int]:
    """How many requests decode steps are padded to: few steps waste more than an eighth."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_num_seqs]
    size = 16
    while size < max_num_seqs:
        sizes.append(size)
        size += max(8, 1 << (size.bit_length() - 3))
    return [*sizes, max_num_seqs]


def graph_shapes(mode: GraphMode, max_num_seqs: int, max_num_batched_tokens: int) -> list[GraphShape]:
    """All shapes to capture, largest first, so that the smaller ones find their memory there."""
    if mode == "none":
        return []
    shapes = [GraphShape(size, size, 1) for size in decode_sizes(max_num_seqs)]
    size = MIN_MIXED_TOKENS
    while mode == "full" and size <= min(MAX_MIXED_TOKENS, max_num_batched_tokens):
        shapes.append(GraphShape(max_num_seqs, size, size))
        size *= 2
    return sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_reqs), reverse=True)


class StepGraphs:
    """The captured steps of one device, and which of them answers for a batch."""

    def __init__(self, shapes: Sequence[GraphShape]):
        self.counts: Counter[tuple[GraphMode, str]] = Counter()
        self._shapes = shapes
        self._decodes = sorted(shape for shape in shapes if shape.max_query_len == 1)
        self._mixed = sorted((shape for shape in shapes if shape.max_query_len > 1), key=lambda shape: shape.num_tokens)
        self._steps: dict[GraphShape, CapturedStep] = {}

    def dispatch(self, batch: BatchShape) -> CapturedStep | None:
        """The smallest captured step that holds this batch; None when it must be launched kernel by kernel."""
        candidates = self._mixed
        mode: GraphMode = "full"
        if batch.query_len == 1:
            candidates, mode = self._decodes, "full_decode_only"
        kind = "decode" if batch.query_len == 1 else "mixed"
        for shape in candidates:
            if batch.num_reqs <= shape.num_reqs and batch.num_tokens <= shape.num_tokens and shape in self._steps:
                self.counts[mode, kind] += 1
                return self._steps[shape]
        self.counts["none", kind] += 1
        return None

    def capture(self, forward: Forward, draw: Draw, needs: Sequence[int], *, progress: bool) -> None:
        """Capture every shape. Each is run once first, so that everything compiled or allocated at first use is there.

        forward and draw must find their inputs where they were when captured, and leave the tables as they are when all
        requests are without tokens.
        """
        if not self._shapes:
            return
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for shape in tqdm(self._shapes, desc="capturing graphs", unit="graph", disable=not progress):
                self._steps[shape] = _capture(shape, forward, draw, needs, pool)
        torch.cuda.current_stream().wait_stream(stream)

    def measure(self, forward: Forward, draw: Draw, needs: Sequence[int]) -> int:
        """Bytes that `capture` will take: the two largest are captured for it, and dropped again."""
        if not self._shapes:
            return 0
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        used: list[int] = []
        steps: list[CapturedStep] = []
        with torch.cuda.stream(stream):
            for shape in [self._shapes[0], *self._shapes[:2]]:
                before = torch.cuda.mem_get_info()[0]
                steps.append(_capture(shape, forward, draw, needs, pool))
                used.append(before - torch.cuda.mem_get_info()[0])
        torch.cuda.current_stream().wait_stream(stream)
        steps.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # The first brings the pool and what the libraries keep, the others the cost of one more.
        return used[0] + max(used[1:]) * len(self._shapes)


def _capture(shape: GraphShape, forward: Forward, draw: Draw, needs: Sequence[int], pool: _POOL_HANDLE) -> CapturedStep:
    warm = forward(shape)
    for need in needs:
        draw(need, warm)
    del warm
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with _Capture(graph, pool):
        found = forward(shape)
    step = CapturedStep(graph, Logits(_alias(found.logits), _alias(found.seq_lens)))
    # `found` keeps the logits' memory from the graphs that read it; other shapes may have it.
    for need in needs:
        graph = torch.cuda.CUDAGraph()
        with _Capture(graph, pool):
            tokens = draw(need, found)
        step.draws[need] = graph, tokens
    return step


class _Capture:
    """What `torch.cuda.graph` does, without a garbage collection and a synchronisation for every graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: _POOL_HANDLE):
        self._graph, self._pool = graph, pool

    def __enter__(self) -> None:
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def __exit__(self, *_: object) -> None:
        self._graph.capture_end()
