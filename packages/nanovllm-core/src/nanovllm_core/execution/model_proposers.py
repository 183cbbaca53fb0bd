"""Proposes drafts with a draft model, or with the model's head for multi-token prediction (MTP).

Both store one cache entry per token, in a cache whose blocks have the same ids as the model's blocks. A head computes
the entries of a step's tokens during the step. A draft model computes entries only when it proposes drafts (see
`DraftPlanner`).
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_core.cache.memory import CacheMemory
from nanovllm_core.config import ResolvedConfig
from nanovllm_core.errors import ConfigError
from nanovllm_core.execution.forward import BatchBounds, StepTokens, find_requests, plan_attention
from nanovllm_core.execution.inputs import DeviceRows, upload
from nanovllm_core.execution.proposers import NO_DRAFTS, NgramProposer, Proposer, SampleTokens
from nanovllm_core.execution.request_table import RequestTable, SamplingOps
from nanovllm_core.model import CausalLM, ForwardContext, ModelSpec, MultiTokenModel
from nanovllm_core.parallel import ParallelContext
from nanovllm_core.scheduling.plan import DraftEntryRange
from nanovllm_kernels.request_tables import BatchInputs, TokenTables, build_inputs, commit_tokens

# Operations that proposing ignores. Rows with penalties have no drafts. The token mask of a draft's position is
# computed after the draft.
_IGNORED_OPS = int(SamplingOps.PENALTY | SamplingOps.MASK)


class _CachingProposer(Proposer):
    """Draws drafts one after the other, with cache entries of its own.

    To verify a draft, the model draws with the same random number, so equal logits give equal tokens.

    entry_offset: number of positions by which the cache entry of a token precedes the token.
    forward, compute_logits: see `PredictionHead`. cache: caches of the layers that `forward` runs.
    """

    entry_offset = 0
    uses_cache = True

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor, Tensor, ForwardContext], Tensor],
        compute_logits: Callable[[Tensor], Tensor],
        cache: CacheMemory,
        table: RequestTable,
        config: ResolvedConfig,
        parallel: ParallelContext,
    ):
        self._forward = forward
        self._compute_logits = compute_logits
        self._cache = cache
        self._table = table
        self._config = config
        self._parallel = parallel

    def captured_ops(self, *, may_propose: bool) -> tuple[int, ...]:
        """See `Proposer.captured_ops`."""
        # A graph without RANDOM would save little time, because the draft model or the head takes most of the time.
        proposing_ops = (_IGNORED_OPS | int(SamplingOps.RANDOM), int(~SamplingOps.GREEDY))
        return (*proposing_ops, NO_DRAFTS) if may_propose else (NO_DRAFTS,)

    def propose(self, rows: DeviceRows, step: StepTokens, ops: int, sample: SampleTokens) -> tuple[Tensor, Tensor]:
        """See `Proposer.propose`."""
        table, num_proposed = self._table, torch.zeros_like(rows.is_sampled)
        hidden = self._compute_step_entries(rows, step)
        if ops != NO_DRAFTS:
            self._draw(rows, step, hidden, ops, sample, num_proposed)
        position = table.num_computed.index_select(0, rows.table_rows) + 1
        columns = position.unsqueeze(1) + torch.arange(table.max_drafts, device=table.device)
        return table.tokens[rows.table_rows.unsqueeze(1), columns.clamp_(max=table.tokens.shape[1] - 1)], num_proposed

    def _draw(
        self, rows: DeviceRows, step: StepTokens, hidden: Tensor, ops: int, sample: SampleTokens, num_proposed: Tensor
    ) -> None:
        """Write drafts to the table, and count them in `num_proposed`. hidden: result of `_compute_step_entries`."""
        table, (table_rows, _, is_sampled) = self._table, rows
        num_reqs = len(table_rows)
        max_seq_len = min(step.bounds.max_seq_len + table.max_drafts, self._config.max_model_len)
        bounds = BatchBounds(num_reqs, num_reqs, 1, max_seq_len, has_only_whole_prompts=False)
        hidden, has_space = self._prepare_first_drafts(rows, step, hidden, bounds)
        is_proposed = has_space * is_sampled
        starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=table.device)
        sampled_starts = functional.pad(is_sampled.cumsum(0, dtype=torch.int32), (1, 0))
        # `draft_tables.num_computed` is the position of each row's last token or draft.
        draft_tables = TokenTables(table.tokens, table.num_computed.clone())
        position = table.num_computed.index_select(0, table_rows) + 1
        for index in range(table.max_drafts):
            logits = self._parallel.exchange_columns(self._compute_logits(hidden))[:, : table.vocab_size]
            # Logits of padding may be NaN. A token that is drawn from NaN may be an invalid index.
            tokens = sample(logits, table_rows, position + index, ops & ~_IGNORED_OPS).clamp(0, table.vocab_size - 1)
            # Write a draft only if the token before it has a cache entry. An accepted draft needs this entry.
            commit_tokens(table_rows, sampled_starts, tokens, is_proposed, draft_tables, None)
            num_proposed += is_proposed
            if index + 1 < table.max_drafts:
                first_positions = self._clamp_first_positions(draft_tables.num_computed - self.entry_offset, bounds)
                inputs = self._build_inputs(table_rows, starts, first_positions, bounds)
                slots = inputs.slot_mapping * is_sampled
                is_proposed = (slots >= self._cache.layout.block_size).int()
                hidden = self._run(inputs._replace(slot_mapping=slots, input_ids=tokens), starts, bounds, hidden)

    def _build_inputs(
        self, table_rows: Tensor, query_start_loc: Tensor, num_computed: Tensor, bounds: BatchBounds
    ) -> BatchInputs:
        """The inputs of a batch in which each request begins at its position in `num_computed`.

        Where a request has no block yet, its block table has the null block, whose contents are never read.
        """
        tables = TokenTables(self._table.tokens, num_computed)
        block_size = self._cache.layout.block_size
        num_columns = -(-bounds.max_seq_len // block_size)
        return build_inputs(
            table_rows, query_start_loc, tables, self._table.block_table, block_size, bounds.num_tokens, num_columns
        )

    def _clamp_first_positions(self, num_computed: Tensor, bounds: BatchBounds) -> Tensor:
        """Clamp the first positions of a batch to the table.

        Rows of padding and of finished requests have arbitrary positions, which may lie outside the table.
        """
        return num_computed.clamp(0, self._config.max_model_len - bounds.max_query_len)

    def _run(self, inputs: BatchInputs, query_start_loc: Tensor, bounds: BatchBounds, hidden: Tensor) -> Tensor:
        """Run `forward` on a batch. hidden: [T, hidden], see `PredictionHead.forward`."""
        cache, requests = self._cache, (inputs.block_tables, inputs.seq_lens, query_start_loc)
        batch = plan_attention(cache, self._config, requests, bounds)
        context = ForwardContext(batch, inputs.slot_mapping, cache.kv_caches, cache.kv_scales)
        return self._forward(inputs.input_ids, inputs.positions, hidden, context)

    def _compute_step_entries(self, rows: DeviceRows, step: StepTokens) -> Tensor:
        """Compute the cache entries that need the step's hidden states. By default there are none.

        Returns hidden states [num_tokens, hidden] after the step's tokens.
        """
        del rows
        return step.hidden

    @abstractmethod
    def _prepare_first_drafts(
        self, rows: DeviceRows, step: StepTokens, hidden: Tensor, bounds: BatchBounds
    ) -> tuple[Tensor, Tensor]:
        """Compute the cache entries up to each request's last token.

        hidden: result of `_compute_step_entries`.
        bounds: bounds of a batch with one token per request.
        Returns hidden states [B, hidden] that predict the first drafts, and whether the cache has space for the entries
        of the last tokens, bool [B].
        """


class DraftModelProposer(_CachingProposer):
    """Proposes the tokens of a draft model.

    The ranks split the draft model in the same way as the model, so that they can't disagree about a draft.
    """

    can_lag = True

    def compute_late_draft_entries(self, entries: Sequence[DraftEntryRange]) -> None:
        """See `Proposer.compute_late_draft_entries`."""
        # Attention expects requests with one token first.
        rows, first_positions, lengths = np.array(sorted(entries, key=lambda entry: entry.num_tokens != 1), np.int32).T
        query_starts = np.concatenate(([0], lengths.cumsum()), dtype=np.int32)
        table = self._table
        table_rows, starts, query_start_loc = upload([rows, first_positions, query_starts], table.device)
        num_tokens, num_decodes = int(lengths.sum()), int(np.count_nonzero(lengths == 1))
        max_lens = int(lengths.max()), int((first_positions + lengths).max())
        bounds = BatchBounds(num_tokens, num_decodes, *max_lens, has_only_whole_prompts=False)
        num_computed = table.num_computed.index_copy(0, table_rows.long(), starts)
        inputs = self._build_inputs(table_rows, query_start_loc, num_computed, bounds)
        # A draft model ignores the hidden states, so pass any tensor.
        self._run(inputs, query_start_loc, bounds, table.tokens)

    def _prepare_first_drafts(
        self, rows: DeviceRows, step: StepTokens, hidden: Tensor, bounds: BatchBounds
    ) -> tuple[Tensor, Tensor]:
        del step
        # Only the last two tokens lack entries. Earlier calls of `propose` computed the entries of accepted drafts,
        # and `compute_late_draft_entries` computed all other entries.
        num_reqs, device = len(rows.table_rows), self._table.device
        starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * 2
        bounds = bounds._replace(num_tokens=2 * num_reqs, num_decodes=0, max_query_len=2)
        first_positions = self._clamp_first_positions(self._table.num_computed - 1, bounds)
        inputs = self._build_inputs(rows.table_rows, starts, first_positions, bounds)
        has_tokens = rows.query_start_loc.diff() > 0
        slots = inputs.slot_mapping * has_tokens.repeat_interleave(2, output_size=2 * num_reqs)
        hidden = self._run(inputs._replace(slot_mapping=slots), starts, bounds, hidden)
        return hidden[1::2], slots[1::2] >= self._cache.layout.block_size


class HeadProposer(_CachingProposer):
    """Proposes the tokens of the model's head for multi-token prediction.

    The head combines a token with the hidden state at the position before it, and stores the cache entry at that
    position. So the last entry of a block belongs to the token after the block. If requests share the block but not
    this token, the entry is wrong for some of them. This only lowers the acceptance of drafts.
    """

    entry_offset = 1
    reads_step = True

    def _compute_step_entries(self, rows: DeviceRows, step: StepTokens) -> Tensor:
        table, positions = self._table, step.inputs.positions
        token_rows = rows.table_rows.index_select(0, find_requests(rows, len(positions)))
        inputs = step.inputs._replace(input_ids=table.tokens[token_rows, positions + 1])
        return self._run(inputs, rows.query_start_loc, step.bounds, step.hidden)

    def _prepare_first_drafts(
        self, rows: DeviceRows, step: StepTokens, hidden: Tensor, bounds: BatchBounds
    ) -> tuple[Tensor, Tensor]:
        del bounds
        positions = step.inputs.positions
        # The last accepted input token of the step is one position before the token that the step sampled.
        starts = rows.query_start_loc[:-1].clamp(max=len(positions) - 1)
        last_kept = self._table.num_computed.index_select(0, rows.table_rows) - 1
        indices = (starts + last_kept - positions.index_select(0, starts)) * rows.is_sampled
        return hidden.index_select(0, indices), rows.is_sampled.bool()


def find_draft_spec(spec: ModelSpec, config: ResolvedConfig) -> ModelSpec | None:
    """The spec of the draft model; None if `config.speculate` is not "draft".

    Raises ConfigError if the draft model is not named, or has a different vocabulary size than the model.
    """
    if config.speculate != "draft":
        return None
    draft = spec.draft
    if draft is None:
        raise ConfigError("speculate is 'draft', but no draft model is named: set --draft-model (`ModelSpec.draft`)")
    if draft.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"--draft-model {draft.name} has {draft.vocab_size} token ids, but the model {spec.name} has "
            f"{spec.vocab_size}: name a draft model with the same tokens"
        )
    return draft


def make_proposer(
    model: CausalLM,
    draft_model: CausalLM | None,
    cache: CacheMemory,
    table: RequestTable,
    config: ResolvedConfig,
    parallel: ParallelContext,
) -> Proposer | None:
    """The proposer for `config.speculate`; None without speculation. Raises ConfigError if the MTP head is missing."""
    if not config.max_drafts:
        return None
    arguments = table, config, parallel
    if draft_model is not None and cache.draft is not None:
        forward = draft_model.forward
        return DraftModelProposer(
            lambda ids, positions, _, ctx: forward(ids, positions, ctx),
            draft_model.compute_logits,
            cache.draft,
            *arguments,
        )
    if not config.uses_mtp:
        return NgramProposer(table)
    head = model.mtp_head() if isinstance(model, MultiTokenModel) else None
    if head is None:
        raise ConfigError(
            "speculate is 'mtp', but the checkpoint has no heads for multi-token prediction: use 'ngram' or 'draft'"
        )
    return HeadProposer(head.forward, head.compute_logits, cache, *arguments)
