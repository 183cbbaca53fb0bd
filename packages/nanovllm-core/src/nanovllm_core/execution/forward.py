"""The forward pass of a step."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.cache.memory import CacheMemory
from nanovllm_core.config import ResolvedConfig
from nanovllm_core.execution.inputs import DeviceRows
from nanovllm_core.execution.request_table import RequestTable, StepInputs
from nanovllm_core.model import CausalLM, ForwardContext, LaunchAttention, MLASpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_core.scheduling.plan import StepPlan
from nanovllm_kernels.attention import AttentionBatch, plan_batch
from nanovllm_kernels.attention.mla import plan_latent_batch
from nanovllm_kernels.linear_attention import StateBatch, plan_states
from nanovllm_kernels.request_tables import BatchInputs, TokenTables, build_inputs


class BatchBounds(NamedTuple):
    """Bounds of a batch's lengths, which the host knows without waiting for the device, see `plan_batch`.

    num_tokens: tokens of the step, including padding.
    num_decodes: number of requests with one token in the step; None if unknown. These requests come first.
    max_seq_len: maximum context length after the step, in tokens.
    has_only_whole_prompts, has_drafts: see `BatchShape`.
    """

    num_tokens: int
    num_decodes: int | None
    max_query_len: int
    max_seq_len: int
    has_only_whole_prompts: bool
    has_drafts: bool = False

    @classmethod
    def from_plan(cls, plan: StepPlan, query_lens: NDArray[np.int64]) -> "BatchBounds":
        """The bounds of a step that is not padded to a captured shape. query_lens: see `StepInputs`."""
        shape, num_decodes = plan.shape, int(np.count_nonzero(query_lens == 1))
        max_query_len, flags = int(query_lens.max(initial=1)), (shape.has_only_whole_prompts, shape.has_drafts)
        return cls(shape.num_tokens, num_decodes, max_query_len, plan.max_seq_len, *flags)


class StepTokens(NamedTuple):
    """The tokens of a forward pass, for the proposer of drafts.

    hidden: [num_tokens, hidden], the model's hidden states.
    """

    hidden: Tensor
    inputs: BatchInputs
    bounds: BatchBounds


class ForwardOutput(NamedTuple):
    """The result of a forward pass.

    The step samples a token after the last token of each request, or after each token if the step has drafts. The
    tensors also have rows for padding.

    logits: [n, vocab], logits of the samples whose tokens this rank chooses (`ParallelContext.own_requests`); empty if
        the step samples no token.
    table_rows: int32 [num_samples], row of each sample's request in the request table.
    positions: int32 [num_samples], position of each sample.
    seq_lens: int32 [num_reqs], context lengths.
    block_tables: int32 [num_reqs, max_blocks], cache blocks of the requests.
    step: the step's tokens for the proposer; None without speculation.
    """

    logits: Tensor
    table_rows: Tensor
    positions: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    step: StepTokens | None = None


class ForwardPass:
    """Runs the model on rows of the request table."""

    def __init__(
        self,
        model: CausalLM,
        table: RequestTable,
        cache: CacheMemory,
        config: ResolvedConfig,
        parallel: ParallelContext,
    ):
        self._model = model
        self._parallel = parallel
        self._table = table
        self._cache = cache
        self._config = config
        # Whether the ranks' hidden states have differed since the start; None if this is not checked.
        self.has_disagreement: Tensor | None = None
        if config.check_ranks and parallel.size > 1:
            self.has_disagreement = torch.zeros(1, dtype=torch.bool, device=table.device)

    def run(
        self, rows: DeviceRows, bounds: BatchBounds, launch_attention: LaunchAttention | None = None
    ) -> tuple[Tensor, BatchInputs]:
        """Run the model. Returns the hidden states [num_tokens, hidden] and the inputs of the batch."""
        table, cache, block_size = self._table, self._cache, self._cache.layout.block_size
        batch = build_inputs(
            rows.table_rows,
            rows.query_start_loc,
            TokenTables(table.tokens, table.num_computed),
            table.block_table,
            block_size,
            bounds.num_tokens,
            -(-bounds.max_seq_len // block_size),
        )
        # `launch_attention` is given only during a capture. Replays plan attention again, so make a minimal plan here.
        planned_bounds = bounds if launch_attention is None else bounds._replace(num_decodes=0)
        requests = (batch.block_tables, batch.seq_lens, rows.query_start_loc)
        attention_batch = plan_attention(cache, self._config, requests, planned_bounds)
        state_batch = self._plan_states(rows, batch.seq_lens, bounds) if cache.state_caches else None
        context = ForwardContext(
            attention_batch,
            batch.slot_mapping,
            cache.kv_caches,
            cache.kv_scales,
            launch_attention,
            cache.state_caches,
            state_batch,
        )
        hidden = self._model.forward(batch.input_ids, batch.positions, context)
        if self.has_disagreement is not None:
            self.has_disagreement.logical_or_(self._differs_on_other_ranks(hidden, rows.query_start_loc[-1]))
        return hidden, batch

    def _differs_on_other_ranks(self, hidden: Tensor, num_tokens: Tensor) -> Tensor:
        """Whether a checksum of the first `num_tokens` rows of `hidden` differs between ranks. The rest is padding."""
        is_token = torch.arange(len(hidden), device=hidden.device) < num_tokens
        digest = hidden.masked_fill(~is_token.unsqueeze(1), 0).view(torch.uint8).sum().view(1)
        return (self._parallel.gather_rows(digest, self._parallel.size) != digest).any()

    def make_output(
        self, hidden: Tensor, rows: DeviceRows, batch: BatchInputs, bounds: BatchBounds, *, has_samples: bool = True
    ) -> ForwardOutput:
        """Compute the logits after the last token of each request, or after each token of a step with drafts.

        hidden: [num_tokens, hidden].
        has_samples: whether the step samples a token. If False, no logits are computed.
        """
        step = StepTokens(hidden, batch, bounds) if self._config.max_drafts else None
        if bounds.has_drafts:
            table_rows = rows.table_rows.index_select(0, find_requests(rows, len(hidden)))
            positions = batch.positions.int() + 1
        else:
            hidden = hidden.index_select(0, batch.last_token_indices)
            table_rows, positions = rows.table_rows, batch.seq_lens
        logits = hidden[:0]
        if has_samples:
            logits = self.compute_logits_of_own_rows(self._parallel.gather_requests(hidden))
        return ForwardOutput(logits, table_rows, positions, batch.seq_lens, batch.block_tables, step)

    def compute_logits_of_own_rows(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab] of this rank's share of the rows of `hidden`. All ranks pass equal `hidden`.

        The ranks exchange logits, so that each rank has all columns of its rows. A rank can therefore choose the tokens
        of its rows without the other ranks, with the same kernels as an engine of one rank.
        """
        logits = self._parallel.exchange_columns(self._model.compute_logits(hidden))
        return logits if logits.shape[1] == self._table.vocab_size else logits[:, : self._table.vocab_size]

    def replan_attention(self, output: ForwardOutput, step: StepInputs, plan: StepPlan) -> AttentionBatch:
        """Plan the attention that runs between the CUDA graphs (pieces) of a replayed step.

        output: result of the captured forward pass.
        """
        # `has_only_whole_prompts` would make attention read the step's keys and values. The pieces do not keep them.
        rows = step.device_rows
        bounds = BatchBounds.from_plan(plan, step.query_lens)._replace(has_only_whole_prompts=False)
        num_reqs, max_blocks = len(rows.table_rows), -(-bounds.max_seq_len // self._cache.layout.block_size)
        requests = (output.block_tables[:num_reqs, :max_blocks], output.seq_lens[:num_reqs], rows.query_start_loc)
        return plan_attention(self._cache, self._config, requests, bounds)

    def _plan_states(self, rows: DeviceRows, seq_lens: Tensor, bounds: BatchBounds) -> StateBatch:
        table = self._table
        return plan_states(
            table.state_slots.index_select(0, rows.table_rows),
            table.checkpoints.index_select(0, rows.table_rows),
            seq_lens,
            rows.query_start_loc,
            num_decodes=bounds.num_decodes,
            max_query_len=bounds.max_query_len,
            num_tokens=bounds.num_tokens,
            backend="torch" if self._config.attention_backend == "torch" else "triton",
            num_pending=None if table.num_pending is None else table.num_pending.index_select(0, rows.table_rows),
            has_drafts=bounds.has_drafts,
        )


def plan_attention(
    cache: CacheMemory, config: ResolvedConfig, requests: tuple[Tensor, Tensor, Tensor], bounds: BatchBounds
) -> AttentionBatch:
    """Plan the attention of a batch for all layers with caches in `cache`.

    requests: (block tables, context lengths, `DeviceRows.query_start_loc`).
    """
    spec, kv_cache = cache.layout.attention_specs[0], cache.kv_caches[0]
    plan_function = plan_latent_batch if isinstance(spec, MLASpec) else plan_batch
    return plan_function(
        *requests,
        num_decodes=bounds.num_decodes,
        max_query_len=bounds.max_query_len,
        max_seq_len=bounds.max_seq_len,
        num_heads=spec.num_heads,
        kv_cache=kv_cache,
        backend=config.attention_backend,
        dtype=config.torch_dtype,
        num_tokens=bounds.num_tokens,
        has_only_whole_prompts=bounds.has_only_whole_prompts,
    )


def find_requests(rows: DeviceRows, num_tokens: int) -> Tensor:
    """Index in `rows` of each token's request, int64 [num_tokens]. Padding tokens belong to the last request."""
    ends = rows.query_start_loc[1:]
    indices = torch.arange(num_tokens, device=ends.device, dtype=torch.int32)
    return torch.searchsorted(ends, indices, right=True).clamp_(max=len(ends) - 1)
