"""Captures steps as CUDA graphs and replays them, because launching a graph is faster than launching its kernels.

A step replays one graph for the forward pass, one graph for sampling, and with speculation one graph that proposes
drafts. In the mode "piecewise", the forward pass is several graphs, called pieces. Attention runs between the pieces,
without a graph.
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
from nanovllm_core.execution.forward import ForwardOutput
from nanovllm_core.execution.proposers import Proposer
from nanovllm_core.execution.token_choice import CAPTURED_OP_SETS, ChoiceGraphs, ResultT, SampledTokens
from nanovllm_core.model import AttentionFunction, LaunchAttention
from nanovllm_core.scheduling.plan import BatchShape
from nanovllm_kernels.attention import AttentionBatch

# The token counts of steps with prompts are padded to at least this size.
MIN_PROMPT_STEP_TOKENS = 64
# Consecutive padded token counts differ by at most this number or a quarter of the smaller count, whichever is larger.
# Padding to powers of two would double the time of some steps.
MAX_SIZE_INCREMENT = 256
# Padding with empty requests costs time. Therefore steps of at least MIN_FEW_REQUEST_TOKENS tokens are also captured
# for at most NUM_FEW_REQUESTS requests.
NUM_FEW_REQUESTS = 32
MIN_FEW_REQUEST_TOKENS = 256


class GraphShape(NamedTuple):
    """The padded shape of a captured step.

    mode: "full_decode_only" (one graph, only for decodes), "full" (one graph for prompts and decodes), "piecewise"
        (several graphs for prompts and decodes) or "none" (no graph, only to compile kernels).
    has_only_whole_prompts: whether the shape serves only steps whose prompts are whole (none of their tokens is in the
        cache yet), see `BatchShape`.
    has_drafts: whether the shape serves only steps with drafts, in which requests have at most max_query_len tokens.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    mode: GraphMode
    has_only_whole_prompts: bool = False
    has_drafts: bool = False


class CapturedFunctions(NamedTuple):
    """The functions that graphs capture. They must read inputs at fixed addresses, and ignore requests without tokens.

    run_forward: runs the model for a shape. Second argument: see `ForwardContext.launch_attention`.
    choose_tokens: see `TokenChooser.choose_padded`. First argument: `SamplingOps` as an integer. Last argument: whether
        the step has drafts.
    propose: see `TokenChooser.propose_padded`. First argument: `SamplingOps` as an integer.
    proposer: None without speculation.
    """

    run_forward: Callable[[GraphShape, LaunchAttention | None], ForwardOutput]
    choose_tokens: Callable[[int, ForwardOutput, bool], SampledTokens]
    propose: Callable[[int, ForwardOutput], Tensor | None]
    proposer: Proposer | None


@dataclass(slots=True)
class CapturedStep:
    """The graphs of one shape.

    attentions: functions of (batch, number of tokens), which launch the attention between consecutive pieces.
    output: tensors to which the pieces write the result of the forward pass.
    """

    pieces: list[torch.cuda.CUDAGraph]
    attentions: list[Callable[[AttentionBatch, int], None]]
    output: ForwardOutput
    choice_graphs: ChoiceGraphs = field(default_factory=lambda: ChoiceGraphs({}, {}))

    @property
    def num_reqs(self) -> int:
        """The number of requests, including padding."""
        return len(self.output.seq_lens)

    def replay(self, num_tokens: int, plan_attention: Callable[[ForwardOutput], AttentionBatch]) -> None:
        """Run the forward pass for a batch of `num_tokens`. plan_attention: plans attention from `output`."""
        first_piece, *next_pieces = self.pieces
        first_piece.replay()
        if next_pieces:
            batch = plan_attention(self.output)
            for attend, piece in zip(self.attentions, next_pieces, strict=True):
                attend(batch, num_tokens)
                piece.replay()


