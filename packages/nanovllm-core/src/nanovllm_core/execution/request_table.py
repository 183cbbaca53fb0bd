"""Device tables of running requests. Each step writes its tokens to the tables, where the next step reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.cache.memory import order_slot_copies
from nanovllm_core.execution.inputs import DeviceRows, Int32Array, StepBuffer, upload
from nanovllm_core.execution.rank_requests import RankRequests
from nanovllm_core.parallel import ParallelContext
from nanovllm_core.request_state import MAX_CHECKPOINTS
from nanovllm_core.sampling_params import (
    MAX_FORBIDDEN_SEQUENCE_TOKENS,
    MAX_FORBIDDEN_SEQUENCES,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_STOP_TOKENS,
    SamplingParams,
)
from nanovllm_core.scheduling.plan import NewBlocks, NewRow, ScheduledRows, StepPlan
from nanovllm_kernels.sampling import IN_PROMPT_BIT

_MAX_POSITION = np.iinfo(np.int32).max
# Lower temperatures count as greedy, because dividing logits by them could overflow.
_MIN_RANDOM_TEMPERATURE = 1e-5
_MIN_TOP_P = 1e-6  # kernels need a positive top-p
# Maximum number of tokens of a client's prediction. Drafts are copied from these tokens. A multiple of 16 keeps
# `RequestTable.tokens`, which follows these tokens, aligned.
_MAX_PREDICTION_TOKENS = 16_384
_NO_TOKEN = -1


class SamplingOps(IntFlag):
    """Operations that choose a row's token. A step skips operations that none of its rows needs.

    GREEDY: argmax. RANDOM: draw at a temperature. FILTER: top-k, top-p or min-p. PENALTY: presence, frequency or
        repetition penalty. BIAS: `logit_bias` or `min_tokens`. MASK: token masks of grammars, reasoning budgets and
        allowed token ids; set by `TokenChooser` only. FORBID: `forbidden_sequences`.
    """

    GREEDY = 0
    RANDOM = 1
    FILTER = 2
    PENALTY = 4
    BIAS = 8
    MASK = 16
    FORBID = 32


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a step.

    Indices of requests are positions in the list of all ranks' requests, in the order of
    `ParallelContext.gather_requests`. If ranks have equal requests, the list has each request once.

    device_rows: this rank's requests, with padding only if ranks have different requests.
    query_lens: int64 [n], number of tokens that the step computes for each of this rank's requests, without padding.
    sampling_indices: int64 [n], indices of the requests that sample, in the plan's order. In a step with drafts,
        indices of these requests' first tokens in the step.
    sampling_ops: `SamplingOps` of this rank's requests that sample, combined, without MASK. An int is faster than an
        enum flag.
    num_logprobs: int64 [n], `SamplingParams.logprobs` of the requests of all ranks that sample; -1 for None.
    state_copies: (source slots, target slots), int64 [m] each, of recurrent states to copy before the step, or None.
    """

    device_rows: DeviceRows
    query_lens: NDArray[np.int64]
    sampling_indices: NDArray[np.int64]
    sampling_ops: int
    num_logprobs: NDArray[np.int64]
    max_num_logprobs: int
    state_copies: tuple[Tensor, Tensor] | None = None
    has_drafts: bool = False

    @property
    def num_samples(self) -> int:
        """The number of samples of `device_rows`: one per request, or with drafts one per token."""
        return int(self.query_lens.sum()) if self.has_drafts else len(self.device_rows.table_rows)

    @property
    def logprob_indices(self) -> NDArray[np.int64]:
        """Indices of the samples of requests that ask for log-probabilities, int64 [n]."""
        has_logprobs = self.num_logprobs >= 0
        if not self.has_drafts:
            return self.sampling_indices[has_logprobs]
        return np.flatnonzero(np.repeat(has_logprobs, self.query_lens))


