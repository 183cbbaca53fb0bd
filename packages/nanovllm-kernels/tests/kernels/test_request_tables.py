import pytest
import torch

from nanovllm_kernels.request_tables import TokenTables, request_tables_reference

OPS = torch.ops.nanovllm


def check(query_lens, num_rows, max_len, page_size, device):
    num_reqs, num_tokens = len(query_lens), sum(query_lens)
    tokens = torch.randint(0, 1000, (num_rows, max_len), dtype=torch.int32, device=device)
    num_computed = torch.randint(0, max_len - max(query_lens) + 1, (num_rows,), dtype=torch.int32, device=device)
    block_table = torch.randint(0, 500, (num_rows, max_len // page_size + 1), dtype=torch.int32, device=device)
    rows = torch.randperm(num_rows, device=device)[:num_reqs].to(torch.int32)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32)
    tables = TokenTables(tokens, num_computed)
    shape_args = (block_table, page_size, num_tokens, block_table.shape[1])
    expected_inputs = request_tables_reference.build_inputs(rows, starts, tables, *shape_args)
    *actual_inputs, actual_tables = OPS.build_inputs(rows, starts, *tables, *shape_args)
    for actual, expected in zip(actual_inputs, expected_inputs, strict=False):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    for request, length in enumerate(expected_inputs.seq_lens.tolist()):
        num_used_pages = -(-length // page_size)
        assert torch.equal(
            actual_tables[request, :num_used_pages], expected_inputs.block_tables[request, :num_used_pages]
        )

    is_sampled = torch.randint(0, 2, (num_reqs,), dtype=torch.int32, device=device)
    sampled = torch.randint(0, 60, (num_reqs,), dtype=torch.int32, device=device)
    for counts in (None, torch.zeros((num_rows, 60), dtype=torch.int32, device=device)):
        state = (tokens, num_computed, counts)
        actual, expected = ([None if table is None else table.clone() for table in state] for _ in range(2))
        OPS.commit_tokens(rows, starts, sampled, is_sampled, *actual)
        *expected_tables, expected_counts = expected
        request_tables_reference.commit_tokens(
            rows, starts, sampled, is_sampled, TokenTables(*expected_tables), expected_counts
        )
        for table, expected_table in zip(actual, expected, strict=True):
            assert table is None or torch.equal(table, expected_table)


@pytest.mark.parametrize("query_lens", [[1], [1] * 5, [1, 1, 300, 7], [16]])
def test_small_batches_match_reference(device, query_lens):
    check(query_lens, num_rows=8, max_len=320, page_size=16, device=device)


def test_padding_is_token_0_in_slot_0_and_does_not_change_tables(device):
    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    tokens = torch.arange(1, 65, dtype=torch.int32, device=device).view(2, 32)
    num_computed, block_table = ints(3, 20), torch.tensor([[5, 6], [7, 8]], dtype=torch.int32, device=device)
    rows, starts = ints(1, 0, 0, 0), ints(0, 2, 3, 3, 3)
    out = OPS.build_inputs(rows, starts, tokens, num_computed, block_table, 16, 6, 2)
    ids, positions, seq_lens, slots, last, _ = (each.tolist() for each in out)
    assert ids == [53, 54, 4, 0, 0, 0]
    assert positions == [20, 21, 3, 0, 0, 0]
    assert slots == [8 * 16 + 4, 8 * 16 + 5, 5 * 16 + 3, 0, 0, 0]
    assert seq_lens == [22, 4, 0, 0]
    assert last == [1, 2, 2, 2]
    OPS.commit_tokens(rows, starts, ints(91, 92, 93, 94), ints(1, 1, 1, 1), tokens, num_computed, None)
    assert num_computed.tolist() == [4, 22]
    assert tokens[0, 4] == 92
    assert tokens[1, 22] == 91
    assert not torch.isin(tokens, ints(93, 94)).any()


@pytest.mark.gpu
@pytest.mark.parametrize("query_lens", [[1] * 512, [1] * 300 + [700, 33, 5000], [8192]])
@pytest.mark.parametrize("page_size", [16, 64])
def test_large_batches_match_reference(device, query_lens, page_size):
    check(query_lens, num_rows=600, max_len=9000, page_size=page_size, device=device)
