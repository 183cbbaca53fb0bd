"""Tests paged attention of the backend "torch" against a float64 loop."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm_kernels.attention import paged_attention, plan_batch
from nanovllm_kernels.attention.plan.gathers import plan_gathers
from nanovllm_kernels.platform import computes_rows_in_float32, has_numba

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def attend(batch):
    batch_plan = plan_batch(
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        num_decodes=batch.num_decodes,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        num_heads=batch.q.shape[1],
        kv_cache=batch.kv_cache,
        backend="torch",
    )
    return paged_attention(batch.q, batch.kv_cache, batch_plan, scale=batch.scale, kv_scales=batch.kv_scales)


@st.composite
def draw_requests(draw):
    decodes = draw(st.lists(st.integers(1, 70), max_size=4))
    prefills = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=not decodes, max_size=3))
    return [(1, length) for length in decodes] + [(query_len, query_len + context) for query_len, context in prefills]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    draw_requests(),
    st.sampled_from([(1, 1, 64), (9, 3, 64), (8, 8, 80), (4, 2, 96), (8, 1, 128)]),
    st.sampled_from([16, 32, 64]),
    st.sampled_from(list(TOLERANCE)),
    st.booleans(),
)
def test_random_batches_match_float64(
    paged_batch, quantized, naive_attention, requests, heads, page_size, dtype, is_fp8
):
    num_heads, num_kv_heads, head_dim = heads
    batch = paged_batch(
        requests, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype
    )
    if is_fp8:
        batch = quantized(batch)
    out = attend(batch)
    assert out.dtype == dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), naive_attention(batch), atol=TOLERANCE[dtype], rtol=0)


def test_decodes_in_several_gather_groups_match_float64(paged_batch, naive_attention, monkeypatch):
    monkeypatch.setattr("nanovllm_kernels.attention.plan.gathers.MAX_GATHER_TOKENS", 48)
    batch = paged_batch(
        [(1, 5), (1, 40), (1, 100), (1, 3), (1, 16), (1, 16)],
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        dtype=torch.float32,
    )
    torch.testing.assert_close(attend(batch).double(), naive_attention(batch), atol=2e-5, rtol=0)


@pytest.mark.parametrize("seq_len", [1, 16, 17, 200])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_single_decode_matches_float64(paged_batch, quantized, naive_attention, seq_len, is_fp8):
    batch = paged_batch([(1, seq_len)], num_heads=9, num_kv_heads=3, head_dim=64, page_size=16, dtype=torch.float32)
    if is_fp8:
        batch = quantized(batch)
    torch.testing.assert_close(attend(batch).double(), naive_attention(batch), atol=2e-5, rtol=0)


REQUESTS = [
    [(1, 1)],
    [(1, 200)],
    [(1, 130), (1, 4), (3, 20), (2, 2)],
    [(8, 70)],
    [(1, 64), (1, 65), (150, 150), (70, 200)],
]


@pytest.mark.skipif(not has_numba(), reason="needs Numba")
@pytest.mark.usefixtures("threads", "bf16_units")
@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize(("heads", "page_size"), [((9, 3, 64), 16), ((8, 1, 80), 32), ((2, 2, 18), 4)])
def test_attention_over_bf16_cache_is_computed_in_float32(paged_batch, naive_attention, requests, heads, page_size):
    if not computes_rows_in_float32(sum(query_len for query_len, _ in requests)):
        pytest.skip("with this many queries, this CPU uses torch instead of the Numba kernel")
    num_heads, num_kv_heads, head_dim = heads
    batch = paged_batch(
        requests,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=torch.bfloat16,
    )
    batch = replace(batch, q=torch.randn(batch.q.shape))
    out = attend(batch)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), naive_attention(batch), atol=2e-6, rtol=0)


@pytest.mark.skipif(not has_numba(), reason="needs Numba")
@pytest.mark.usefixtures("threads", "bf16_units")
def test_query_result_does_not_depend_on_chunk_or_batch(paged_batch):
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": torch.bfloat16}
    batch = paged_batch([(1, 33), (150, 150)], **shape)
    if not computes_rows_in_float32(151):
        pytest.skip("with this many queries, this CPU uses torch instead of the Numba kernel")
    batch = replace(batch, q=torch.randn(batch.q.shape))
    full_out = attend(batch)
    for chunk_len in (1, 2, 7, 64, 149):
        query_start_loc = torch.tensor([0, chunk_len], dtype=torch.int32)
        chunk = replace(
            batch,
            q=batch.q[-chunk_len:],
            block_tables=batch.block_tables[1:],
            seq_lens=batch.seq_lens[1:],
            query_start_loc=query_start_loc,
            num_decodes=int(chunk_len == 1),
            max_query_len=chunk_len,
        )
        assert torch.equal(attend(chunk), full_out[-chunk_len:])


@pytest.mark.parametrize(("dtype", "num_keys"), [(torch.float32, 20), (torch.bfloat16, 32)])
def test_decodes_of_different_lengths_are_padded_with_masked_copies_of_the_first_slot(dtype, num_keys):
    tables, lengths = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32), torch.tensor([20, 3], dtype=torch.int32)
    (group,), _ = plan_gathers(tables, lengths, torch.arange(3, dtype=torch.int32), 2, page_size=16, dtype=dtype)
    assert group.max_len == num_keys
    slots = group.pages_or_slots.view(2, num_keys)
    for row, (first_slot, length) in enumerate([(16, 20), (48, 3)]):
        assert slots[row].tolist() == [*range(first_slot, first_slot + length), *[first_slot] * (num_keys - length)]
        assert group.mask[row].flatten().tolist() == [0.0] * length + [-math.inf] * (num_keys - length)


@pytest.mark.parametrize("first_page", [1, 3])
def test_consecutive_pages_match_float64(naive_attention, paged_batch, first_page):
    batch = paged_batch([(1, 40)], num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.float32)
    batch.kv_cache[:] = torch.randn(batch.kv_cache.shape)
    batch.block_tables[0, :3] = torch.tensor([first_page, first_page + 1, first_page + 2])
    torch.testing.assert_close(attend(batch).double(), naive_attention(batch), atol=2e-5, rtol=0)


@pytest.mark.usefixtures("threads", "bf16_units")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("requests", [[(1, 5)], [(1, 5), (1, 9)], [(1, 5), (4, 20)], []])
def test_requests_without_tokens_and_padding_tokens_do_not_change_results(
    paged_batch, naive_attention, requests, dtype
):
    batch = paged_batch(requests or [(1, 1)], num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, dtype=dtype)
    expected = naive_attention(batch)[: sum(query_len for query_len, _ in requests)]
    num_tokens = len(expected)
    padding = torch.zeros(2, dtype=torch.int32)
    padded = replace(
        batch,
        q=torch.cat((batch.q[:num_tokens], torch.full_like(batch.q[:1], 7.0).expand(3, -1, -1))),
        block_tables=torch.cat(
            (batch.block_tables[: len(requests)], padding[:, None].expand(-1, batch.block_tables.shape[1]))
        ),
        seq_lens=torch.cat((batch.seq_lens[: len(requests)], padding)),
        query_start_loc=torch.cat((batch.query_start_loc[: len(requests) + 1], padding + num_tokens)),
        num_decodes=sum(query_len == 1 for query_len, _ in requests),
    )
    found = attend(padded)
    assert len(found) == num_tokens + 3
    torch.testing.assert_close(found[:num_tokens].double(), expected, atol=TOLERANCE[dtype], rtol=0)
