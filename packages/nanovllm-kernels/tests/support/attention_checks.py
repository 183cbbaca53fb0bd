"""Computes grouped-query attention, and compares the result with float64."""

import torch

from nanovllm_kernels.attention import paged_attention, plan_batch

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MIXED_REQUESTS = [(1, 1), (1, 37), (1, 64), (5, 5), (1, 20), (20, 70), (33, 33)]


def attend(batch, *, knows_decodes=True, backend="triton"):
    batch_plan = plan_batch(
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        num_decodes=batch.num_decodes if knows_decodes else None,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        num_heads=batch.q.shape[1],
        kv_cache=batch.kv_cache,
        backend=backend,
        dtype=batch.q.dtype,
    )
    return paged_attention(batch.q, batch.kv_cache, batch_plan, scale=batch.scale, kv_scales=batch.kv_scales)


def check_attention(batch, naive_attention):
    expected = naive_attention(batch)
    for knows_decodes in (True, False):
        out = attend(batch, knows_decodes=knows_decodes)
        assert out.dtype == batch.q.dtype
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[out.dtype], rtol=0)