class RequestTable:
    """Tables with one row per request of this rank.

    requests: selects this rank's part of a plan.
    search_tokens: int32 [rows, n], the tokens in which drafts are searched: the request's predicted tokens (padded with
        -1 on the left), then `tokens`.
    tokens: int32 [rows, max_model_len + 1 + max_drafts], the last columns of `search_tokens`: the request's tokens and
        drafts.
    num_computed: int32 [rows], number of tokens that the cache holds.
    block_table: int32 [rows, blocks], KV block ids; 0 beyond the request's last block.
    token_counts: number of occurrences of each token id in the output; IN_PROMPT_BIT is set if the prompt has the id.
    bias_until: int32 [rows, biases], first position at which each bias no longer applies.
    num_prompt_tokens: only valid for rows with forbidden sequences.
    state_slots: int32 [rows], index of the request's recurrent state.
    checkpoints: int32 [rows, MAX_CHECKPOINTS, 2], pairs (position, state slot) of recurrent states to save.
    num_pending: int32 [rows], number of accepted drafts that the request's recurrent state does not include yet; None
        without recurrent layers or without drafts.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        num_eos_tokens: int,
        device: torch.device,
        *,
        has_recurrent_layers: bool = False,
        max_drafts: int = 0,
        parallel: ParallelContext | None = None,
    ):
        self.device = device
        self.num_rows = num_rows
        parallel = parallel or ParallelContext()
        self.requests = RankRequests(parallel, num_rows)
        self._has_recurrent_layers = has_recurrent_layers
        self.vocab_size = vocab_size

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_prediction_tokens = 0
        if max_drafts:
            self.max_prediction_tokens = min(-(-max_model_len // 16) * 16, _MAX_PREDICTION_TOKENS)
        # A request may finish while its next step is in flight. The last columns are for the tokens of that step.
        self.search_tokens = zeros(num_rows, self.max_prediction_tokens + max_model_len + 1 + max_drafts)
        self.tokens = self.search_tokens[:, self.max_prediction_tokens :]
        self.num_computed = zeros(num_rows)
        self.block_table = zeros(num_rows, -(-max_model_len // block_size))
        self._floats = zeros(6, num_rows, dtype=torch.float32)
        self.temperature, self.top_p, self.min_p, self.presence, self.frequency, self.repetition = self._floats
        # Padding may read rows that were never written, so start with 1, the penalty that changes nothing.
        self.repetition.fill_(1)
        self.top_k = zeros(num_rows)
        self.seeds = zeros(num_rows, dtype=torch.int64)
        self.token_counts = zeros(num_rows, vocab_size)
        num_biases = MAX_LOGIT_BIAS_ENTRIES + MAX_STOP_TOKENS + num_eos_tokens
        self.bias_ids = zeros(num_rows, num_biases)
        self.bias_values = zeros(num_rows, num_biases, dtype=torch.float32)
        self.bias_until = zeros(num_rows, num_biases)
        self.forbidden = zeros(num_rows, MAX_FORBIDDEN_SEQUENCES, MAX_FORBIDDEN_SEQUENCE_TOKENS).fill_(-1)
        self.num_prompt_tokens = zeros(num_rows)
        self.state_slots = zeros(num_rows)
        self.checkpoints = zeros(num_rows, MAX_CHECKPOINTS, 2)
        self.max_drafts = max_drafts
        self.num_pending = zeros(num_rows) if has_recurrent_layers and max_drafts else None
        self.step_buffer = StepBuffer(num_rows, device)
        self._ops = np.zeros(num_rows, np.uint8)
        # By row: the operations of the last request that `_write_optional_tables` wrote. The request's values remain in
        # the tables when it finishes, so the row's next request must replace or clear them.
        self._written_ops = np.zeros(num_rows, np.uint8)
        # `SamplingParams.logprobs` by row of the plan. The row numbers of a plan cover all ranks.
        self._num_logprobs = np.full(parallel.count_gathered(num_rows), -1, np.int64)
        # The last step's (scheduled rows, inputs). If the same requests decode again, only new blocks are uploaded.
        self._last_step: tuple[ScheduledRows, StepInputs] | None = None

    def apply_plan(self, plan: StepPlan, num_reqs: int = 0) -> StepInputs:
        """Update the tables with this rank's part of `plan`, and return the inputs of its step.

        num_reqs: number of requests that each rank computes, including padding. Ignored unless ranks have different
            requests.
        """
        requests = self.requests
        blocks = requests.select_blocks(plan.new_blocks)
        if self._last_step is not None and plan.scheduled is self._last_step[0] and not plan.new_rows:
            if blocks.rows:
                self._write_changes([], blocks)
            return self._last_step[1]
        rows, query_lens, is_sampled = requests.select_scheduled(plan.scheduled)
        new_rows = requests.select_new_rows(plan.new_rows)
        self._record_num_logprobs(plan.new_rows)
        if new_rows or blocks.rows:
            self._write_changes(new_rows, blocks)
        state_copies = self._write_states(new_rows) if self._has_recurrent_layers and new_rows else None
        self.step_buffer.write(rows, query_lens, is_sampled)
        num_logprobs = self._num_logprobs[plan.scheduled.rows[plan.scheduled.is_sampled]]
        if plan.shape.has_drafts:
            sampling_indices = query_lens.cumsum() - query_lens
        else:
            sampling_indices = requests.find_sampling_indices(plan.scheduled, num_reqs)
        inputs = StepInputs(
            device_rows=self.step_buffer.first_rows(requests.count_with_padding(len(rows), num_reqs)),
            query_lens=query_lens,
            sampling_indices=sampling_indices,
            sampling_ops=int(np.bitwise_or.reduce(self._ops[rows[is_sampled]], initial=0)),
            num_logprobs=num_logprobs,
            max_num_logprobs=int(num_logprobs.max(initial=-1)),
            state_copies=state_copies,
            has_drafts=plan.shape.has_drafts,
        )
        self._last_step = (plan.scheduled, inputs) if state_copies is None else None
        return inputs

    def _write_states(self, new_rows: Sequence[NewRow]) -> tuple[Tensor, Tensor] | None:
        states = [new_row.state for new_row in new_rows]
        checkpoints = np.zeros((len(states), MAX_CHECKPOINTS, 2), np.int32)
        for index, state in enumerate(states):
            if state.checkpoints:
                checkpoints[index, : len(state.checkpoints)] = state.checkpoints
        # A plan may evict the source slot of one copy, and use this slot as the target of another copy. Order the
        # copies so that each slot is read before it is overwritten.
        pairs = order_slot_copies([(state.source_slot, state.slot) for state in states if state.source_slot])
        copies = np.array(pairs, np.int64).reshape(-1, 2)
        rows, slots, flat_checkpoints, sources, targets = upload(
            [
                np.array([new_row.row for new_row in new_rows], np.int32),
                np.array([state.slot for state in states], np.int32),
                checkpoints.reshape(-1),
                copies[:, 0].copy().view(np.int32),
                copies[:, 1].copy().view(np.int32),
            ],
            self.device,
        )
        rows = rows.long()
        self.state_slots[rows] = slots
        self.checkpoints[rows] = flat_checkpoints.view(-1, MAX_CHECKPOINTS, 2)
        return (sources.view(torch.int64), targets.view(torch.int64)) if len(copies) else None

    def _write_changes(self, new_rows: Sequence[NewRow], blocks: NewBlocks) -> None:
        row_starts = np.array(blocks.rows, np.int64) * self.block_table.shape[1]
        flat_indices = row_starts + np.array(blocks.entries, np.int64)
        arrays = [flat_indices.view(np.int32), np.array(blocks.block_ids, np.int32)]
        if new_rows:
            self._record_ops(new_rows)
            arrays += self._make_row_arrays(new_rows)
        flat_block_indices, block_ids, *row_tensors = upload(arrays, self.device)
        if new_rows:
            self._write_rows(row_tensors)
        if blocks.rows:
            self.block_table.view(-1).index_copy_(0, flat_block_indices.view(torch.int64), block_ids)
        if new_rows:
            self._write_optional_tables(new_rows)

    def _record_num_logprobs(self, new_rows: Sequence[NewRow]) -> None:
        for new_row in new_rows:
            logprobs = new_row.sampling.logprobs
            self._num_logprobs[new_row.row] = -1 if logprobs is None else logprobs

    def _record_ops(self, new_rows: Sequence[NewRow]) -> None:
        for new_row in new_rows:
            self._ops[new_row.row] = _find_ops(new_row.sampling)

    def _make_row_arrays(self, new_rows: Sequence[NewRow]) -> list[Int32Array]:
        """Flat arrays with the values of new rows, in the order of `_write_rows`."""
        row_stride, first_column = self.search_tokens.shape[1], self.max_prediction_tokens
        samplings = [new_row.sampling for new_row in new_rows]
        floats = np.array(
            [
                [s.temperature if s.temperature >= _MIN_RANDOM_TEMPERATURE else 0.0 for s in samplings],
                [max(s.top_p, _MIN_TOP_P) for s in samplings],
                [s.min_p for s in samplings],
                [s.presence_penalty for s in samplings],
                [s.frequency_penalty for s in samplings],
                [s.repetition_penalty for s in samplings],
            ],
            np.float32,
        )
        return [
            np.array([new_row.row for new_row in new_rows], np.int32),
            np.array([new_row.num_computed_tokens for new_row in new_rows], np.int32),
            np.array([min(s.top_k, self.vocab_size) for s in samplings], np.int32),
            np.array([new_row.seed for new_row in new_rows], np.int64).view(np.int32),
            floats.reshape(-1).view(np.int32),
            np.concatenate(
                [
                    np.arange(len(new_row.token_ids), dtype=np.int32) + (new_row.row * row_stride + first_column)
                    for new_row in new_rows
                ]
            ),
            np.concatenate([new_row.token_ids for new_row in new_rows]),
        ]

    def _write_rows(self, row_tensors: Sequence[Tensor]) -> None:
        rows, num_computed, top_k, seeds, floats, token_indices, token_ids = row_tensors
        rows = rows.long()
        self.num_computed[rows] = num_computed
        # Cache entries of drafts may be written beyond a request's last block. They must go to the null block, not to a
        # block of the row's previous request.
        self.block_table.index_fill_(0, rows, 0)
        if self.num_pending is not None:
            self.num_pending.index_fill_(0, rows, 0)
        self.top_k[rows] = top_k
        self.seeds[rows] = seeds.view(torch.int64)
        self._floats[:, rows] = floats.view(torch.float32).view(6, -1)
        self.search_tokens.view(-1)[token_indices.long()] = token_ids

    def _write_optional_tables(self, new_rows: Sequence[NewRow]) -> None:
        """Write token counts, biases, forbidden sequences and predictions, or clear the previous request's values.

        Few requests need these tables, so each request has its own upload.
        """
        for new_row in new_rows:
            ops, stale_ops = self._ops[new_row.row], self._written_ops[new_row.row]
            self._written_ops[new_row.row] = ops
            if ops & SamplingOps.PENALTY:
                self._write_counts(new_row)
            if ops & SamplingOps.BIAS:
                self._write_bias(new_row)
            elif stale_ops & SamplingOps.BIAS:
                self.bias_until[new_row.row].zero_()
            if ops & SamplingOps.FORBID:
                self._write_forbidden(new_row)
            elif stale_ops & SamplingOps.FORBID:
                self.forbidden[new_row.row].fill_(-1)
            if self.max_prediction_tokens:
                self._write_prediction(new_row)

    def _write_prediction(self, new_row: NewRow) -> None:
        columns = self.search_tokens[new_row.row, : self.max_prediction_tokens].fill_(_NO_TOKEN)
        if len(new_row.prediction_ids):
            (prediction,) = upload([new_row.prediction_ids[: self.max_prediction_tokens]], self.device)
            columns[len(columns) - len(prediction) :] = prediction

    def _write_forbidden(self, new_row: NewRow) -> None:
        sequences = np.full((MAX_FORBIDDEN_SEQUENCES, MAX_FORBIDDEN_SEQUENCE_TOKENS), -1, np.int32)
        for index, tokens in enumerate(new_row.sampling.forbidden_sequences):
            sequences[index, -len(tokens) :] = tokens
        (uploaded,) = upload([sequences.reshape(-1)], self.device)
        self.forbidden[new_row.row] = uploaded.view(MAX_FORBIDDEN_SEQUENCES, MAX_FORBIDDEN_SEQUENCE_TOKENS)
        self.num_prompt_tokens[new_row.row].fill_(new_row.num_prompt_tokens)

    def _write_counts(self, new_row: NewRow) -> None:
        tokens = new_row.token_ids
        prompt, output = upload([tokens[: new_row.num_prompt_tokens], tokens[new_row.num_prompt_tokens :]], self.device)
        counts = self.token_counts[new_row.row]
        counts.zero_()
        counts.index_add_(0, output, torch.ones_like(output))
        counts[prompt.long()] |= IN_PROMPT_BIT

    def _write_bias(self, new_row: NewRow) -> None:
        bias, stop = new_row.sampling.logit_bias, new_row.stop_ids if new_row.sampling.min_tokens else ()
        ids = np.array([*bias, *stop], np.int32)
        values = np.array([*bias.values(), *(-np.inf for _ in stop)], np.float32)
        until = np.full(len(ids), _MAX_POSITION, np.int32)
        until[len(bias) :] = new_row.num_prompt_tokens + new_row.sampling.min_tokens
        uploaded = upload([ids, values.view(np.int32), until], self.device)
        self.bias_until[new_row.row].zero_()
        self.bias_ids[new_row.row, : len(ids)] = uploaded[0]
        self.bias_values[new_row.row, : len(ids)] = uploaded[1].view(torch.float32)
        self.bias_until[new_row.row, : len(ids)] = uploaded[2]


def _find_ops(sampling: SamplingParams) -> SamplingOps:
    ops = SamplingOps.GREEDY
    if sampling.temperature >= _MIN_RANDOM_TEMPERATURE:
        ops |= SamplingOps.RANDOM
        if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
            ops |= SamplingOps.FILTER
    if sampling.has_penalties:
        ops |= SamplingOps.PENALTY
    if sampling.logit_bias or sampling.min_tokens:
        ops |= SamplingOps.BIAS
    if sampling.forbidden_sequences:
        ops |= SamplingOps.FORBID
    return ops
