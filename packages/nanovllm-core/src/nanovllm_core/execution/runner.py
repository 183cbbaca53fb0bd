"""Runs plans on one device, on the one thread that drives it: model, cache and request table in one place."""

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nanovllm_core.cache.planner import bytes_per_block, bytes_per_slot, choose_block_size, plan_cache, slot_shape
from nanovllm_core.config import ResolvedConfig
from nanovllm_core.execution.constraints import Constraints
from nanovllm_core.execution.graphs import CapturedStep, GraphShape, Logits, StepGraphs, graph_shapes
from nanovllm_core.execution.landing import Landing, Place
from nanovllm_core.execution.memory import forbidden_waiting, free_for_cache, zeros
from nanovllm_core.execution.request_table import Needs, RequestTable, StepInputs
from nanovllm_core.execution.sampler import Masks, Sampled, Scored, StepHandle, draw, gather, score, with_logprobs
from nanovllm_core.execution.state_memory import StateMemory
from nanovllm_core.layers.compiled import compiled
from nanovllm_core.model import BuildContext, ForwardContext, Launch, MLASpec, ModelSpec, PagedSpec, StateSpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_core.request import MAX_TOP_LOGPROBS, SamplingParams
from nanovllm_core.scheduling.plan import BatchShape, NewBlocks, NewRow, PromptPart, ScheduledRows, StepPlan
from nanovllm_kernels import fp8
from nanovllm_kernels.attention import (
    SMALLEST_ROUNDS,
    AttentionBatch,
    attention_rounds,
    plan_batch,
    whole_prompt_tokens,
)
from nanovllm_kernels.attention.mla import plan_latent_batch
from nanovllm_kernels.batch import BatchInputs, build_inputs, commit_tokens
from nanovllm_kernels.linear_attention import StateBatch, plan_states
from nanovllm_kernels.platform import describe

# What the choice of tokens is captured for, least work first. The last takes every step that fits no other: penalties,
# biases, forbidden sequences and masks leave rows without them as they are, and greedy rows stay greedy.
CAPTURED_NEEDS = (
    *(
        int(needs | mask)
        for needs in (Needs.NOTHING, Needs.RANDOM, Needs.RANDOM | Needs.FILTER)
        for mask in (Needs.NOTHING, Needs.MASK)
    ),
    int(~Needs.NOTHING),
)
_MASK = int(Needs.MASK)
# Rows that the compiler is shown; what it makes takes any number, but is laid out with this one in mind.
COMPILED_ROWS = 1024


class _Bounds(NamedTuple):
    """What the host knows of a batch's lengths, see `plan_batch`."""

    num_decodes: int | None
    max_query_len: int
    max_seq_len: int
    whole: bool


def _bounds(plan: StepPlan) -> _Bounds:
    lengths = plan.scheduled.num_tokens
    return _Bounds(int(np.count_nonzero(lengths == 1)), int(lengths.max()), plan.max_seq_len, plan.shape.whole)


