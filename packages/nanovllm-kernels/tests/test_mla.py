"""Tests latent attention and cache writes in plain torch against float64 loops."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm_kernels import fp8
from nanovllm_kernels.attention.mla import latent_attention, plan_latent_batch
from nanovllm_kernels.elementwise import latent_rope_and_cache, plan_rotation, prepare_norm_weight

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def attend(batch):
    batch_plan = plan_latent_batch(
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
    return latent_attention(
        batch.q, batch.expansion, batch.kv_cache, batch_plan, scale=batch.scale, kv_scales=batch.kv_scales
    )


@st.composite
def draw_requests(draw):
    decodes = draw(st.lists(st.integers(1, 70), max_size=4))
    prefills = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=not decodes, max_size=3))
    return [(1, length) for length in decodes] + [(query, query + context) for query, context in prefills]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    draw_requests(),
    # (heads, key size, value size, latent size, rotated size)
    st.sampled_from([(1, 16, 16, 32, 8), (3, 24, 8, 40, 16), (16, 128, 128, 512, 64)]),
    st.sampled_from([16, 64]),
    st.sampled_from(list(TOLERANCE)),
    st.booleans(),
)
def test_random_batches_match_float64(
    latent_batch, quantized_latents, naive_latent_attention, requests, shape, page_size, dtype, is_fp8
):
    batch = latent_batch(requests, shape, page_size=page_size, dtype=dtype)
    if is_fp8:
        batch = quantized_latents(batch)
    out = attend(batch)
    assert out.dtype == dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), naive_latent_attention(batch), atol=TOLERANCE[dtype], rtol=0)


def test_decodes_in_several_gather_groups_match_float64(latent_batch, naive_latent_attention, monkeypatch):
    monkeypatch.setattr("nanovllm_kernels.attention.plan.gathers.MAX_GATHER_TOKENS", 48)
    requests = [(1, 5), (1, 40), (1, 100), (1, 3), (1, 16), (1, 16)]
    batch = latent_batch(requests, (4, 16, 24, 32, 8), page_size=16, dtype=torch.float32)
    torch.testing.assert_close(attend(batch).double(), naive_latent_attention(batch), atol=2e-5, rtol=0)


def test_float32_queries_work_with_bf16_weights(latent_batch, naive_latent_attention):
    batch = latent_batch([(1, 30), (4, 9)], (4, 16, 24, 32, 8), page_size=16, dtype=torch.bfloat16)
    out = attend(replace(batch, q=batch.q.float()))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), naive_latent_attention(batch), atol=3e-2, rtol=0)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(512, 64), (40, 16)])
def test_latent_rope_and_cache_matches_float64(dtype, is_fp8, latent_dim, rope_dim):
    num_tokens, num_heads, key_dim, page_size = 7, 3, 24, 16
    q = torch.randn(num_tokens, num_heads, key_dim + rope_dim).to(dtype)
    # Tokens may have any stride.
    latents = torch.randn(num_tokens, latent_dim + rope_dim + 8).to(dtype)[:, : latent_dim + rope_dim]
    weight = torch.randn(latent_dim).to(dtype)
    cos_sin, positions = torch.randn(50, rope_dim), torch.randint(0, 50, (num_tokens,))
    slots = torch.randperm(4 * page_size)[:num_tokens]
    kv_cache = torch.full((4, page_size, 1, latent_dim + rope_dim), 7.0).to(fp8.DTYPE if is_fp8 else dtype)
    kv_scales = fp8.make_scales(kv_cache) if is_fp8 else None

    def rotate_exactly(x):
        cos, sin = cos_sin[positions].double().view(-1, *[1] * (x.dim() - 2), rope_dim).chunk(2, -1)
        first, second = x.double().chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    expected_q = torch.cat((q[..., :key_dim].double(), rotate_exactly(q[..., key_dim:])), -1)
    latent = latents[:, :latent_dim].double()
    normed = latent / (latent.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    expected = torch.cat((normed, rotate_exactly(latents[:, latent_dim:])), -1)

    rotation = plan_rotation(cos_sin, positions)
    latent_rope_and_cache(q, latents, prepare_norm_weight(weight), 1e-5, rotation, slots, kv_cache, kv_scales)

    tolerance = {"rtol": {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype], "atol": 1e-5}
    torch.testing.assert_close(q.double(), expected_q, **tolerance)
    is_unwritten = torch.ones(4 * page_size, dtype=torch.bool)
    is_unwritten[slots] = False
    cached = kv_cache.view(-1, latent_dim + rope_dim)
    assert (cached[is_unwritten].float() == 7).all()
    if kv_scales is not None:
        cached = fp8.dequantize(cached, kv_scales.view(-1), torch.float32)
        # The tolerance covers rounding to e4m3.
        tolerance = {"rtol": 2**-4, "atol": float(expected.abs().max()) * 2**-16}
    torch.testing.assert_close(cached[slots].double(), expected, **tolerance)
