"""Tests the kernels that propose and verify drafts."""

import pytest
import torch

from nanovllm_kernels.request_tables import TokenTables, drafts_reference, propose_ngrams, verify_drafts

OPS = torch.ops.nanovllm


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_tables(num_rows, max_len, alphabet, device):
    tokens = torch.randint(0, alphabet, (num_rows, max_len), dtype=torch.int32)
    num_computed = torch.randint(0, max_len + 1, (num_rows,), dtype=torch.int32)
    if num_rows > 3:
        num_computed[:2] = torch.tensor([max_len, max_len - 2])
    return tokens.to(device), num_computed.to(device)


def check_proposal(num_reqs, max_len, alphabet, sizes, device):
    """sizes: num_drafts, min_match, max_match. Returns the number of drafts of the first request."""
    tokens, num_computed = make_tables(num_reqs + 1, max_len, alphabet, device)
    rows = torch.randperm(num_reqs + 1, device=device)[:num_reqs].to(torch.int32)
    is_sampled = (torch.rand(num_reqs, device=device) < 0.8).to(torch.int32)
    is_sampled[0], num_computed[rows[0]] = 1, max_len - 10
    expected_tokens = tokens.clone().cpu()
    tables = TokenTables(expected_tokens, num_computed.cpu())
    expected = drafts_reference.propose_ngrams(rows.cpu(), is_sampled.cpu(), tables, *sizes)
    actual = OPS.propose_ngrams(rows, is_sampled, tokens, num_computed, *sizes)
    for actual_tensor, expected_tensor in zip((*actual, tokens), (*expected, expected_tokens), strict=True):
        assert actual_tensor.dtype == expected_tensor.dtype
        assert torch.equal(actual_tensor.cpu(), expected_tensor)
    return int(actual[1][0])


def check_verification(query_lens, max_len, alphabet, device):
    num_rows, num_reqs = len(query_lens) + 2, len(query_lens)
    tokens, num_computed = make_tables(num_rows, max_len, alphabet, device)
    num_computed.clamp_(max=max_len - max(query_lens))
    rows = torch.randperm(num_rows, device=device)[:num_reqs].to(torch.int32)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32)
    sampled = torch.randint(0, alphabet, (sum(query_lens) + 3,), dtype=torch.int32, device=device)
    # Let all drafts of the first request be accepted.
    begin, count = int(num_computed[rows[0]]) + 1, query_lens[0] - 1
    sampled[:count] = tokens[rows[0], begin : begin + count]
    counts = torch.zeros((num_rows, alphabet), dtype=torch.int32, device=device)
    for state in ((tokens, num_computed, None), (tokens, num_computed, counts)):
        actual = [None if table is None else table.clone() for table in state]
        expected = [None if table is None else table.clone().cpu() for table in state]
        *expected_tables, expected_counts = expected
        num_new = OPS.verify_drafts(rows, starts, sampled, *actual)
        expected_new = drafts_reference.verify_drafts(
            rows.cpu(), starts.cpu(), sampled.cpu(), TokenTables(*expected_tables), expected_counts
        )
        assert num_new.dtype == expected_new.dtype
        assert num_new[0] == query_lens[0]
        for table, expected_table in zip((num_new, *actual), (expected_new, *expected), strict=True):
            assert table is None or torch.equal(table.cpu(), expected_table)


@pytest.mark.parametrize(
    ("num_reqs", "max_len", "alphabet", "sizes"),
    [
        (5, 70, 2, (4, 3, 8)),
        (6, 50, 1, (5, 1, 1)),
        (5, 2500, 3, (3, 2, 9)),
        (4, 1100, 900, (7, 1, 4)),
    ],
)
def test_small_proposals_match_reference(device, num_reqs, max_len, alphabet, sizes):
    torch.manual_seed(max_len)
    check_proposal(num_reqs, max_len, alphabet, sizes, device)


def test_few_and_many_pieces_match_reference(device, monkeypatch):
    from nanovllm_kernels.request_tables import triton_drafts

    torch.manual_seed(0)
    monkeypatch.setattr(triton_drafts, "SEARCH_BLOCK", 16)
    monkeypatch.setattr(triton_drafts, "MAX_SEARCH_PROGRAMS", 12)
    assert check_proposal(6, 150, 3, (4, 2, 5), device) == 4
    monkeypatch.setattr(triton_drafts, "MAX_SEARCH_PROGRAMS", 600)
    monkeypatch.setattr(triton_drafts, "PIECE_BLOCK", 4)
    assert check_proposal(3, 300, 3, (4, 2, 5), device) == 4


