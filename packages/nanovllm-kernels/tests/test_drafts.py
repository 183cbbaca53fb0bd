"""Tests the CPU's proposal and verification of drafts against loops over tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_kernels.request_tables import TokenTables, propose_ngrams, verify_drafts

NUM_ROWS = 5
MAX_LEN = 24


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def random_tables(generator, alphabet):
    tokens = torch.randint(0, alphabet, (NUM_ROWS, MAX_LEN), generator=generator, dtype=torch.int32)
    return tokens, torch.randint(0, MAX_LEN + 1, (NUM_ROWS,), generator=generator, dtype=torch.int32)


def find_end(known, min_match, max_match):
    """Find the longest suffix that occurs earlier. Return the end of the suffix's last earlier occurrence, or None."""
    for length in range(max_match, min_match - 1, -1):
        for end in range(len(known) - 2, length - 2, -1):
            if known[end + 1 - length : end + 1] == known[len(known) - length :]:
                return end
    return None


@settings(max_examples=150, deadline=None)
@given(
    is_sampled=st.lists(st.booleans(), min_size=1, max_size=NUM_ROWS),
    alphabet=st.integers(1, 4),
    min_match=st.integers(1, 4),
    more_match=st.integers(0, 8),
    num_drafts=st.integers(1, 9),
    seed=st.integers(0, 9999),
)
def test_proposed_drafts_match_a_loop(is_sampled, alphabet, min_match, more_match, num_drafts, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens, num_computed = random_tables(generator, alphabet)
    rows = torch.randperm(NUM_ROWS, generator=generator)[: len(is_sampled)].to(torch.int32)
    expected_tokens, old_computed = tokens.tolist(), num_computed.clone()
    expected_drafts, expected_counts = [], []
    for row, has_sample in zip(rows.tolist(), is_sampled, strict=True):
        last, row_tokens = int(num_computed[row]), expected_tokens[row]
        positions = [last + 1 + i for i in range(num_drafts)] if has_sample else []
        end = find_end(row_tokens[: last + 1], min_match, min_match + more_match) if last < MAX_LEN else None
        proposed = 0
        for i, position in enumerate(positions):
            if end is not None and position < MAX_LEN:
                row_tokens[position] = row_tokens[end + 1 + i % (last - end)]
                proposed += 1
        drafts = [row_tokens[position] for position in positions if position < MAX_LEN]
        expected_drafts.append(drafts + [0] * (num_drafts - len(drafts)))
        expected_counts.append(proposed)

    drafts, num_proposed = propose_ngrams(
        *(rows, ints(*is_sampled), TokenTables(tokens, num_computed)),
        num_drafts=num_drafts,
        min_match=min_match,
        max_match=min_match + more_match,
    )

    assert (drafts.tolist(), drafts.dtype) == (expected_drafts, torch.int32)
    assert (num_proposed.tolist(), num_proposed.dtype) == (expected_counts, torch.int32)
    assert tokens.tolist() == expected_tokens
    assert torch.equal(num_computed, old_computed)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3, 9]),
        ([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3, 9]),  # The last of two equally long matches counts.
        ([0, 1, 2, 3, 8, 1, 2, 3, 9, 0, 1, 2, 3], [8, 1, 2, 3, 9]),  # The first match is longer.
        ([7, 7, 7, 7], [7, 7, 7, 7, 7]),  # The occurrences overlap.
        ([1, 2, 5, 1, 2], None),  # The match is shorter than min_match.
    ],
)
def test_drafts_follow_the_last_longest_match(known, expected):
    tokens = ints(*known, *[0] * 10).unsqueeze(0)
    tables = TokenTables(tokens, ints(len(known) - 1))
    drafts, num_proposed = propose_ngrams(ints(0), ints(1), tables, num_drafts=5, min_match=3, max_match=8)
    assert drafts.tolist() == [expected or [0] * 5]
    assert num_proposed.tolist() == [5 if expected else 0]
    assert tokens[0].tolist() == known + (expected or [0] * 5) + [0] * 5


def test_without_a_match_drafts_are_the_tokens_already_in_the_row():
    tokens = ints(1, 2, 3, 4, 5, 6).unsqueeze(0)
    drafts, num_proposed = propose_ngrams(
        ints(0), ints(1), TokenTables(tokens, ints(2)), num_drafts=4, min_match=1, max_match=3
    )
    assert drafts.tolist() == [[4, 5, 6, 0]]
    assert num_proposed.tolist() == [0]


def test_padding_that_shares_a_row_writes_no_drafts():
    tokens, num_computed = ints(4, 4, 4, 0, 0, 0).unsqueeze(0), ints(2)
    sizes = {"num_drafts": 2, "min_match": 1, "max_match": 3}
    drafts, num_proposed = propose_ngrams(ints(0, 0), ints(0, 0), TokenTables(tokens, num_computed), **sizes)
    assert (drafts.tolist(), num_proposed.tolist()) == ([[0, 0], [0, 0]], [0, 0])
    assert tokens.tolist() == [[4, 4, 4, 0, 0, 0]]
    drafts, num_proposed = propose_ngrams(ints(0, 0), ints(1, 0), TokenTables(tokens, num_computed), **sizes)
    assert (drafts.tolist(), num_proposed.tolist()) == ([[4, 4], [0, 0]], [2, 0])


