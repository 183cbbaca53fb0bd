"""Builds a step's inputs on the device from tables of all requests, and records sampled tokens in the tables."""

import torch
from torch import Tensor

from nanovllm_kernels.request_tables import request_tables_reference
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
    """Gather the inputs of a step for B requests. Never waits for the device.

    rows: int32 [B], each request's row in the tables.
    query_start_loc: int32 [B + 1]. Request b has the step's tokens from index [b] to [b + 1]. On CUDA a request may
        have no tokens.
    block_table: int32 [R, max_pages], the pages of all table rows in order.
    page_size: tokens per page.
    num_tokens: number of tokens in the step. On CUDA, it may include padding: token 0 at position 0 in slot 0.
    num_pages: number of columns of the block table to copy, enough for every token. None: all columns.
    """
    num_pages = block_table.shape[1] if num_pages is None else num_pages
    if rows.is_cuda:
        return BatchInputs(
            *_build_inputs_op(rows, query_start_loc, *tables, block_table, page_size, num_tokens, num_pages)
        )
    return request_tables_reference.build_inputs(
        rows, query_start_loc, tables, block_table, page_size, num_tokens, num_pages
    )


def commit_tokens(
    rows: Tensor,
    query_start_loc: Tensor,
    sampled: Tensor,
    is_sampled: Tensor,
    tables: TokenTables,
    counts: Tensor | None,
) -> None:
    """Add each query length to `num_computed`, and write each sampled token after its row's computed tokens.

    Never waits for the device. A sampled token is dropped if its row is full.

    rows: int32 [B], each request's row in the tables. Only requests without tokens may have the row of another request.
    query_start_loc: int32 [B + 1]. Request b has the step's tokens from index [b] to [b + 1].
    sampled: int32 [B], each request's new token.
    is_sampled: int32 [B], 0 to ignore the request's new token.
    counts: int32 [R, V], number of each token's occurrences, incremented for each sampled token. None: no counts.
    """
    if rows.is_cuda:
        _commit_tokens_op(rows, query_start_loc, sampled, is_sampled, *tables, counts)
    else:
        request_tables_reference.commit_tokens(rows, query_start_loc, sampled, is_sampled, tables, counts)


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
    shape = page_size, num_tokens, num_pages
    return triton_request_tables.build_inputs(rows, query_start_loc, tables, block_table, *shape)


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
