"""Executes step plans on one device: holds the model, the caches and the request table."""

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
from nanovllm_core.execution.graphs import CapturedStep, ForwardOutput, GraphShape, StepGraphs, graph_shapes
from nanovllm_core.execution.host_copy import HostCopyRing, HostCopySlot
from nanovllm_core.execution.memory import forbidden_waiting, free_for_cache, zeros
from nanovllm_core.execution.request_table import Needs, RequestTable, StepInputs
from nanovllm_core.execution.sampler import Masks, PromptScores, Sampled, draw, gather, score, with_logprobs
from nanovllm_core.execution.state_memory import StateMemory
from nanovllm_core.execution.step_handle import StepHandle
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
from nanovllm_kernels.linear_attention import StateBatch, plan_states
from nanovllm_kernels.platform import describe_device
from nanovllm_kernels.request_tables import BatchInputs, TokenTables, build_inputs, commit_tokens

# The `Needs` for which sampling graphs are captured, least work first. The last graph serves every other combination:
# it does not change rows without penalties, biases, forbidden sequences or masks, and greedy rows stay greedy.
CAPTURED_NEEDS = (
    *(
        int(needs | mask)
        for needs in (Needs.NOTHING, Needs.RANDOM, Needs.RANDOM | Needs.FILTER)
        for mask in (Needs.NOTHING, Needs.MASK)
    ),
    int(~Needs.NOTHING),
)
_MASK = int(Needs.MASK)
# Rows of the batch with which torch.compile is run; the code takes any number of rows but is tuned for this one.
COMPILED_ROWS = 1024


class _Bounds(NamedTuple):
    """Bounds of a batch's lengths that the host knows; see `plan_batch`."""

    num_decodes: int | None
    max_query_len: int
    max_seq_len: int
    whole: bool


def _bounds(plan: StepPlan) -> _Bounds:
    lengths = plan.scheduled.num_tokens
    return _Bounds(int(np.count_nonzero(lengths == 1)), int(lengths.max()), plan.max_seq_len, plan.shape.whole)


