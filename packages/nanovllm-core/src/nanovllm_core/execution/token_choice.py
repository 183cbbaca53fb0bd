"""Chooses a step's tokens from logits, writes them to the request table, and starts their copy to the host."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from nanovllm_core.config import ResolvedConfig
from nanovllm_core.execution.constraints import Constraints
from nanovllm_core.execution.forced_acceptance import ForcedAcceptance
from nanovllm_core.execution.forward import ForwardOutput
from nanovllm_core.execution.host_copy import HostCopySlot
from nanovllm_core.execution.inputs import DeviceRows, Masks, stage_upload
from nanovllm_core.execution.prompt_scores import PromptScores
from nanovllm_core.execution.proposers import NO_DRAFTS, Proposer
from nanovllm_core.execution.request_table import RequestTable, SamplingOps, StepInputs
from nanovllm_core.execution.step_handle import ChosenTokens, StepHandle
from nanovllm_core.layers.compilation import compile_for_rows
from nanovllm_core.parallel import ParallelContext
from nanovllm_core.scheduling.plan import StepPlan
from nanovllm_kernels import sampling
from nanovllm_kernels.request_tables import TokenTables, commit_tokens, verify_drafts

# The fields `samples` and `num_new` of `ChosenTokens`.
SampledTokens = tuple[Tensor, Tensor | None]
ResultT = TypeVar("ResultT")
# The graphs of one shape, least work first: maps the operations of each graph, as an integer, to (graph, its result).
GraphsByOps = Mapping[int, tuple[torch.cuda.CUDAGraph, ResultT]]

# The `SamplingOps` for which graphs are captured, least work first. The last graph does all operations and serves every
# other combination, because an operation does not affect rows that do not need the operation.
CAPTURED_OP_SETS = (
    *(
        int(ops | mask)
        for ops in (SamplingOps.GREEDY, SamplingOps.RANDOM, SamplingOps.RANDOM | SamplingOps.FILTER)
        for mask in (SamplingOps.GREEDY, SamplingOps.MASK)
    ),
    int(~SamplingOps.GREEDY),
)
# Integers, because operations on enum flags are slow.
_RANDOM, _FILTER, _PENALTY = int(SamplingOps.RANDOM), int(SamplingOps.FILTER), int(SamplingOps.PENALTY)
_BIAS, _FORBID, _MASK = int(SamplingOps.BIAS), int(SamplingOps.FORBID), int(SamplingOps.MASK)

GatherColumns = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


class ChoiceGraphs(NamedTuple):
    """The captured choice of tokens for one shape.

    sampling: graphs of `TokenChooser.choose_padded`.
    proposing: graphs of `TokenChooser.propose_padded`; empty without speculation.
    """

    sampling: GraphsByOps[SampledTokens]
    proposing: GraphsByOps[Tensor | None]


class TokenChooser:
    """Chooses the tokens of all rows of a step, and proposes drafts, with kernels or captured graphs.

    proposer: None without speculation.
    """

    def __init__(
        self,
        table: RequestTable,
        parallel: ParallelContext,
        config: ResolvedConfig,
        proposer: Proposer | None = None,
    ):
        length = config.acceptance_length
        self._forced_acceptance = None if length is None else ForcedAcceptance(length, table)
        self._table = table
        self._parallel = parallel
        self._proposer = proposer
        num_rows = parallel.count_gathered(table.num_rows)
        max_masks = max(num_rows, config.max_draft_step_tokens) if table.max_drafts else num_rows
        self._constraints = Constraints(num_rows, table.vocab_size, table.device, max_masks)
        self._gather_columns = compile_for_rows(gather_columns, min_rows=1) if config.compile else gather_columns

    def begin_step(self, plan: StepPlan) -> int:
        """Begin a step on rank 0. Returns the number of masks that the step needs, which the other ranks must know."""
        return self._constraints.begin_step(plan)

    def choose(
        self,
        step: StepInputs,
        output: ForwardOutput,
        num_masks: int,
        host_slot: HostCopySlot | None,
        graphs: ChoiceGraphs | None,
        prompt_scores: Sequence[PromptScores],
        proposes: bool,
    ) -> StepHandle:
        """Choose tokens, and wait for the previous step if masks depend on its tokens.

        num_masks: result of `begin_step` on rank 0.
        host_slot: None on a CPU.
        graphs: graphs that read `output`; None to launch kernels.
        prompt_scores: one `PromptScores` per `PromptLogprobsRange` of the plan.
        proposes: see `BatchShape`.
        """
        constraints, ops = self._constraints, step.sampling_ops
        masks = self._fill_masks(step, num_masks) if num_masks else None
        if masks is not None:
            ops |= _MASK
        draft_ops = ops if proposes else NO_DRAFTS
        samples = num_new = proposals = None
        if graphs is not None:
            captured_ops = select_graph(graphs.sampling, ops)
            if masks is None and captured_ops & _MASK:
                constraints.mask_buffer.clear()
            graph, (samples, num_new) = graphs.sampling[captured_ops]
            graph.replay()
            if graphs.proposing:
                graph, proposals = graphs.proposing[select_graph(graphs.proposing, draft_ops)]
                graph.replay()
        elif step.sampling_indices.size:
            samples, num_new = self._choose_and_write(ops, output, step.device_rows, masks, has_drafts=step.has_drafts)
            proposals = self._propose(draft_ops, output, step.device_rows)
        else:
            # No row samples, so the kernel does not read its `tokens` argument: pass any int32 tensor.
            self._write_tokens(step.device_rows, step.device_rows.table_rows, ops, has_drafts=False)
            self._propose(NO_DRAFTS, output, step.device_rows)
        # Graphs contain no log-probabilities, because few requests ask for them.
        token_logprobs = None
        if samples is not None and step.max_num_logprobs >= 0:
            token_logprobs = compute_logprobs(samples, output.logits, step, self._parallel)
        chosen = ChosenTokens(samples, num_new, proposals)
        handle = StepHandle(step, chosen, token_logprobs, host_slot, constraints.failures, prompt_scores)
        constraints.end_step(handle)
        return handle

    def _fill_masks(self, step: StepInputs, num_masks: int) -> Masks | None:
        """The masks of a step; None if there is one rank and no row is restricted.

        Rank 0 fills the masks, and waits for the previous step if they depend on its tokens.
        """
        masks = None
        if self._parallel.rank == 0:
            masks = self._constraints.fill_masks(step.sampling_indices)
        if self._parallel.size == 1:
            return masks
        mask_buffer = self._constraints.mask_buffer
        if self._parallel.rank == 0 and masks is None:
            # No row is restricted, but the other ranks expect masks.
            mask_buffer.send([-1] * num_masks)
        return mask_buffer.share(num_masks, self._parallel)

    def choose_padded(self, ops: int, output: ForwardOutput, has_drafts: bool) -> SampledTokens:
        """Choose tokens for all rows of the step buffer and all ranks, including padding. Graphs capture this method.

        Returns `samples` and `num_new` of `ChosenTokens`.
        """
        masks = None
        if ops & _MASK:
            masks = self._constraints.mask_buffer.first_masks(self._parallel.count_gathered(len(output.positions)))
        rows = self._table.step_buffer.first_rows(len(output.seq_lens))
        return self._choose_and_write(ops, output, rows, masks, has_drafts=has_drafts)

    def propose_padded(self, ops: int, output: ForwardOutput) -> Tensor | None:
        """Propose drafts for all rows of the step buffer, including padding. Graphs capture this method.

        Returns `ChosenTokens.proposals`.
        """
        return self._propose(ops, output, self._table.step_buffer.first_rows(len(output.seq_lens)))

    def _propose(self, ops: int, output: ForwardOutput, rows: DeviceRows) -> Tensor | None:
        if self._proposer is None or output.step is None:
            return None
        drafts, num_proposed = self._proposer.propose(rows, output.step, ops, self._sample)
        if self._forced_acceptance is not None and ops != NO_DRAFTS:
            num_proposed = rows.is_sampled * self._table.max_drafts
        return torch.cat((num_proposed.unsqueeze(1), drafts), 1)

    def _choose_and_write(
        self, ops: int, output: ForwardOutput, rows: DeviceRows, masks: Masks | None, *, has_drafts: bool
    ) -> SampledTokens:
        tokens = self._sample(output.logits, output.table_rows, output.positions, ops, masks)
        if self._forced_acceptance is not None:
            tokens = self._forced_acceptance.replace_samples(tokens, output.table_rows, output.positions)
        # If ranks have different requests, the tables have only this rank's requests.
        own_tokens = self._parallel.own_rows(tokens) if self._parallel.splits_requests else tokens
        return tokens, self._write_tokens(rows, own_tokens, ops, has_drafts=has_drafts)

    def _sample(
        self, logits: Tensor, table_rows: Tensor, positions: Tensor, ops: int, masks: Masks | None = None
    ) -> Tensor:
        """Choose the tokens of this rank's share of the samples, and gather the tokens that all ranks chose.

        logits: [m, vocab], logits of this rank's share.
        table_rows, positions: int32 [n], see `ForwardOutput`.
        Returns int32 [`ParallelContext.count_gathered(n)`].
        """
        parallel = self._parallel
        own_rows, own_positions = map(parallel.own_requests, (table_rows, positions))
        own_masks = None if masks is None else _select_own_masks(masks, len(own_rows), parallel)
        own_tokens = choose_tokens(logits, own_rows, own_positions, self._table, ops, self._gather_columns, own_masks)
        return parallel.gather_rows(own_tokens, parallel.count_gathered(len(positions)))

    def _write_tokens(self, rows: DeviceRows, tokens: Tensor, ops: int, *, has_drafts: bool) -> Tensor | None:
        """Write new tokens to the request table.

        Returns the number of new tokens of each request, int32 [n]; None if the step has no drafts.
        """
        table = self._table
        counts = table.token_counts if ops & _PENALTY else None
        tables = TokenTables(table.tokens, table.num_computed)
        num_new = None
        if has_drafts:
            num_new = verify_drafts(rows.table_rows, rows.query_start_loc, tokens, tables, counts)
        else:
            commit_tokens(rows.table_rows, rows.query_start_loc, tokens, rows.is_sampled, tables, counts)
        if table.num_pending is not None:
            _update_pending(table.num_pending, rows, num_new)
        return num_new


def _update_pending(num_pending: Tensor, rows: DeviceRows, num_new: Tensor | None) -> None:
    """For each request with tokens, set the number of accepted drafts that its recurrent state does not include yet.

    num_pending: see `RequestTable`.
    num_new: int32 [n], number of new tokens of each request; None without drafts.
    """
    # Padding has row 0 and no tokens. Adding differences (0 for padding) is right even if row 0 occurs several times.
    num_tokens = rows.query_start_loc.diff()
    target = 0 if num_new is None else num_new - 1
    difference = (target - num_pending.index_select(0, rows.table_rows)).masked_fill_(num_tokens == 0, 0)
    num_pending.index_add_(0, rows.table_rows, difference)


def _select_own_masks(masks: Masks, num_own_rows: int, parallel: ParallelContext) -> Masks:
    """The masks of the requests for which this rank chooses tokens. Marks all other masks as unused."""
    if parallel.size == 1:
        return masks
    own_indices = masks.sample_indices - parallel.rank * num_own_rows
    is_other = (own_indices < 0) | (own_indices >= num_own_rows)
    return masks._replace(sample_indices=own_indices.masked_fill_(is_other, -1))


def choose_tokens(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    table: RequestTable,
    ops: int,
    gather: GatherColumns,
    masks: Masks | None = None,
) -> Tensor:
    """Choose a token int32 [n] for each row of `logits` [n, vocab].

    rows: int32 [n], rows of the request table.
    positions: int32 [n], positions of the new tokens.
    ops: `SamplingOps` of all rows combined.
    gather: `gather_columns`, perhaps compiled.
    """
    if ops & _PENALTY:
        penalties = table.repetition, table.presence, table.frequency
        logits = sampling.apply_penalties(logits, rows, table.token_counts, *penalties)
    elif ops & (_BIAS | _FORBID | _MASK):
        # Adjust a copy, because log-probabilities are computed from the unchanged logits.
        logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if ops & _BIAS:
        sampling.apply_bias_(logits, rows, positions, table.bias_ids, table.bias_values, table.bias_until)
    if ops & _FORBID:
        sampling.forbid_sequences_(logits, rows, positions, table.tokens, table.num_prompt_tokens, table.forbidden)
    if masks is not None:
        sampling.apply_masks_(logits, masks.sample_indices, masks.bits)
    settings = (table.temperature, table.top_k, table.top_p, table.min_p, table.seeds)
    if ops & _RANDOM:
        settings = gather(rows, settings)
    all_greedy, any_filter = not ops & _RANDOM, bool(ops & _FILTER)
    return sampling.sample(
        logits, sampling.DrawSettings(*settings), positions, all_greedy=all_greedy, any_filter=any_filter
    )


def gather_columns(rows: Tensor, columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The entries of each column at `rows` int32 [n]."""
    return tuple(column.index_select(0, rows) for column in columns)


