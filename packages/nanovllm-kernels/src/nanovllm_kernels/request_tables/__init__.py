"""Builds a step's inputs on the device from the engine's state tables, and records the step's results in them."""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.request_tables import reference

__all__ = ["BatchInputs", "build_inputs", "commit_tokens"]


class BatchInputs(NamedTuple):
    """Inputs of a step with T tokens of B requests, request after request.

    input_ids: int32 [T]. positions: int64 [T].
    seq_lens: int32 [B], each request's tokens including this step's, 0 for a request without tokens in this step.
    slot_mapping: int64 [T], the cache slot of each token, page * page_size + offset.
    last: int64 [B], index of each request's last token, 0 for a request without tokens.
    block_tables: int32 [B, width].
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
    """Gather the inputs of a step in which request b computes its next tokens. Never waits for the device.

    rows: int32 [B], each request's row in the tables.
    query_start_loc: int32 [B + 1], each request's first token in the step. On CUDA a request may have no tokens, and
        tokens after the last request's are padding: token 0 at position 0 in slot 0.
    tokens: int32 [R, max_len], all known tokens. num_computed: int32 [R], how many of them are in the cache.
    block_table: int32 [R, max_blocks], each row's pages in order. page_size: tokens per page.
    num_tokens: T, known to the host: query_start_loc[-1], or more with padding.
    width: columns of the block table to copy, which must cover every token; None: all.
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
    """Record a step in the tables, in place. Never waits for the device.

    Each request's `num_computed` grows by its query length. Then each sampled token is written after its row's computed
    tokens, or dropped if the row is full, as for a request that has already finished.

    rows, query_start_loc, tokens, num_computed: as in `build_inputs`; only requests without tokens may share a row.
    sampled: int32 [B]. samples: int32 [B], 0 if the sampled token is not used.
    counts: int32 [R, V] (see `sampling.apply_penalties`), incremented for each sampled token, or None.
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
    from nanovllm_kernels.request_tables import triton_request_tables

    return triton_request_tables.build_inputs(
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
    from nanovllm_kernels.request_tables import triton_request_tables

    triton_request_tables.commit_tokens(rows, query_start_loc, sampled, samples, tokens, num_computed, counts)