@pytest.mark.parametrize(
    ("num_drafts", "min_match", "max_match", "message"),
    [(0, 1, 2, "num_drafts is 0"), (1, 0, 2, "min_match is 0"), (1, 3, 2, "min_match is 3, max_match is 2")],
)
def test_impossible_sizes_of_drafts_are_rejected(num_drafts, min_match, max_match, message):
    tables = TokenTables(*random_tables(torch.Generator(), 3))
    with pytest.raises(ValueError, match=message):
        propose_ngrams(ints(0), ints(1), tables, num_drafts=num_drafts, min_match=min_match, max_match=max_match)


@settings(max_examples=150, deadline=None)
@given(
    query_lens=st.lists(st.integers(0, 6), min_size=1, max_size=NUM_ROWS),
    num_padding_tokens=st.integers(0, 3),
    alphabet=st.integers(1, 3),
    counts_tokens=st.booleans(),
    seed=st.integers(0, 9999),
)
def test_verified_drafts_match_a_loop(query_lens, num_padding_tokens, alphabet, counts_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens, num_computed = random_tables(generator, alphabet)
    rows = torch.randperm(NUM_ROWS, generator=generator)[: len(query_lens)].to(torch.int32)
    for row, query_len in zip(rows.tolist(), query_lens, strict=True):
        num_computed[row] = min(int(num_computed[row]), MAX_LEN - query_len)
    size = (sum(query_lens) + num_padding_tokens,)
    sampled = torch.randint(0, alphabet, size, generator=generator, dtype=torch.int32)
    counts = torch.randint(0, 9, (NUM_ROWS, alphabet), generator=generator, dtype=torch.int32)
    expected_tokens, expected_computed = tokens.tolist(), num_computed.tolist()
    expected_counts, expected_new, first = counts.tolist(), [], 0
    for row, query_len in zip(rows.tolist(), query_lens, strict=True):
        num_new = 0
        for token in sampled[first : first + query_len].tolist():
            num_new += 1
            expected_computed[row] += 1
            position = expected_computed[row]
            expected_counts[row][token] += counts_tokens
            is_draft = num_new < query_len
            if is_draft and expected_tokens[row][position] == token:
                continue
            if position < MAX_LEN:
                expected_tokens[row][position] = token
            break
        expected_new.append(num_new)
        first += query_len

    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    tables = TokenTables(tokens, num_computed)
    num_new = verify_drafts(rows, starts, sampled, tables, counts if counts_tokens else None)

    assert (num_new.tolist(), num_new.dtype) == (expected_new, torch.int32)
    assert tokens.tolist() == expected_tokens
    assert num_computed.tolist() == expected_computed
    assert counts.tolist() == expected_counts


def test_accepted_drafts_and_one_token_are_committed():
    # Row 1 has the drafts 5, 6 and 7. Row 0 is full. The last two requests are padding.
    tokens, num_computed = ints([3, 1, 2, 9, 9, 9], [8, 4, 5, 6, 7, 9]), ints(5, 1)
    counts = torch.zeros((2, 10), dtype=torch.int32)
    num_new = verify_drafts(
        ints(1, 0, 0, 1), ints(0, 4, 5, 5, 5), ints(5, 6, 8, 1, 2, 0), TokenTables(tokens, num_computed), counts
    )
    assert num_new.tolist() == [3, 1, 0, 0]
    assert num_computed.tolist() == [6, 4]
    assert tokens.tolist() == [[3, 1, 2, 9, 9, 9], [8, 4, 5, 6, 8, 9]]
    assert counts.nonzero().tolist() == [[0, 2], [1, 5], [1, 6], [1, 8]]


def test_drafts_are_proposed_and_accepted_until_text_stops_repeating():
    text = [5, 6, 7, 8] * 3 + [5, 0]
    tokens = torch.zeros((1, 40), dtype=torch.int32)
    tokens[0, :8] = ints(*text[:8])
    tables, steps = TokenTables(tokens, ints(7)), []
    while (last := int(tables.num_computed[0])) < len(text) - 1:
        _, num_proposed = propose_ngrams(ints(0), ints(1), tables, num_drafts=3, min_match=3, max_match=8)
        query_len = 1 + int(num_proposed[0])
        choices = (text + [0] * 4)[last + 1 : last + 1 + query_len]
        steps.append(int(verify_drafts(ints(0), ints(0, query_len), ints(*choices), tables, None)[0]))
    assert steps == [4, 2]
    assert tokens[0, : len(text)].tolist() == text
