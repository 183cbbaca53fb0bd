"""Operators on request tables in plain torch: the reference for the kernels' tests, and the CPU path."""

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.request_tables.tables import BatchInputs, TokenTables


def build_inputs(
    table_rows: Tensor,
    query_start_loc: Tensor,
    tables: TokenTables,
    page_table: Tensor,
    page_size: int,
    num_tokens: int,
    num_page_columns: int,
) -> BatchInputs:
    """See the package's `build_inputs`."""
    num_computed = tables.num_computed.index_select(0, table_rows)
    block_tables = page_table[:, :num_page_columns].index_select(0, table_rows)
    query_lens = query_start_loc.diff()
    if num_tokens == table_rows.shape[0] and bool((query_lens == 1).all()):
        seq_lens = num_computed + 1
        positions = num_computed.long()
        token_rows = table_rows
        pages = block_tables.gather(1, (positions // page_size).unsqueeze(1)).squeeze(1)
    else:
        seq_lens = (num_computed + query_lens).masked_fill_(query_lens == 0, 0)
        requests = torch.arange(table_rows.shape[0], device=table_rows.device)
        token_requests = requests.repeat_interleave(query_lens)
        # The difference between a token's position and the token's index in the step.
        offsets = (num_computed - query_start_loc[:-1]).long()
        positions = torch.arange(len(token_requests), device=table_rows.device) + offsets[token_requests]
        token_rows = table_rows.index_select(0, token_requests)
        pages = block_tables[token_requests, positions // page_size]
    input_ids = tables.tokens[token_rows, positions]
    slot_mapping = pages.long().mul_(page_size).add_(positions % page_size)
    if num_padding_tokens := num_tokens - len(positions):
        input_ids, positions, slot_mapping = (
            functional.pad(x, (0, num_padding_tokens)) for x in (input_ids, positions, slot_mapping)
        )
    last_token_indices = (query_start_loc[1:].long() - 1).clamp_(min=0)
    return BatchInputs(input_ids, positions, seq_lens, slot_mapping, last_token_indices, block_tables)


def commit_tokens(
    table_rows: Tensor,
    query_start_loc: Tensor,
    sampled: Tensor,
    is_sampled: Tensor,
    tables: TokenTables,
    token_counts: Tensor | None,
) -> None:
    """See the package's `commit_tokens`."""
    query_lens = query_start_loc.diff()
    tables.num_computed.index_add_(0, table_rows, query_lens)
    positions = tables.num_computed.index_select(0, table_rows)
    has_token = is_sampled.bool() & (query_lens > 0)
    is_written = has_token & (positions < tables.tokens.shape[1])
    tables.tokens[table_rows[is_written], positions[is_written]] = sampled[is_written]
    if token_counts is not None:
        increment = torch.ones((), dtype=token_counts.dtype, device=token_counts.device)
        token_counts.index_put_((table_rows[has_token], sampled[has_token]), increment, accumulate=True)
