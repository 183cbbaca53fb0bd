"""Steps replayed from CUDA graphs, so that the host launches one thing where the model launches hundreds.

A captured step has one padded shape: so many requests with as many tokens each (decodes), or any mix within so many
tokens. It is one graph, or, in the mode "piecewise", pieces between which attention is launched for the true batch, by
kernels that no graph could hold. The choice of tokens is a graph of its own, in a few variants; the last variant does
everything that a request may ask for. All graphs share one memory pool, as one step runs at a time.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.cuda import _POOL_HANDLE  # pyright: ignore[reportPrivateUsage] - the only name of the type
from tqdm import tqdm

from nanovllm_core.config import GraphMode
from nanovllm_core.model import Attention, Launch
from nanovllm_core.scheduling.plan import BatchShape
from nanovllm_kernels.attention import AttentionBatch

MIN_MIXED_TOKENS = 64
# Where the products take as long as their rows are many, padding to a power of two would cost up to as much again.
MIXED_STEP = 256
# Logits, sampling and attention cost time for each place of a step, also for an empty one. So steps with prompts are
# captured with few places too, except those of few tokens.
FEW_PLACES = 32
MANY_TOKENS = 256


class GraphShape(NamedTuple):
    """A padded shape: requests, their tokens, and the most tokens that one of them may have.

    mode: as what it is captured and counted: "full_decode_only" (all requests have max_query_len tokens), "full" (any
    mix, whole) or "piecewise" (any mix, in pieces).
    whole: whether it is only for steps whose prompts begin in the step, see `BatchShape`.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    mode: GraphMode
    whole: bool = False


class Logits(NamedTuple):
    """What a forward pass leaves: logits [num_reqs, vocab]; the contexts' lengths, int32 [num_reqs], and their block
    tables, int32 [num_reqs, width].
    """

    logits: Tensor
    seq_lens: Tensor
    block_tables: Tensor


# The second stands for the attention of each layer, see `ForwardContext.launch`; None where nothing does.
Forward = Callable[[GraphShape, Launch | None], Logits]
# Chooses tokens and commits them; the needs that it is captured for are given as a number.
Draw = Callable[[int, Logits], Tensor]


@dataclass(slots=True)
class CapturedStep:
    """The graphs of one shape.

    pieces: the forward pass. attentions: what is launched after each piece but the last, for a batch of so many tokens.
    draws: by needs, the graph that chooses and where it leaves its choice; `choice` finds one.
    """

    pieces: list[torch.cuda.CUDAGraph]
    attentions: list[Callable[[AttentionBatch, int], None]]
    found: Logits
    draws: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = field(default_factory=dict)

    def replay(self, num_tokens: int, plan: Callable[[Logits], AttentionBatch]) -> None:
        """Run the forward pass for a batch of `num_tokens`. plan: its attention, from lengths and block tables."""
        first, *others = self.pieces
        first.replay()
        if others:
            batch = plan(self.found)
            for attend, piece in zip(self.attentions, others, strict=True):
                attend(batch, num_tokens)
                piece.replay()

    def choice(self, needs: int) -> int:
        """The needs of the first graph in `draws` that does all that `needs` asks for. One of them does everything."""
        return needs if needs in self.draws else next(captured for captured in self.draws if not needs & ~captured)


class _Alias:
    """Memory of a captured tensor, seen without holding on to it, so that later captures may use it too."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _alias(tensor: Tensor) -> Tensor:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = _Alias(tensor.data_ptr(), (last + 1) * tensor.element_size())
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def decode_sizes(max_num_seqs: int) -> list[int]:
    """How many requests decode steps are padded to: few steps waste more than an eighth."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_num_seqs]
    size = 16
    while size < max_num_seqs:
        sizes.append(size)
        size += max(8, 1 << (size.bit_length() - 3))
    return [*sizes, max_num_seqs]


def mixed_sizes(most: int) -> list[int]:
    """How many tokens mixed steps are padded to. Of the large ones a fifth is wasted at most, and of those of `most`
    tokens, what steps of prompts have, nothing.
    """
    sizes: list[int] = []
    size = MIN_MIXED_TOKENS
    while size < most:
        sizes.append(size)
        size += min(size, max(MIXED_STEP, 1 << (size.bit_length() - 3)))
    return [*sizes, most]


