"""Tests the plain torch step inputs against a loop over requests."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_kernels.request_tables import TokenTables, build_inputs, commit_tokens

PAGE_SIZE = 16
NUM_ROWS = 12
MAX_LEN = 100


def make_tables(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 1000, (NUM_ROWS, MAX_LEN), generator=generator, dtype=torch.int32)
    num_computed = torch.randint(0, 60, (NUM_ROWS,), generator=generator, dtype=torch.int32)
    block_table = torch.randint(0, 500, (NUM_ROWS, 8), generator=generator, dtype=torch.int32)
    return tokens, num_computed, block_table


def starts_of(query_lens):
    return torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)


@settings(max_examples=40, deadline=None)
@given(
    query_lens=st.one_of(
        st.lists(st.just(1), min_size=1, max_size=NUM_ROWS), st.lists(st.integers(0, 40), min_size=1, max_size=NUM_ROWS)
    ),
    num_padding_tokens=st.integers(0, 9),
    num_page_columns=st.sampled_from([None, 7, 8]),
    seed=st.integers(0, 99),
)
def test_built_inputs_match_a_loop(query_lens, num_padding_tokens, num_page_columns, seed):
    tokens, num_computed, block_table = make_tables(seed)
    rows = torch.randperm(NUM_ROWS)[: len(query_lens)].to(torch.int32)
    ids, positions, slots, lengths = [], [], [], []
    for row, query_len in zip(rows.tolist(), query_lens, strict=True):
        begin = int(num_computed[row])
        lengths.append(begin + query_len if query_len else 0)
        for position in range(begin, begin + query_len):
            ids.append(int(tokens[row, position]))
            positions.append(position)
            slots.append(int(block_table[row, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE)

    ids, positions, slots = (values + [0] * num_padding_tokens for values in (ids, positions, slots))

    num_tokens, tables = sum(query_lens) + num_padding_tokens, TokenTables(tokens, num_computed)
    out = build_inputs(rows, starts_of(query_lens), tables, block_table, PAGE_SIZE, num_tokens, num_page_columns)

    assert (out.input_ids.tolist(), out.input_ids.dtype) == (ids, torch.int32)
    assert (out.positions.tolist(), out.positions.dtype) == (positions, torch.int64)
    assert (out.slot_mapping.tolist(), out.slot_mapping.dtype) == (slots, torch.int64)
    assert (out.seq_lens.tolist(), out.seq_lens.dtype) == (lengths, torch.int32)
    assert out.last_token_indices.tolist() == [max(end - 1, 0) for end in starts_of(query_lens).tolist()[1:]]
    assert torch.equal(out.block_tables, block_table[rows.long(), :num_page_columns])


@pytest.mark.parametrize("with_counts", [True, False])
def test_committed_tokens_update_tables_and_counts(with_counts):
    tokens, num_computed, _ = make_tables(0)
    num_computed[5] = MAX_LEN - 1
    old_tokens, old_computed = tokens.clone(), num_computed.clone()
    counts = torch.zeros((NUM_ROWS, 50), dtype=torch.int32) if with_counts else None
    rows = torch.tensor([3, 5, 0], dtype=torch.int32)

    commit_tokens(
        rows,
        starts_of([1, 1, 7]),
        torch.tensor([33, 22, 11], dtype=torch.int32),
        torch.tensor([0, 1, 1], dtype=torch.int32),
        TokenTables(tokens, num_computed),
        counts,
    )

    old_computed[rows.long()] += torch.tensor([1, 1, 7], dtype=torch.int32)
    assert torch.equal(num_computed, old_computed)
    # Row 5 is full: its token, 22, is dropped.
    old_tokens[0, num_computed[0]] = 11
    assert torch.equal(tokens, old_tokens)
    if counts is not None:
        assert counts.nonzero().tolist() == [[0, 11], [5, 22]]


def test_requests_without_tokens_change_no_tables():
    tokens, num_computed, _ = make_tables(0)
    old_tokens, old_computed = tokens.clone(), num_computed.clone()
    rows, is_sampled = torch.tensor([2, 0, 0], dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    sampled = torch.tensor([44, 55, 66], dtype=torch.int32)
    commit_tokens(rows, starts_of([3, 0, 0]), sampled, is_sampled, TokenTables(tokens, num_computed), None)
    old_computed[2] += 3
    old_tokens[2, old_computed[2]] = 44
    assert torch.equal(num_computed, old_computed)
    assert torch.equal(tokens, old_tokens)