def test_padding_that_shares_a_row_proposes_nothing(device):
    tokens, num_computed = ints(device, [4, 4, 4, 0, 0, 0]), ints(device, 2)
    drafts, num_proposed = OPS.propose_ngrams(ints(device, 0, 0), ints(device, 0, 0), tokens, num_computed, 2, 1, 3)
    assert (drafts.tolist(), num_proposed.tolist()) == ([[0, 0], [0, 0]], [0, 0])
    assert tokens.tolist() == [[4, 4, 4, 0, 0, 0]]
    drafts, num_proposed = OPS.propose_ngrams(ints(device, 0, 0), ints(device, 1, 0), tokens, num_computed, 2, 1, 3)
    assert (drafts.tolist(), num_proposed.tolist()) == ([[4, 4], [0, 0]], [2, 0])
    assert tokens.tolist() == [[4, 4, 4, 4, 4, 0]]


def test_no_request_proposes_nothing(device):
    tokens, num_computed = ints(device, [4, 4, 4, 0, 0, 0]), ints(device, 2)
    drafts, num_proposed = OPS.propose_ngrams(ints(device), ints(device), tokens, num_computed, 2, 1, 3)
    assert (drafts.shape, num_proposed.shape) == ((0, 2), (0,))
    assert tokens.tolist() == [[4, 4, 4, 0, 0, 0]]


@pytest.mark.parametrize("query_lens", [[1], [5, 0, 5, 5, 1, 0], [3, 3, 3, 3], [70, 33, 34, 2]])
@pytest.mark.parametrize("alphabet", [1, 3])
def test_small_verifications_match_reference(device, query_lens, alphabet):
    torch.manual_seed(len(query_lens))
    check_verification(query_lens, 100, alphabet, device)


@pytest.mark.gpu
@pytest.mark.parametrize("alphabet", [1, 3, 12, 50000])
@pytest.mark.parametrize(("num_reqs", "max_len"), [(1, 131072), (64, 9000), (512, 9000), (16, 131072)])
def test_large_proposals_match_reference(device, num_reqs, max_len, alphabet):
    torch.manual_seed(num_reqs)
    num_drafts = check_proposal(num_reqs, max_len, alphabet, (5, 3, 8), device)
    assert num_drafts == 5 or alphabet == 50000


@pytest.mark.gpu
@pytest.mark.parametrize("query_lens", [[5] * 512, [2, 0, 9, 1] * 100])
def test_large_verifications_match_reference(device, query_lens):
    torch.manual_seed(0)
    check_verification(query_lens, 9000, 3, device)


@pytest.mark.gpu
def test_rows_beyond_32_bit_offsets_are_read_and_written(device):
    max_len = 1 << 17
    num_rows = (1 << 14) + 2
    tokens = torch.zeros((num_rows, max_len), dtype=torch.int32, device=device)
    tokens[-1, :7] = ints(device, 1, 2, 3, 9, 1, 2, 3)
    num_computed = torch.full((num_rows,), 6, dtype=torch.int32, device=device)
    tables, rows = TokenTables(tokens, num_computed), ints(device, num_rows - 1)
    drafts, _ = propose_ngrams(rows, ints(device, 1), tables, num_drafts=3, min_match=3, max_match=8)
    assert drafts.tolist() == [[9, 1, 2]]
    num_new = verify_drafts(rows, ints(device, 0, 4), ints(device, 9, 1, 5, 6), tables, None)
    assert num_new.tolist() == [3]
    assert tokens[-1, 7:11].tolist() == [9, 1, 5, 0]
    assert not tokens[:-1].any()


@pytest.mark.gpu
def test_captured_steps_propose_and_accept_drafts(device):
    tokens = torch.zeros((2, 64), dtype=torch.int32, device=device)
    tokens[1, :8] = ints(device, 5, 6, 7, 8, 5, 6, 7, 8)
    tables = TokenTables(tokens, ints(device, 0, 7))
    rows, is_sampled, starts = ints(device, 1, 1), ints(device, 1, 0), ints(device, 0, 4, 4)

    def step():
        drafts, num_proposed = propose_ngrams(rows, is_sampled, tables, num_drafts=3, min_match=3, max_match=8)
        sampled = torch.cat((drafts[0], drafts[0, :1] + 3))
        return num_proposed, verify_drafts(rows, starts, sampled, tables, None)

    before = [table.clone() for table in tables]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        num_proposed, num_new = step()
    for table, old in zip(tables, before, strict=True):
        table.copy_(old)
    for _ in range(5):
        graph.replay()
        assert num_proposed.tolist() == [3, 0]
        assert num_new.tolist() == [4, 0]
    assert tables.num_computed.tolist() == [0, 27]
    assert tokens[1, :28].tolist() == [5, 6, 7, 8] * 7
