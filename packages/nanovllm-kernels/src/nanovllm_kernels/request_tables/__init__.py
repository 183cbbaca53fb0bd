"""Builds a step's inputs on the device from tables of all requests, and records sampled tokens in the tables.

For speculative decoding, a request's drafts (proposed tokens) stand in its row of the token table, after its last
known token.
"""

import torch
from torch import Tensor

from nanovllm_kernels.request_tables import drafts_reference, request_tables_reference
from nanovllm_kernels.request_tables.tables import BatchInputs, TokenTables

__all__ = ["BatchInputs", "TokenTables", "build_inputs", "commit_tokens", "propose_ngrams", "verify_drafts"]


def build_inputs(
    table_rows: Tensor,
    query_start_loc: Tensor,
    tables: TokenTables,
    page_table: Tensor,
    page_size: int,
    num_tokens: int,
    num_page_columns: int | None = None,
) -> BatchInputs:
    """Gather the inputs of a step for B requests. Never waits for the device.

    table_rows: int32 [B], each request's row in the tables.
    query_start_loc: int32 [B + 1], index of each request's first token in the step, then the number of tokens without
        padding. A request may have no tokens.
    page_table: int32 [R, max_pages], page numbers of each table row.
    page_size: tokens per page.
    num_tokens: number of tokens in the step. May include padding tokens, which become token 0 at position 0 in cache
        slot 0.
    num_page_columns: number of columns of `page_table` to copy, enough for every token. None: all columns.
    """
    num_page_columns = page_table.shape[1] if num_page_columns is None else num_page_columns
    if table_rows.is_cuda:
        return BatchInputs(
            *_build_inputs_op(table_rows, query_start_loc, *tables, page_table, page_size, num_tokens, num_page_columns)
        )
    return request_tables_reference.build_inputs(
        table_rows, query_start_loc, tables, page_table, page_size, num_tokens, num_page_columns
    )


def commit_tokens(
    table_rows: Tensor,
    query_start_loc: Tensor,
    sampled: Tensor,
    is_sampled: Tensor,
    tables: TokenTables,
    token_counts: Tensor | None,
) -> None:
    """Add each request's number of tokens in the step to `num_computed`, then write the request's sampled token.

    The token is written at position `num_computed` (the new value), unless the request's row of `tokens` is full. Never
    waits for the device.

    table_rows: int32 [B], each request's row in the tables. Requests with tokens in the step have different rows.
    query_start_loc: int32 [B + 1], index of each request's first token in the step, then the number of tokens.
    sampled: int32 [B], each request's new token.
    is_sampled: int32 [B], 0 to ignore the request's new token.
    token_counts: int32 [R, V], occurrences of each token id, incremented for sampled tokens. None: nothing is counted.
    """
    if table_rows.is_cuda:
        _commit_tokens_op(table_rows, query_start_loc, sampled, is_sampled, *tables, token_counts)
    else:
        request_tables_reference.commit_tokens(table_rows, query_start_loc, sampled, is_sampled, tables, token_counts)


def verify_drafts(
    table_rows: Tensor, query_start_loc: Tensor, sampled: Tensor, tables: TokenTables, token_counts: Tensor | None
) -> Tensor:
    """Accept each request's drafts before the first wrong draft, and commit the token sampled after these drafts.

    The step computed q tokens of a request: the token at position `num_computed`, then q - 1 drafts. A draft is
    accepted if it equals the token that was sampled after the preceding token, and if all earlier drafts are accepted.
    `num_computed` grows by the number of accepted drafts plus 1. The last new token was sampled after the last accepted
    draft, or after the first token if no draft is accepted. This token is written at position `num_computed` (the new
    value), unless the request's row of `tokens` is full. Rejected drafts stay in the row. Never waits for a GPU.

    table_rows: int32 [B], each request's row in the tables. Requests with tokens in the step have different rows.
    query_start_loc: int32 [B + 1], index of each request's first token in the step, then the number of tokens. A
        request without tokens is padding, and changes nothing.
    sampled: int32 [T], the token that was sampled after each token of the step. T may include padding tokens.
    token_counts: int32 [R, V], occurrences of each token id, incremented for new tokens. None: nothing is counted.

    Returns int32 [B], number of each request's new tokens: accepted drafts plus 1; 0 for a request without tokens.
    """
    if table_rows.is_cuda:
        return _verify_drafts_op(table_rows, query_start_loc, sampled, *tables, token_counts)
    return drafts_reference.verify_drafts(table_rows, query_start_loc, sampled, tables, token_counts)


