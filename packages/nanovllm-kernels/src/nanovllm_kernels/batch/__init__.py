"""What a step reads and leaves behind, built on the device from the engine's state tables.

This room must not know how requests are scheduled: it sees rows of tables and lengths.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.batch import reference

__all__ = ["BatchInputs", "build_inputs", "commit_tokens"]


class BatchInputs(NamedTuple):
    """One step's inputs: T tokens of B requests, one request after another.

    input_ids: int32 [T]. positions: int64 [T]. seq_lens: int32 [B], each request's context with this step's tokens, 0
    for one without.
    slot_mapping: int64 [T], the cache slot of each token, page * page_size + offset. last: int64 [B], which of the
    tokens is each request's last, 0 for one without. block_tables: int32 [B, width].
    """

    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    last: Tensor
    block_tables: Tensor


def build_inputs(
    rows: Tensor,
    query_start_loc: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    block_table: Tensor,
    page_size: int,
    num_tokens: int,
    width: int | None = None,
) -> BatchInputs:
    """Gather the inputs of a step in which request b computes its next tokens. Reads nothing back to the host.

    rows: int32 [B], the row of each request in the tables. query_start_loc: int32 [B + 1], where each one's tokens
        begin among the step's. On CUDA a request may have none, and there may be more tokens than the requests have:
        such padding is token 0 at position 0 in slot 0.
    tokens: int32 [R, max_len], every token known so far. num_computed: int32 [R], how many of them are in the cache.
    block_table: int32 [R, max_blocks], the pages of each row, in order. page_size: tokens a page holds.
    num_tokens: T, known to the host: query_start_loc[-1] or, with padding, more.
    width: how many columns of the block table are needed; all by default. Must cover every token of the step.
    """
    width = block_table.shape[1] if width is None else width
    if rows.is_cuda:
        outputs = _build_inputs_op(
            rows, query_start_loc, tokens, num_computed, block_table, page_size, num_tokens, width
        )
    else:
        outputs = reference.build_inputs(
            rows, query_start_loc, tokens, num_computed, block_table, page_size, num_tokens, width
        )
    return BatchInputs(*outputs)


def commit_tokens(
    rows: Tensor,
    query_start_loc: Tensor,
    sampled: Tensor,
    samples: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    counts: Tensor | None,
) -> None:
    """Record a step in the tables, in place. Reads nothing back to the host.

    Each request's `num_computed` grows by its query length; then each sampled token is written where the next one of
    its row goes. A token for which the row has no room left is dropped: that of a request that ended a step ago.

    rows, query_start_loc, tokens, num_computed: as in `build_inputs`; no two requests share a row, but for those
    without a token. sampled: int32 [B]. samples: int32 [B], 0 where the sampled token doesn't count.
    counts: int32 [R, V] (see `sampling.apply_penalties`) or None: one is added for each sampled token.
    """
    if rows.is_cuda:
        _commit_tokens_op(rows, query_start_loc, sampled, samples, tokens, num_computed, counts)
    else:
        reference.commit_tokens(rows, query_start_loc, sampled, samples, tokens, num_computed, counts)


@torch.library.custom_op("nanovllm::build_inputs", mutates_args=())
def _build_inputs_op(
    rows: Tensor,
    query_start_loc: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    block_table: Tensor,
    page_size: int,
    num_tokens: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from nanovllm_kernels.batch import triton_batch

    return triton_batch.build_inputs(
        rows, query_start_loc, tokens, num_computed, block_table, page_size, num_tokens, width
    )


@_build_inputs_op.register_fake
def _(
    rows: Tensor,
    _query_start_loc: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    block_table: Tensor,
    _page_size: int,
    num_tokens: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        tokens.new_empty((num_tokens,)),
        tokens.new_empty((num_tokens,), dtype=torch.int64),
        num_computed.new_empty(rows.shape),
        tokens.new_empty((num_tokens,), dtype=torch.int64),
        tokens.new_empty(rows.shape, dtype=torch.int64),
        block_table.new_empty((rows.shape[0], width)),
    )


@torch.library.custom_op("nanovllm::commit_tokens", mutates_args=("tokens", "num_computed", "counts"))
def _commit_tokens_op(
    rows: Tensor,
    query_start_loc: Tensor,
    sampled: Tensor,
    samples: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    counts: Tensor | None,
) -> None:
    from nanovllm_kernels.batch import triton_batch

    triton_batch.commit_tokens(rows, query_start_loc, sampled, samples, tokens, num_computed, counts)