class Runner:
    """One rank's model and memory.

    Raises, when made: ConfigError when the cache does not fit; ValueError for a model whose attention layers aren't all
    alike; whatever `spec.build` raises.
    """

    @torch.inference_mode()
    def __init__(self, spec: ModelSpec, config: ResolvedConfig):
        self.device = torch.device(config.device)
        self.device_name = describe(self.device).name
        self.computes_later = self.device.type != "cpu"
        self._config = config
        self._model = spec.build(BuildContext(self.device, config.dtype, ParallelContext(), config.compile))
        specs = self._model.cache_specs()
        self._paged_specs = [spec for spec in specs if not isinstance(spec, StateSpec)]
        self._state_specs = [spec for spec in specs if isinstance(spec, StateSpec)]
        self._landing: Landing | None = None
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            self._landing = Landing(config.max_num_seqs, config.depth, stream)
        self._constraints = Constraints(config.max_num_seqs, spec.vocab_size, self.device)
        attention, *others = dict.fromkeys(self._paged_specs)
        if others:
            raise ValueError(
                f"cache_specs() gives both {attention} and {others[0]}: all attention layers of a model must be alike"
            )
        self._num_heads = attention.num_heads
        self.attention_rounds = SMALLEST_ROUNDS
        if isinstance(attention, PagedSpec):
            self.attention_rounds = attention_rounds(attention.num_heads, attention.num_kv_heads, self.device)
        self.block_size = choose_block_size(config, attention, has_states=bool(self._state_specs))
        self._table = RequestTable(
            config.max_num_seqs,
            config.max_model_len,
            self.block_size,
            spec.vocab_size,
            len(spec.eos_token_ids),
            self.device,
            has_states=bool(self._state_specs),
        )
        self._plan_batch = plan_latent_batch if isinstance(attention, MLASpec) else plan_batch
        self._kv_caches, self._kv_scales = self._allocate(0)
        self._states = self._allocate_states(0)
        self._gather_settings = compiled(gather, least_rows=1) if config.compile else gather
        show = sys.stderr.isatty()
        self._compile(progress=show)
        whole_tokens = whole_prompt_tokens(self._kv_caches[0], config.attention_backend)
        limits = (config.max_num_seqs, config.max_num_batched_tokens)
        self.graphs = StepGraphs(graph_shapes(config.graph_mode, *limits, whole_tokens=whole_tokens))
        if self.device.type == "cpu":
            # What it has for few rows is compiled when first used.
            self._rehearse([1], SamplingParams(temperature=0.0))
        free_bytes = free_for_cache(config, self.device, self._rehearse_most)
        self._table.buffer.clear()
        free_bytes -= self.graphs.measure(self._forward_padded, self._draw_padded, CAPTURED_NEEDS)
        block_bytes = bytes_per_block(self._paged_specs, self.block_size, config.kv_cache_dtype)
        slot_bytes = bytes_per_slot(self._state_specs, config.state_dtype, config.dtype)
        self.num_blocks, self.num_slots, self.max_model_len = plan_cache(
            config, self.block_size, free_bytes, block_bytes, slot_bytes
        )
        self._kv_caches, self._kv_scales = self._allocate(self.num_blocks)
        self._states = self._allocate_states(self.num_slots)
        if self._state_specs:
            # Compiles the kernel for tensors of this size: the first prefix hit would wait for it.
            nowhere = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._states.copy(nowhere, nowhere)
        self.kv_cache_bytes = block_bytes * (self.num_blocks + 1)
        self.state_bytes = slot_bytes * (self.num_slots + 1)
        self.graphs.capture(self._forward_padded, self._draw_padded, CAPTURED_NEEDS, progress=show)

    @torch.inference_mode()
    def time_step(self, num_tokens: int, context: int = 0) -> float:
        """Seconds of a step of one prompt chunk: `num_tokens` tokens after `context` computed ones.

        To be called before the first request. The chunk reads and writes the null block only. The first of two runs may
        compile or allocate.
        """
        greedy = SamplingParams(temperature=0.0)
        seconds = [self._rehearse([num_tokens], greedy, context=context) for _ in range(2)]
        self._table.buffer.clear()
        self.graphs.counts.clear()
        return min(seconds)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step. On CUDA it returns as soon as everything is queued; nothing here waits for the device, but for
        the tokens of the step before where what a row may sample depends on its own.

        Raises RuntimeError when something does wait and the config forbids it.
        """
        begin = time.perf_counter()
        with self._no_waiting():
            place = None if self._landing is None else self._landing.take()
            if place is not None:
                place.begin.record(place.stream)
            step = self._table.apply(plan)
            if self._constraints.begin(plan):
                step = replace(step, needs=step.needs | _MASK)
            if step.restored is not None:
                self._states.copy(*step.restored)
            handle = self._start(plan, step, place)
            self._constraints.launched(handle)
            handle.launch_s = time.perf_counter() - begin
            return handle

    def _start(self, plan: StepPlan, step: StepInputs, place: Place | None) -> StepHandle:
        captured = self.graphs.dispatch(plan.shape, launched=bool(plan.prompt_logprobs))
        if captured is not None:
            return self._replay(plan, step, captured, place)
        hidden, batch = self._forward(
            step.rows, step.query_start_loc, num_tokens=plan.shape.num_tokens, bounds=_bounds(plan)
        )
        # First, as the choice of tokens may have to wait.
        scored = [self._score(part, hidden) for part in plan.prompt_logprobs]
        logits = self._logits(hidden, batch) if step.sampled.size else hidden[:0]
        return self._choose(step, Logits(logits, batch.seq_lens, batch.block_tables), place, scored)

    def _score(self, part: PromptPart, hidden: Tensor) -> Scored:
        # A copy, so that pieces of it begin where kernels like it.
        tokens = self._table.tokens[part.row, part.start : part.start + part.num_tokens].clone()
        return score(hidden[part.at : part.at + part.num_tokens], tokens, part.num_top, self._model.compute_logits)

    def _replay(self, plan: StepPlan, step: StepInputs, captured: CapturedStep, place: Place | None) -> StepHandle:
        count = len(step.rows)

        def plan_attention(found: Logits) -> AttentionBatch:
            # The pieces have not kept the keys and values of whole prompts.
            bounds = _bounds(plan)._replace(whole=False)
            block_tables = found.block_tables[:count, : -(-bounds.max_seq_len // self.block_size)]
            lengths = (found.seq_lens[:count], step.query_start_loc)
            return self._plan_attention(block_tables, *lengths, bounds, plan.shape.num_tokens)

        captured.replay(plan.shape.num_tokens, plan_attention)
        needs = step.needs
        if needs & _MASK and self._constraints.masks(step.sampled) is None:
            needs &= ~_MASK
        choice = captured.choice(needs)
        if choice & ~needs & _MASK:
            self._constraints.buffer.clear()
        graph, tokens = captured.draws[choice]
        graph.replay()
        sampled = Sampled(tokens, None, None, None)
        if step.most_logprobs >= 0:
            # Launched, not captured: few ask, and only their rows are computed.
            logits = captured.found.logits[:count]
            sampled = with_logprobs(tokens[:count], logits, step.sampled, step.num_logprobs, step.most_logprobs)
        return StepHandle(sampled, step.sampled, step.num_logprobs, place, self._constraints.failed)

    def _choose(
        self, step: StepInputs, found: Logits, place: Place | None, scored: Sequence[Scored] = ()
    ) -> StepHandle:
        if not step.sampled.size:
            # What is passed for the tokens isn't read.
            self._commit(step.rows, step.query_start_loc, step.samples, step.rows, Needs.NOTHING)
            return StepHandle(None, step.sampled, step.num_logprobs, place, scored=scored)
        masks = self._constraints.masks(step.sampled) if step.needs & _MASK else None
        tokens = draw(found.logits, step.rows, found.seq_lens, self._table, step.needs, self._gather_settings, masks)
        self._commit(step.rows, step.query_start_loc, step.samples, tokens, step.needs)
        sampled = with_logprobs(tokens, found.logits, step.sampled, step.num_logprobs, step.most_logprobs)
        return StepHandle(sampled, step.sampled, step.num_logprobs, place, self._constraints.failed, scored)

    def _forward(
        self,
        rows: Tensor,
        query_start_loc: Tensor,
        *,
        num_tokens: int,
        bounds: _Bounds,
        launch: Launch | None = None,
    ) -> tuple[Tensor, BatchInputs]:
        """Hidden states [num_tokens, size], and what they are of."""
        table, block_size = self._table, self.block_size
        batch = build_inputs(
            rows,
            query_start_loc,
            table.tokens,
            table.num_computed,
            table.block_table,
            block_size,
            num_tokens,
            -(-bounds.max_seq_len // block_size),
        )
        # Attention that is launched is planned at each replay: the less of it in the graph, the better.
        planned = bounds if launch is None else bounds._replace(num_decodes=0)
        attention = self._plan_attention(batch.block_tables, batch.seq_lens, query_start_loc, planned, num_tokens)
        states = self._plan_states(rows, batch.seq_lens, query_start_loc, num_tokens, bounds)
        ctx = ForwardContext(
            attention, batch.slot_mapping, self._kv_caches, self._kv_scales, launch, self._states.caches, states
        )
        return self._model.forward(batch.input_ids, batch.positions, ctx), batch

    def _logits(self, hidden: Tensor, batch: BatchInputs) -> Tensor:
        return self._model.compute_logits(hidden.index_select(0, batch.last))

    def _plan_attention(
        self, block_tables: Tensor, seq_lens: Tensor, query_start_loc: Tensor, bounds: _Bounds, num_tokens: int
    ) -> AttentionBatch:
        return self._plan_batch(
            block_tables,
            seq_lens,
            query_start_loc,
            num_decodes=bounds.num_decodes,
            max_query_len=bounds.max_query_len,
            max_seq_len=bounds.max_seq_len,
            num_heads=self._num_heads,
            kv_cache=self._kv_caches[0],
            backend=self._config.attention_backend,
            dtype=self._config.dtype,
            num_tokens=num_tokens,
            whole=bounds.whole,
        )

    def _plan_states(
        self, rows: Tensor, seq_lens: Tensor, query_start_loc: Tensor, num_tokens: int, bounds: _Bounds
    ) -> StateBatch | None:
        if not self._state_specs:
            return None
        return plan_states(
            self._table.state_slots.index_select(0, rows),
            self._table.saves.index_select(0, rows),
            seq_lens,
            query_start_loc,
            num_decodes=bounds.num_decodes,
            max_query_len=bounds.max_query_len,
            num_tokens=num_tokens,
            backend="torch" if self._config.attention_backend == "torch" else "triton",
        )

    def _commit(self, rows: Tensor, query_start_loc: Tensor, samples: Tensor, tokens: Tensor, needs: int) -> None:
        table = self._table
        counts = table.counts if needs & Needs.PENALTY else None
        commit_tokens(rows, query_start_loc, tokens, samples, table.tokens, table.num_computed, counts)

    def _forward_padded(
        self, shape: GraphShape, launch: Launch | None = None, *, num_decodes: int | None = None
    ) -> Logits:
        buffer = self._table.buffer
        hidden, batch = self._forward(
            buffer.rows[: shape.num_reqs],
            buffer.query_start_loc[: shape.num_reqs + 1],
            num_tokens=shape.num_tokens,
            bounds=_Bounds(num_decodes, shape.max_query_len, self._config.max_model_len, shape.whole),
            launch=launch,
        )
        return Logits(self._logits(hidden, batch), batch.seq_lens, batch.block_tables)

    def _draw_padded(self, needs: int, found: Logits) -> Tensor:
        buffer, count = self._table.buffer, found.logits.shape[0]
        rows = buffer.rows[:count]
        there = self._constraints.buffer
        masks = Masks(there.which[:count], there.bits[:count]) if needs & Needs.MASK else None
        tokens = draw(found.logits, rows, found.seq_lens, self._table, needs, self._gather_settings, masks)
        self._commit(rows, buffer.query_start_loc[: count + 1], buffer.samples[:count], tokens, needs)
        return tokens

    def _compile(self, *, progress: bool) -> None:
        """Run what is compiled when first used, for each kind of step that has kernels of its own: many rows, rows of
        whole prompts and one row, each with attention for lengths that the host doesn't know and for known ones.
        """
        if self._config.attention_backend == "torch":
            return
        self._table.buffer.clear()
        num_tokens = min(COMPILED_ROWS, self._config.max_num_batched_tokens)
        several = GraphShape(min(num_tokens, self._config.max_num_seqs), num_tokens, num_tokens, "none")
        shapes = (several, several._replace(whole=True), GraphShape(1, 1, 1, "none"))
        for shape in tqdm(shapes, desc="compiling", disable=not progress):
            self._draw_padded(Needs.RANDOM, self._forward_padded(shape))
            self._forward_padded(shape, num_decodes=0)

    def _no_waiting(self) -> AbstractContextManager[None]:
        return forbidden_waiting() if self._config.forbid_sync else nullcontext()

    def _rehearse_most(self) -> None:
        """The step that takes the most memory: a full budget of tokens, all rows sampling with all that one can ask."""
        config = self._config
        budget, num_rows = config.max_num_batched_tokens, config.max_num_seqs
        longest = min(budget - (num_rows - 1), config.max_model_len)
        lengths = [longest]
        while len(lengths) < num_rows and sum(lengths) < budget:
            share = -(-(budget - sum(lengths)) // (num_rows - len(lengths)))
            lengths.append(min(share, config.max_model_len, budget - sum(lengths)))
        sampling = SamplingParams(
            top_k=50, top_p=0.9, min_p=0.1, presence_penalty=1.0, forbidden=((0, 0),), logprobs=MAX_TOP_LOGPROBS
        )
        lengths.sort()
        # Logits of a prompt's tokens take the same memory however many they are, from some number on.
        last, *others = reversed(lengths)
        part = PromptPart(len(others), 1, last - 1, MAX_TOP_LOGPROBS, sum(others))
        self._rehearse(lengths, sampling, [part] if part.num_tokens else [])

    def _rehearse(
        self,
        lengths: list[int],
        sampling: SamplingParams,
        prompt_logprobs: Sequence[PromptPart] = (),
        *,
        context: int = 0,
    ) -> float:
        """Run a step of prompts and return its seconds.

        lengths: tokens to compute of each prompt, rising. context: tokens before these that count as computed.
        Block tables are empty, so that the step reads and writes the null block only.
        """
        new_rows = [
            NewRow(row, np.zeros(context + length, np.int32), context + length, context, sampling, seed=0, stop_ids=())
            for row, length in enumerate(lengths)
        ]
        count = len(lengths)
        scheduled = ScheduledRows(np.arange(count), np.array(lengths), np.ones(count, np.bool_))
        shape = BatchShape(count, sum(lengths), None, whole=context == 0)
        plan = StepPlan(0, new_rows, NewBlocks(), scheduled, shape, context + max(lengths), [*prompt_logprobs])
        handle = self.launch(plan)
        handle.wait()
        return handle.seconds

    def _allocate(self, num_blocks: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """A cache of `num_blocks` blocks and the null block for every layer that wants one, and its scales, if any."""
        config = self._config
        caches = tuple(
            zeros((num_blocks + 1, self.block_size, *slot_shape(spec)), config.kv_cache_dtype, self.device)
            for spec in self._paged_specs
        )
        return caches, tuple(map(fp8.make_scales, caches)) if config.kv_cache_dtype == fp8.DTYPE else ()

    def _allocate_states(self, num_slots: int) -> StateMemory:
        """State slots for every recurrent layer, and the null slot."""
        config = self._config
        return StateMemory(
            self._state_specs, num_slots, state_dtype=config.state_dtype, dtype=config.dtype, device=self.device
        )