class _UnownedMemory:
    """Memory of a captured tensor, in a form from which torch makes a tensor that does not own the memory."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _alias(tensor: Tensor) -> Tensor:
    """A view of a captured tensor. The view does not own the memory, so later captures may reuse the memory."""
    last_index = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = _UnownedMemory(tensor.data_ptr(), (last_index + 1) * tensor.element_size())
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Request counts to which decode steps are padded, rising."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_num_seqs]
    size = 16
    while size < max_num_seqs:
        sizes.append(size)
        size += max(8, 1 << (size.bit_length() - 3))
    return [*sizes, max_num_seqs]


def prompt_step_sizes(max_num_batched_tokens: int) -> list[int]:
    """Token counts to which steps with prompts are padded, rising."""
    sizes: list[int] = []
    size = MIN_PROMPT_STEP_TOKENS
    while size < max_num_batched_tokens:
        sizes.append(size)
        size += min(size, max(MAX_SIZE_INCREMENT, 1 << (size.bit_length() - 3)))
    return [*sizes, max_num_batched_tokens]


def graph_shapes(
    mode: GraphMode,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_drafts: int = 0,
    max_draft_step_tokens: int = 0,
    min_whole_prompt_tokens: int | None = None,
    *,
    proposes_with_model: bool = False,
) -> list[GraphShape]:
    """All shapes to capture, largest first, so that smaller shapes reuse the memory of larger shapes.

    max_drafts: maximum number of drafts per request and step; 0 for no shapes with drafts.
    max_draft_step_tokens: maximum number of tokens of a step with drafts.
    min_whole_prompt_tokens: minimum number of tokens of shapes with `has_only_whole_prompts`; None for no such shapes.
    proposes_with_model: whether a draft model or a head proposes drafts. If True, each number of tokens also has a
        shape in which each request has all its drafts. Why: a draft model would compute drafts for padding too.
    """
    if mode == "none":
        return []
    shapes = [
        GraphShape(size, size, 1, "full_decode_only")
        for size in decode_sizes(min(max_num_seqs, max_num_batched_tokens))
    ]
    if max_drafts:
        # The first size fits the usual step at low load: one request with all drafts.
        sizes = {min(1 + max_drafts, max_draft_step_tokens), *decode_sizes(max_draft_step_tokens)} - {1}
        size_pairs = {(size, size) for size in sizes}
        if proposes_with_model:
            size_pairs |= {(-(-size // (1 + max_drafts)), size) for size in sizes}
        shapes.extend(
            GraphShape(min(num_reqs, max_num_seqs), size, 1 + max_drafts, "full_decode_only", has_drafts=True)
            for num_reqs, size in size_pairs
        )
    if mode != "full_decode_only":
        sizes = prompt_step_sizes(max_num_batched_tokens)
        shapes.extend(GraphShape(max_num_seqs, size, size, mode) for size in sizes)
        if max_num_seqs > NUM_FEW_REQUESTS:
            shapes.extend(
                GraphShape(NUM_FEW_REQUESTS, size, size, mode) for size in sizes if size >= MIN_FEW_REQUEST_TOKENS
            )
        # Only the mode "full" has shapes for whole prompts. Their attention reads the step's keys and values, which the
        # mode "piecewise" does not keep between pieces.
        if mode == "full" and min_whole_prompt_tokens is not None:
            num_reqs = min(NUM_FEW_REQUESTS, max_num_seqs)
            whole_sizes = [size for size in sizes if size >= min_whole_prompt_tokens]
            shapes.extend(GraphShape(num_reqs, size, size, mode, has_only_whole_prompts=True) for size in whole_sizes)
    return sorted(shapes, key=_sort_key, reverse=True)


def _sort_key(shape: GraphShape) -> tuple[int, int, bool]:
    # Among shapes of equal size, `dispatch` tries the shape for whole prompts first, because this shape is faster.
    return shape.num_tokens, shape.num_reqs, not shape.has_only_whole_prompts


class StepGraphs:
    """The captured steps of one device.

    num_steps: number of dispatched steps by graph mode and kind. The mode is "none" for a step without a graph. The
        kind is "decode", "draft" for decodes with drafts, or "prompt" for steps with prompts.
    """

    def __init__(self, shapes: Sequence[GraphShape]):
        self.num_steps: Counter[tuple[GraphMode, str]] = Counter()
        self._shapes = shapes
        smallest_first = sorted(shapes, key=_sort_key)
        self._prompt_shapes = [shape for shape in smallest_first if shape.mode != "full_decode_only"]
        self._draft_shapes = [shape for shape in smallest_first if shape.has_drafts]
        other_shapes = {*self._prompt_shapes, *self._draft_shapes}
        self._decode_shapes = [shape for shape in smallest_first if shape not in other_shapes]
        self._steps: dict[GraphShape, CapturedStep] = {}

    @property
    def prompt_step_sizes(self) -> tuple[int, ...]:
        """Token counts to which captured steps with prompts are padded, rising."""
        return tuple(dict.fromkeys(shape.num_tokens for shape in self._prompt_shapes))

    def dispatch(self, batch: BatchShape, *, allows_graph: bool = True) -> CapturedStep | None:
        """Count the step. Returns the smallest captured step that holds the batch; None if none fits or is allowed."""
        if batch.has_drafts:
            kind, shapes = "draft", self._draft_shapes
        elif batch.query_len == 1:
            kind, shapes = "decode", self._decode_shapes or self._prompt_shapes
        else:
            kind, shapes = "prompt", self._prompt_shapes
        for shape in shapes if allows_graph else ():
            fits = batch.num_reqs <= shape.num_reqs and batch.num_tokens <= shape.num_tokens
            if fits and (batch.has_only_whole_prompts or not shape.has_only_whole_prompts) and shape in self._steps:
                self.num_steps[shape.mode, kind] += 1
                return self._steps[shape]
        self.num_steps["none", kind] += 1
        return None

    def release(self) -> None:
        """Free all captured steps."""
        self._steps.clear()

    def capture(self, functions: CapturedFunctions) -> None:
        """Capture every shape."""
        if not self._shapes:
            return
        pools = _Pools()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for shape in tqdm(self._shapes, desc="capturing graphs", unit="step", disable=None):
                self._steps[shape] = _capture_step(shape, functions, pools)
        torch.cuda.current_stream().wait_stream(stream)

    def estimate_bytes(self, functions: CapturedFunctions) -> int:
        """Estimate the memory of `capture`, by capturing and freeing the two largest shapes of each mode."""
        if not self._shapes:
            return 0
        pools = _Pools()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        steps: list[CapturedStep] = []

        def capture_bytes(shape: GraphShape) -> int:
            free_before = torch.cuda.mem_get_info()[0]
            steps.append(_capture_step(shape, functions, pools))
            return free_before - torch.cuda.mem_get_info()[0]

        with torch.cuda.stream(stream):
            # The first measurement includes the memory of the pool and of libraries.
            total = capture_bytes(self._shapes[0])
            # Capture in the same order on all ranks, because captured steps wait for the other ranks.
            for mode in dict.fromkeys(shape.mode for shape in self._shapes):
                mode_shapes = [shape for shape in self._shapes if shape.mode == mode]
                total += len(mode_shapes) * max(capture_bytes(shape) for shape in mode_shapes[:2])
        torch.cuda.current_stream().wait_stream(stream)
        steps.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return total


class _Pools:
    """Memory pools of graphs, and the graphs that propose drafts. Several shapes may share a proposing graph.

    step_pool: memory pool of all graphs that do not propose drafts.
    proposal_pool: memory pool of proposing graphs. A shared graph may run after any step, so it can't use a step's
        memory.
    proposing_graphs: keys are (shape, `SamplingOps`) if `Proposer.reads_step` is True, else (number of requests,
        `SamplingOps`).
    """

    def __init__(self) -> None:
        self.step_pool, self.proposal_pool = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
        self.proposing_graphs: dict[tuple[object, int], tuple[torch.cuda.CUDAGraph, Tensor | None]] = {}


def _capture_step(shape: GraphShape, functions: CapturedFunctions, pools: _Pools) -> CapturedStep:
    run_forward, choose_tokens, propose, proposer = functions
    proposing_ops, key = (), shape.num_reqs
    if proposer is not None:
        proposing_ops = proposer.captured_ops(may_propose=shape.mode == "full_decode_only")
        key = shape if proposer.reads_step else shape.num_reqs
    new_ops = [ops for ops in proposing_ops if (key, ops) not in pools.proposing_graphs]
    warm_up_output = run_forward(shape, None)
    for ops in CAPTURED_OP_SETS:
        choose_tokens(ops, warm_up_output, shape.has_drafts)
    for ops in new_ops:
        propose(ops, warm_up_output)
    del warm_up_output
    torch.cuda.current_stream().synchronize()
    with _Capture(pools.step_pool) as capture:
        output = run_forward(shape, capture.launch_attention if shape.mode == "piecewise" else None)
    # `output` lives until the end of this function, so that the other graphs do not reuse the memory of its tensors.
    choosing_graphs = {
        ops: _capture(pools.step_pool, partial(choose_tokens, ops, output, shape.has_drafts))
        for ops in CAPTURED_OP_SETS
    }
    for ops in new_ops:
        pools.proposing_graphs[key, ops] = _capture(pools.proposal_pool, partial(propose, ops, output))
    proposing_graphs = {ops: pools.proposing_graphs[key, ops] for ops in proposing_ops}
    logits, table_rows, positions, seq_lens, block_tables = map(_alias, output[:-1])
    aliases = ForwardOutput(logits, table_rows, positions, seq_lens, block_tables)
    return CapturedStep(capture.pieces, capture.attentions, aliases, ChoiceGraphs(choosing_graphs, proposing_graphs))


def _capture(pool: _POOL_HANDLE, function: Callable[[], ResultT]) -> tuple[torch.cuda.CUDAGraph, ResultT]:
    with _Capture(pool) as capture:
        result = function()
    return capture.pieces[0], result


class _Capture:
    """Captures like `torch.cuda.graph`, but into several graphs, without garbage collection and synchronisation.

    All pieces use one memory pool on one stream. The forward pass holds the tensors that later pieces read, so the pool
    does not reuse their memory.
    """

    def __init__(self, pool: _POOL_HANDLE):
        self.pieces: list[torch.cuda.CUDAGraph] = []
        self.attentions: list[Callable[[AttentionBatch, int], None]] = []
        self._pool = pool

    def __enter__(self) -> Self:
        self._begin_piece()
        return self

    def __exit__(self, *_: object) -> None:
        self.pieces[-1].capture_end()

    def _begin_piece(self) -> None:
        self.pieces.append(torch.cuda.CUDAGraph())
        self.pieces[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def launch_attention(self, attention: AttentionFunction, q: Tensor, /, value_dim: int | None = None) -> Tensor:
        """End the piece, store `attention` for replays, and begin the next piece. Returns the tensor for the result.

        Padding rows of the result are not computed. This is harmless: the model writes the keys and
        values of padding to the null block.
        """
        out = q.new_empty((*q.shape[:-1], q.shape[-1] if value_dim is None else value_dim))
        self.pieces[-1].capture_end()
        self.attentions.append(partial(_attend, attention, _alias(q), _alias(out)))
        self._begin_piece()
        return out


def _attend(attention: AttentionFunction, q: Tensor, out: Tensor, batch: AttentionBatch, num_tokens: int) -> None:
    out[:num_tokens] = attention(q[:num_tokens], batch)