def propose_ngrams(
    table_rows: Tensor, is_sampled: Tensor, tables: TokenTables, *, num_drafts: int, min_match: int, max_match: int
) -> tuple[Tensor, Tensor]:
    """Find an earlier occurrence of each request's last tokens, and write the tokens that followed it as drafts.

    The last known token of a request stands at position n = `num_computed`. The operator finds the longest suffix of
    the known tokens, of `min_match` to `max_match` tokens, that also occurs earlier. The two occurrences may overlap.
    The latest earlier occurrence ends at position e. Draft i (from 0) is a copy of the token at position
    e + 1 + (i mod (n - e)), and is written at position n + 1 + i. Drafts beyond the end of the request's row of
    `tokens` are dropped. If no suffix occurs earlier, nothing is written. Never waits for a GPU.

    table_rows: int32 [B], each request's row in the tables. Requests with nonzero `is_sampled` have different rows.
    is_sampled: int32 [B], 0 to skip the request, because its prompt is not complete or because it is padding.
    num_drafts: number of drafts per request, at least 1.

    Returns (drafts, num_proposed). drafts: int32 [B, num_drafts], the contents of the row after the last known token.
    Without a match, the row is unchanged. `drafts` is 0 beyond the end of the row and for skipped requests.
    num_proposed: int32 [B], number of drafts that were written, 0 without a match.

    Raises ValueError if `num_drafts` < 1, or not 1 <= `min_match` <= `max_match`.
    Source: Saxena, "Prompt Lookup Decoding" (2023).
    """
    if num_drafts < 1:
        raise ValueError(f"num_drafts is {num_drafts}: propose at least 1 draft")
    if not 1 <= min_match <= max_match:
        raise ValueError(f"min_match is {min_match}, max_match is {max_match}: 1 <= min_match <= max_match must hold")
    if table_rows.is_cuda:
        return _propose_ngrams_op(table_rows, is_sampled, *tables, num_drafts, min_match, max_match)
    return drafts_reference.propose_ngrams(table_rows, is_sampled, tables, num_drafts, min_match, max_match)


@torch.library.custom_op("nanovllm::build_inputs", mutates_args=())
def _build_inputs_op(
    table_rows: Tensor,
    query_start_loc: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    page_table: Tensor,
    page_size: int,
    num_tokens: int,
    num_page_columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from nanovllm_kernels.request_tables import triton_request_tables

    tables = TokenTables(tokens, num_computed)
    sizes = page_size, num_tokens, num_page_columns
    return triton_request_tables.build_inputs(table_rows, query_start_loc, tables, page_table, *sizes)


@_build_inputs_op.register_fake
def _(
    table_rows: Tensor,
    _query_start_loc: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    page_table: Tensor,
    _page_size: int,
    num_tokens: int,
    num_page_columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        tokens.new_empty((num_tokens,)),
        tokens.new_empty((num_tokens,), dtype=torch.int64),
        num_computed.new_empty(table_rows.shape),
        tokens.new_empty((num_tokens,), dtype=torch.int64),
        tokens.new_empty(table_rows.shape, dtype=torch.int64),
        page_table.new_empty((table_rows.shape[0], num_page_columns)),
    )


@torch.library.custom_op("nanovllm::commit_tokens", mutates_args=("tokens", "num_computed", "token_counts"))
def _commit_tokens_op(
    table_rows: Tensor,
    query_start_loc: Tensor,
    sampled: Tensor,
    is_sampled: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    token_counts: Tensor | None,
) -> None:
    from nanovllm_kernels.request_tables import triton_request_tables

    tables = TokenTables(tokens, num_computed)
    triton_request_tables.commit_tokens(table_rows, query_start_loc, sampled, is_sampled, tables, token_counts)


@torch.library.custom_op("nanovllm::verify_drafts", mutates_args=("tokens", "num_computed", "token_counts"))
def _verify_drafts_op(
    table_rows: Tensor,
    query_start_loc: Tensor,
    sampled: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    token_counts: Tensor | None,
) -> Tensor:
    from nanovllm_kernels.request_tables import triton_drafts

    tables = TokenTables(tokens, num_computed)
    return triton_drafts.verify_drafts(table_rows, query_start_loc, sampled, tables, token_counts)


@_verify_drafts_op.register_fake
def _(
    table_rows: Tensor,
    _query_start_loc: Tensor,
    _sampled: Tensor,
    _tokens: Tensor,
    num_computed: Tensor,
    _token_counts: Tensor | None,
) -> Tensor:
    return num_computed.new_empty(table_rows.shape)


@torch.library.custom_op("nanovllm::propose_ngrams", mutates_args=("tokens",))
def _propose_ngrams_op(
    table_rows: Tensor,
    is_sampled: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    num_drafts: int,
    min_match: int,
    max_match: int,
) -> tuple[Tensor, Tensor]:
    from nanovllm_kernels.request_tables import triton_drafts

    tables = TokenTables(tokens, num_computed)
    return triton_drafts.propose_ngrams(table_rows, is_sampled, tables, num_drafts, min_match, max_match)


@_propose_ngrams_op.register_fake
def _(
    table_rows: Tensor,
    _is_sampled: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    num_drafts: int,
    _min_match: int,
    _max_match: int,
) -> tuple[Tensor, Tensor]:
    return tokens.new_empty((table_rows.shape[0], num_drafts)), num_computed.new_empty(table_rows.shape)
