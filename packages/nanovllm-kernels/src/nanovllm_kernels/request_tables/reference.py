"""A step's inputs in plain torch: the reference for the kernels' tests, and the CPU path."""

import torch
from torch import Tensor


def build_inputs(
    rows: Tensor,
    query_start_loc: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    block_table: Tensor,
    page_size: int,
    num_tokens: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See the package's `build_inputs`."""
    computed = num_computed.index_select(0, rows)
    block_tables = block_table[:, :width].index_select(0, rows)
    if num_tokens == rows.shape[0]:
        # Every request has one token.
        seq_lens = computed + 1
        positions = computed.long()
        token_rows = rows
        pages = block_tables.gather(1, (positions // page_size).unsqueeze(1)).squeeze(1)
    else:
        query_lens = query_start_loc.diff()
        seq_lens = computed + query_lens
        owner = torch.arange(rows.shape[0], device=rows.device).repeat_interleave(query_lens, output_size=num_tokens)
        offsets = torch.arange(num_tokens, device=rows.device)
        positions = offsets + (computed - query_start_loc[:-1]).long().index_select(0, owner)
        token_rows = rows.index_select(0, owner)
        pages = block_tables[owner, positions // page_size]
    input_ids = tokens[token_rows, positions]
    slot_mapping = pages.long().mul_(page_size).add_(positions % page_size)
    return input_ids, positions, seq_lens, slot_mapping, query_start_loc[1:].long() - 1, block_tables


def commit_tokens(
    rows: Tensor,
    query_start_loc: Tensor,
    sampled: Tensor,
    samples: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    counts: Tensor | None,
) -> None:
    """See the package's `commit_tokens`."""
    num_computed.index_add_(0, rows, query_start_loc.diff())
    places = num_computed.index_select(0, rows)
    wanted = samples.bool()
    fits = wanted & (places < tokens.shape[1])
    tokens[rows[fits], places[fits]] = sampled[fits]
    if counts is not None:
        one = torch.ones((), dtype=counts.dtype, device=counts.device)
        counts.index_put_((rows[wanted], sampled[wanted]), one, accumulate=True)