def graph_shapes(
    mode: GraphMode,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    query_lens: Sequence[int] = (1,),
    whole_tokens: int | None = None,
) -> list[GraphShape]:
    """All shapes to capture, largest first, so that the smaller ones find their memory there.

    query_lens: how many tokens the requests of a uniform decode may have: 1, or 1 + k when k drafts are verified.
    whole_tokens: the tokens from which on steps of few whole prompts are captured by themselves; None if they are not.
    """
    if mode == "none":
        return []
    shapes = [
        GraphShape(size, size * query_len, query_len, "full_decode_only")
        for query_len in query_lens
        for size in decode_sizes(min(max_num_seqs, max_num_batched_tokens // query_len))
    ]
    if mode != "full_decode_only":
        sizes = mixed_sizes(max_num_batched_tokens)
        shapes.extend(GraphShape(max_num_seqs, size, size, mode) for size in sizes)
        if max_num_seqs > FEW_PLACES:
            shapes.extend(GraphShape(FEW_PLACES, size, size, mode) for size in sizes if size >= MANY_TOKENS)
        # Pieces between which attention is launched do not keep the keys and values that it would read.
        if mode == "full" and whole_tokens is not None:
            places = min(FEW_PLACES, max_num_seqs)
            shapes.extend(GraphShape(places, size, size, mode, whole=True) for size in sizes if size >= whole_tokens)
    return sorted(shapes, key=_size, reverse=True)


def _size(shape: GraphShape) -> tuple[int, int, bool]:
    # Of two shapes of one size the one for whole prompts is faster.
    return shape.num_tokens, shape.num_reqs, not shape.whole


class StepGraphs:
    """The captured steps of one device, and which of them answers for a batch."""

    def __init__(self, shapes: Sequence[GraphShape]):
        self.counts: Counter[tuple[GraphMode, str]] = Counter()
        self._shapes = shapes
        self._decodes: dict[int, list[GraphShape]] = {}
        self._mixed: list[GraphShape] = []
        for shape in sorted(shapes, key=_size):
            uniform = shape.mode == "full_decode_only"
            (self._decodes.setdefault(shape.max_query_len, []) if uniform else self._mixed).append(shape)
        self._steps: dict[GraphShape, CapturedStep] = {}

    @property
    def mixed_tokens(self) -> tuple[int, ...]:
        """Token counts to which captured steps with prompts are padded, rising."""
        return tuple(dict.fromkeys(shape.num_tokens for shape in self._mixed))

    def dispatch(self, batch: BatchShape, *, launched: bool = False) -> CapturedStep | None:
        """The smallest captured step that holds this batch; None when it must be launched kernel by kernel.

        launched: it must be, for what no captured step leaves behind.
        """
        decodes = None if batch.query_len is None else self._decodes.get(batch.query_len)
        kind = "decode" if batch.query_len == 1 or decodes is not None else "mixed"
        for shape in () if launched else self._mixed if decodes is None else decodes:
            fits = batch.num_reqs <= shape.num_reqs and batch.num_tokens <= shape.num_tokens
            if fits and (batch.whole or not shape.whole) and shape in self._steps:
                self.counts[shape.mode, kind] += 1
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
            for shape in tqdm(self._shapes, desc="capturing graphs", unit="step", disable=not progress):
                self._steps[shape] = _capture(shape, forward, draw, needs, pool)
        torch.cuda.current_stream().wait_stream(stream)

    def measure(self, forward: Forward, draw: Draw, needs: Sequence[int]) -> int:
        """Bytes that `capture` will take: the two largest of each mode are captured for it, and dropped again."""
        if not self._shapes:
            return 0
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        steps: list[CapturedStep] = []

        def cost(shape: GraphShape) -> int:
            before = torch.cuda.mem_get_info()[0]
            steps.append(_capture(shape, forward, draw, needs, pool))
            return before - torch.cuda.mem_get_info()[0]

        with torch.cuda.stream(stream):
            # The first brings the pool and what the libraries keep, the others the cost of one more.
            total = cost(self._shapes[0])
            for mode in {shape.mode for shape in self._shapes}:
                alike = [shape for shape in self._shapes if shape.mode == mode]
                total += len(alike) * max(cost(shape) for shape in alike[:2])
        torch.cuda.current_stream().wait_stream(stream)
        steps.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return total


def _capture(shape: GraphShape, forward: Forward, draw: Draw, needs: Sequence[int], pool: _POOL_HANDLE) -> CapturedStep:
    warm = forward(shape, None)
    for need in needs:
        draw(need, warm)
    del warm
    torch.cuda.current_stream().synchronize()
    with _Capture(pool) as capture:
        found = forward(shape, capture.launch if shape.mode == "piecewise" else None)
    step = CapturedStep(capture.pieces, capture.attentions, Logits(*map(_alias, found)))
    # `found` keeps the logits' memory from the graphs that read it; other shapes may have it.
    for need in needs:
        with _Capture(pool) as capture:
            tokens = draw(need, found)
        step.draws[need] = capture.pieces[0], tokens
    return step


class _Capture:
    """What `torch.cuda.graph` does, without a garbage collection and a synchronisation for every graph, and in pieces:
    one more for each `launch`.

    Memory across pieces: all take theirs from one pool on one stream, as a single capture would. A tensor that a later
    piece reads (the residual stream, the rotation, the lengths) is held by the forward pass that is being captured, and
    so is a layer's attention's result until it has been used: no piece in between gets its memory. Queries and result
    are only aliased here. What the pool gives their memory to was captured later, and is replayed later too.
    """

    def __init__(self, pool: _POOL_HANDLE):
        self.pieces: list[torch.cuda.CUDAGraph] = []
        self.attentions: list[Callable[[AttentionBatch, int], None]] = []
        self._pool = pool

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.pieces[-1].capture_end()

    def _begin(self) -> None:
        self.pieces.append(torch.cuda.CUDAGraph())
        self.pieces[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def launch(self, attention: Attention, q: Tensor, /, value_dim: int | None = None) -> Tensor:
        """End a piece, remember `attention` of these queries, begin the next piece; returns where the result will be.

        At a replay the rows of padding hold whatever was there. No row reads another's, but through the cache, where
        padding goes to the null block.
        """
        out = q.new_empty((*q.shape[:-1], q.shape[-1] if value_dim is None else value_dim))
        self.pieces[-1].capture_end()
        self.attentions.append(partial(_attend, attention, _alias(q), _alias(out)))
        self._begin()
        return out


def _attend(attention: Attention, q: Tensor, out: Tensor, batch: AttentionBatch, num_tokens: int) -> None:
    out[:num_tokens] = attention(q[:num_tokens], batch)
