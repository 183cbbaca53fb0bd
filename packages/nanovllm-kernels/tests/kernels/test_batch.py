"""The step input kernels against the plain torch reference."""

import pytest
import torch

from nanovllm_kernels.batch import reference

OPS = torch.ops.nanovllm


def check(query_lens, num_rows, max_len, page_size, device):
    num_reqs, num_tokens = len(query_lens), sum(query_lens)
    tokens = torch.randint(0, 1000, (num_rows, max_len), dtype=torch.int32, device=device)
    num_computed = torch.randint(0, max_len - max(query_lens) + 1, (num_rows,), dtype=torch.int32, device=device)
    block_table = torch.randint(0, 500, (num_rows, max_len // page_size + 1), dtype=torch.int32, device=device)
    rows = torch.randperm(num_rows, device=device)[:num_reqs].to(torch.int32)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32)
    tables = (rows, starts, tokens, num_computed, block_table, page_size, num_tokens, block_table.shape[1])
    for actual, expected in zip(OPS.build_inputs(*tables), reference.build_inputs(*tables), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)

    sampled_reqs = torch.randperm(num_reqs, device=device)[: (num_reqs + 1) // 2].to(torch.int32)
    sampled = torch.randint(0, 60, sampled_reqs.shape, dtype=torch.int32, device=device)
    for counts in (None, torch.zeros((num_rows, 60), dtype=torch.int32, device=device)):
        state = (tokens, num_computed, counts)
        actual, expected = ([None if table is None else table.clone() for table in state] for _ in range(2))
        OPS.commit_tokens(rows, starts, sampled, sampled_reqs, *actual)
        reference.commit_tokens(rows, starts, sampled, sampled_reqs, *expected)
        for table, expected_table in zip(actual, expected, strict=True):
            assert table is None or torch.equal(table, expected_table)


@pytest.mark.parametrize("query_lens", [[1], [1] * 5, [1, 1, 300, 7], [16]])
def test_small(device, query_lens):
    check(query_lens, num_rows=8, max_len=320, page_size=16, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("query_lens", [[1] * 512, [1] * 300 + [700, 33, 5000], [8192]])
@pytest.mark.parametrize("page_size", [16, 64])
def test_large(device, query_lens, page_size):
    check(query_lens, num_rows=600, max_len=9000, page_size=page_size, device=device)
