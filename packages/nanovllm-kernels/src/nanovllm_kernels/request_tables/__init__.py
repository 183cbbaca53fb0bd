"""Builds a step's inputs on the device from tables of all requests, and records the step's results in them."""

import torch
from torch import Tensor

from nanovllm_kernels.request_tables import reference
from nanovllm_kernels.request_tables.tables import BatchInputs, TokenTables

__all__ = ["BatchInputs", "TokenTables", "build_inputs", "commit_tokens"]


def build_inputs(
    rows: Tensor,
    query_start_loc: Tensor,
    tables: TokenTables,
    block_table: Tensor,
    page_size: int,
    num_tokens: int,
    num_pages: int | None = None,
) -> BatchInputs:
    """Gather the inputs of a step in which request b computes its next tokens. Never waits for the device.

    rows: int32 [B], each request's row in the tables.
    query_start_loc: int32 [B + 1], each request's first token in the step. On CUDA a request may have no tokens, and
        tokens after the last request's are padding: token 0 at position 0 in slot 0.
    block_table: int32 [R, max_pages], each row's pages in order.
    page_size: tokens per page.
    num_tokens: T, known to the host: query_start_loc[-1], or more with padding.
    num_pages: columns of the block table to copy, which must cover every token; None: all.
    """
    num_pages = block_table.shape[1] if num_pages is None else num_pages
    if rows.is_cuda:
        return BatchInputs(
            *_build_inputs_op(rows, query_start_loc, *tables, block_table, page_size, num_tokens, num_pages)
        )
    return reference.build_inputs(rows, query_start_loc, tables, block_table, page_size, num_tokens, num_pages)


def commit_tokens(
    rows: Tensor,
    query_start_loc: Tensor,
    sampled: Tensor,
    is_sampled: Tensor,
    tables: TokenTables,
    counts: Tensor | None,
) -> None:
    """Record a step in the tables, in place. Never waits for the device.

    Each request's `num_computed` grows by its query length. Then each sampled token is written after its row's computed
    tokens, or dropped if the row is full, as for a request that has already finished.

    rows, query_start_loc: as for `build_inputs`; only requests without tokens may share a row.
    sampled: int32 [B], each request's new token.
    is_sampled: int32 [B], 0 if the request's new token is not used.
    counts: int32 [R, V] (see `sampling.apply_penalties`), incremented for each sampled token, or None.
    """
    if rows.is_cuda:
        _commit_tokens_op(rows, query_start_loc, sampled, is_sampled, *tables, counts)
    else:
        reference.commit_tokens(rows, query_start_loc, sampled, is_sampled, tables, counts)


@torch.library.custom_op("nanovllm::build_inputs", mutates_args=())
def _build_inputs_op(
    rows: Tensor,
    query_start_loc: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    block_table: Tensor,
    page_size: int,
    num_tokens: int,
    num_pages: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from nanovllm_kernels.request_tables import triton_request_tables

    tables = TokenTables(tokens, num_computed)
    return triton_request_tables.build_inputs(
        rows, query_start_loc, tables, block_table, page_size, num_tokens, num_pages
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
    num_pages: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        tokens.new_empty((num_tokens,)),
        tokens.new_empty((num_tokens,), dtype=torch.int64),
        num_computed.new_empty(rows.shape),
        tokens.new_empty((num_tokens,), dtype=torch.int64),
        tokens.new_empty(rows.shape, dtype=torch.int64),
        block_table.new_empty((rows.shape[0], num_pages)),
    )


@torch.library.custom_op("nanovllm::commit_tokens", mutates_args=("tokens", "num_computed", "counts"))
def _commit_tokens_op(
    rows: Tensor,
    query_start_loc: Tensor,
    sampled: Tensor,
    is_sampled: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    counts: Tensor | None,
) -> None:
    from nanovllm_kernels.request_tables import triton_request_tables

    tables = TokenTables(tokens, num_computed)
    triton_request_tables.commit_tokens(rows, query_start_loc, sampled, is_sampled, tables, counts)