class Runner:
    """The model and the memory of one rank. All calls come from one thread.

    Raises ConfigError if the cache does not fit, ValueError if attention layers differ, and what `spec.build` raises.
    """

    @torch.inference_mode()
    def __init__(self, spec: ModelSpec, config: ResolvedConfig):
        self.device = torch.device(config.device)
        self.device_name = describe_device(self.device).name
        self.is_asynchronous = self.device.type != "cpu"
        self._config = config
        self._model = spec.build(BuildContext(self.device, config.dtype, ParallelContext(), config.compile))
        specs = self._model.cache_specs()
        self._paged_specs = [spec for spec in specs if not isinstance(spec, StateSpec)]
        self._state_specs = [spec for spec in specs if isinstance(spec, StateSpec)]
        self._host_copies: HostCopyRing | None = None
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            self._host_copies = HostCopyRing(config.max_num_seqs, config.depth, stream)
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
            # Kernels for few rows are compiled at their first use: use them before the first request.
            self._run_dummy_step([1], SamplingParams(temperature=0.0))
        free_bytes = free_for_cache(config, self.device, self._run_largest_step)
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
            # Compile the copy kernel for tensors of this size now, not at the first prefix hit.
            null_slot = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._states.copy(null_slot, null_slot)
        self.kv_cache_bytes = block_bytes * (self.num_blocks + 1)
        self.state_bytes = slot_bytes * (self.num_slots + 1)
        self.graphs.capture(self._forward_padded, self._draw_padded, CAPTURED_NEEDS, progress=show)

    @torch.inference_mode()
    def time_step(self, num_tokens: int, context: int = 0) -> float:
        """Seconds of a step with one chunk of `num_tokens` after `context` computed tokens. Call before any request."""
        # The first of two runs may compile or allocate.
        greedy = SamplingParams(temperature=0.0)
        seconds = [self._run_dummy_step([num_tokens], greedy, context=context) for _ in range(2)]
        self._table.buffer.clear()
        self.graphs.counts.clear()
        return min(seconds)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Launch a step. On CUDA this waits only for tokens of the previous step that masks depend on.

        Raises RuntimeError if another operation waits for the device and `config.forbid_sync` is set.
        """
        begin = time.perf_counter()
        with self._no_waiting():
            host_slot = None if self._host_copies is None else self._host_copies.take()
            if host_slot is not None:
                host_slot.begin.record(host_slot.stream)
            step = self._table.apply(plan)
            if self._constraints.begin(plan):
                step = replace(step, needs=step.needs | _MASK)
            if step.restored is not None:
                self._states.copy(*step.restored)
            handle = self._run_model(plan, step, host_slot)
            self._constraints.launched(handle)
            handle.launch_s = time.perf_counter() - begin
            return handle

    def _run_model(self, plan: StepPlan, step: StepInputs, host_slot: HostCopySlot | None) -> StepHandle:
        captured = self.graphs.dispatch(plan.shape, launched=bool(plan.prompt_logprobs))
        if captured is not None:
            return self._replay(plan, step, captured, host_slot)
        hidden, batch = self._forward(
            step.rows, step.query_start_loc, num_tokens=plan.shape.num_tokens, bounds=_bounds(plan)
        )
        # Before sampling, which may have to wait for the previous step.
        prompt_scores = [self._score(part, hidden) for part in plan.prompt_logprobs]
        logits = self._last_logits(hidden, batch) if step.sampling_indices.size else hidden[:0]
        return self._sample(step, ForwardOutput(logits, batch.seq_lens, batch.block_tables), host_slot, prompt_scores)

    def _score(self, part: PromptPart, hidden: Tensor) -> PromptScores:
        # A copy is aligned, as the kernels expect of its pieces.
        tokens = self._table.tokens[part.row, part.start : part.start + part.num_tokens].clone()
        return score(hidden[part.at : part.at + part.num_tokens], tokens, part.num_top, self._model.compute_logits)

    def _replay(
        self, plan: StepPlan, step: StepInputs, captured: CapturedStep, host_slot: HostCopySlot | None
    ) -> StepHandle:
        count = len(step.rows)

        def plan_attention(output: ForwardOutput) -> AttentionBatch:
            # Piecewise graphs do not keep the keys and values that whole prompts would be read from.
            bounds = _bounds(plan)._replace(whole=False)
            block_tables = output.block_tables[:count, : -(-bounds.max_seq_len // self.block_size)]
            lengths = (output.seq_lens[:count], step.query_start_loc)
            return self._plan_attention(block_tables, *lengths, bounds, plan.shape.num_tokens)

        captured.replay(plan.shape.num_tokens, plan_attention)
        needs = step.needs
        if needs & _MASK and self._constraints.masks(step.sampling_indices) is None:
            needs &= ~_MASK
        graph_needs = captured.choice(needs)
        if graph_needs & ~needs & _MASK:
            self._constraints.buffer.clear()
        graph, tokens = captured.draws[graph_needs]
        graph.replay()
        sampled = Sampled(tokens, None, None, None)
        if step.max_num_logprobs >= 0:
            # Not captured: few requests ask for log-probabilities, and only their rows are computed.
            logits = captured.output.logits[:count]
            sampled = with_logprobs(
                tokens[:count], logits, step.sampling_indices, step.num_logprobs, step.max_num_logprobs
            )
        return StepHandle(sampled, step.sampling_indices, step.num_logprobs, host_slot, self._constraints.failed)

    def _sample(
        self,
        step: StepInputs,
        output: ForwardOutput,
        host_slot: HostCopySlot | None,
        prompt_scores: Sequence[PromptScores] = (),
    ) -> StepHandle:
        if not step.sampling_indices.size:
            # No token is sampled, so the kernel does not read the argument passed as tokens.
            self._commit(step.rows, step.query_start_loc, step.samples, step.rows, Needs.NOTHING)
            return StepHandle(None, step.sampling_indices, step.num_logprobs, host_slot, prompt_scores=prompt_scores)
        masks = self._constraints.masks(step.sampling_indices) if step.needs & _MASK else None
        tokens = draw(output.logits, step.rows, output.seq_lens, self._table, step.needs, self._gather_settings, masks)
        self._commit(step.rows, step.query_start_loc, step.samples, tokens, step.needs)
        sampled = with_logprobs(tokens, output.logits, step.sampling_indices, step.num_logprobs, step.max_num_logprobs)
        return StepHandle(
            sampled, step.sampling_indices, step.num_logprobs, host_slot, self._constraints.failed, prompt_scores
        )

    def _forward(
        self, rows: Tensor, query_start_loc: Tensor, *, num_tokens: int, bounds: _Bounds, launch: Launch | None = None
    ) -> tuple[Tensor, BatchInputs]:
        """Run the model. Returns the hidden states [num_tokens, size] and the inputs of the batch."""
        table, block_size = self._table, self.block_size
        batch = build_inputs(
            rows,
            query_start_loc,
            TokenTables(table.tokens, table.num_computed),
            table.block_table,
            block_size,
            num_tokens,
            -(-bounds.max_seq_len // block_size),
        )
        # Attention between graph pieces is planned at each replay, so the graph plans as little as possible.
        planned = bounds if launch is None else bounds._replace(num_decodes=0)
        attention = self._plan_attention(batch.block_tables, batch.seq_lens, query_start_loc, planned, num_tokens)
        states = self._plan_states(rows, batch.seq_lens, query_start_loc, num_tokens, bounds)
        ctx = ForwardContext(
            attention, batch.slot_mapping, self._kv_caches, self._kv_scales, launch, self._states.caches, states
        )
        return self._model.forward(batch.input_ids, batch.positions, ctx), batch

    def _last_logits(self, hidden: Tensor, batch: BatchInputs) -> Tensor:
        return self._model.compute_logits(hidden.index_select(0, batch.last_token_indices))

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
        commit_tokens(rows, query_start_loc, tokens, samples, TokenTables(table.tokens, table.num_computed), counts)

    def _forward_padded(
        self, shape: GraphShape, launch: Launch | None = None, *, num_decodes: int | None = None
    ) -> ForwardOutput:
        buffer = self._table.buffer
        hidden, batch = self._forward(
            buffer.rows[: shape.num_reqs],
            buffer.query_start_loc[: shape.num_reqs + 1],
            num_tokens=shape.num_tokens,
            bounds=_Bounds(num_decodes, shape.max_query_len, self._config.max_model_len, shape.whole),
            launch=launch,
        )
        return ForwardOutput(self._last_logits(hidden, batch), batch.seq_lens, batch.block_tables)

    def _draw_padded(self, needs: int, output: ForwardOutput) -> Tensor:
        buffer, count = self._table.buffer, output.logits.shape[0]
        rows = buffer.rows[:count]
        mask_buffer = self._constraints.buffer
        masks = Masks(mask_buffer.which[:count], mask_buffer.bits[:count]) if needs & Needs.MASK else None
        tokens = draw(output.logits, rows, output.seq_lens, self._table, needs, self._gather_settings, masks)
        self._commit(rows, buffer.query_start_loc[: count + 1], buffer.samples[:count], tokens, needs)
        return tokens

    def _compile(self, *, progress: bool) -> None:
        """Compile kernels by running a step of each kind: many rows, whole prompts, one row; each with both plans."""
        if self._config.attention_backend == "torch":
            return
        self._table.buffer.clear()
        num_tokens = min(COMPILED_ROWS, self._config.max_num_batched_tokens)
        many_rows = GraphShape(min(num_tokens, self._config.max_num_seqs), num_tokens, num_tokens, "none")
        shapes = (many_rows, many_rows._replace(whole=True), GraphShape(1, 1, 1, "none"))
        for shape in tqdm(shapes, desc="compiling", disable=not progress):
            self._draw_padded(Needs.RANDOM, self._forward_padded(shape))
            self._forward_padded(shape, num_decodes=0)

    def _no_waiting(self) -> AbstractContextManager[None]:
        return forbidden_waiting() if self._config.forbid_sync else nullcontext()

    def _run_largest_step(self) -> None:
        """Run the step that takes the most memory: a full token budget, and all rows sample with all options."""
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
        # Prompt tokens are scored in pieces, so one long part takes as much memory as several.
        last, *others = reversed(lengths)
        part = PromptPart(len(others), 1, last - 1, MAX_TOP_LOGPROBS, sum(others))
        self._run_dummy_step(lengths, sampling, [part] if part.num_tokens else [])

    def _run_dummy_step(
        self, lengths: list[int], sampling: SamplingParams, prompt_parts: Sequence[PromptPart] = (), *, context: int = 0
    ) -> float:
        """Run a step of prompts that reads and writes the null block only. Returns its seconds.

        lengths: tokens to compute of each prompt, rising. context: tokens before these that count as computed.
        """
        new_rows = [
            NewRow(row, np.zeros(context + length, np.int32), context + length, context, sampling, seed=0, stop_ids=())
            for row, length in enumerate(lengths)
        ]
        count = len(lengths)
        scheduled = ScheduledRows(np.arange(count), np.array(lengths), np.ones(count, np.bool_))
        shape = BatchShape(count, sum(lengths), None, whole=context == 0)
        plan = StepPlan(0, new_rows, NewBlocks(), scheduled, shape, context + max(lengths), [*prompt_parts])
        handle = self.launch(plan)
        handle.wait()
        return handle.seconds

    def _allocate(self, num_blocks: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Allocate a cache of `num_blocks` blocks and the null block per attention layer, and FP8 scales if needed."""
        config = self._config
        caches = tuple(
            zeros((num_blocks + 1, self.block_size, *slot_shape(spec)), config.kv_cache_dtype, self.device)
            for spec in self._paged_specs
        )
        return caches, tuple(map(fp8.make_scales, caches)) if config.kv_cache_dtype == fp8.DTYPE else ()

    def _allocate_states(self, num_slots: int) -> StateMemory:
        """Allocate `num_slots` state slots and the null slot for the recurrent layers."""
        config = self._config
        return StateMemory(
            self._state_specs, num_slots, state_dtype=config.state_dtype, dtype=config.dtype, device=self.device
        )