def select_graph(graphs: GraphsByOps[ResultT], ops: int) -> int:
    """The key of the first graph that does all of `ops`. Raises LookupError if there is none."""
    if ops in graphs:
        return ops
    for captured in graphs:
        if not ops & ~captured:
            return captured
    raise LookupError(f"no graph does the operations {ops}, only {list(graphs)}")


def compute_logprobs(tokens: Tensor, logits: Tensor, step: StepInputs, parallel: ParallelContext) -> sampling.Logprobs:
    """Log-probabilities of chosen and likeliest tokens, for the requests that ask for them.

    tokens: [n], all samples. May have padding at the end.
    logits: this rank's share of [n, vocab], without penalties and temperature.
    """
    indices, count = step.logprob_indices, parallel.count_gathered(step.num_samples)
    selected_indices = None
    # The ranks' requests may come in another order than the step's requests.
    if not np.array_equal(indices, np.arange(count)):
        selected_indices = stage_upload(indices.astype(np.int32), tokens.device).to(tokens.device, non_blocking=True)
    if parallel.size > 1:
        own_logprobs = sampling.compute_logprobs(logits, parallel.own_rows(tokens), step.max_num_logprobs)
        columns = (parallel.gather_rows(column, count) for column in own_logprobs)
        return sampling.Logprobs(
            *(column if selected_indices is None else column.index_select(0, selected_indices) for column in columns)
        )
    if selected_indices is not None:
        tokens, logits = tokens.index_select(0, selected_indices), logits.index_select(0, selected_indices)
    elif len(tokens) > count:
        tokens, logits = tokens[:count], logits[:count]
    return sampling.compute_logprobs(logits, tokens, step.max_num_logprobs)
