"""The plain torch norms, rotary embedding and gate against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_kernels.elementwise import add_rms_norm, rms_norm, rope_and_cache, silu_and_mul

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place, and a little for the float32 arithmetic before it.
RELATIVE = {torch.float32: 1e-6, torch.bfloat16: 2**-8 * 1.02, torch.float16: 2**-11 * 1.02}


def normed(x, weight, eps):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotated(x, cos_sin, positions):
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].double().unsqueeze(1).split(half, -1)
    wide = x.double()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (3, 4, 80)])
def test_rms_norm(dtype, shape):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5).double(), normed(x, weight, 1e-5), rtol=RELATIVE[dtype], atol=1e-7
    )


def test_rms_norm_of_heads_within_a_projection():
    qkv, weight = torch.randn(3, 6 * 16), torch.randn(16)
    heads = qkv[:, 16 : 4 * 16].view(3, 3, 16)
    torch.testing.assert_close(rms_norm(heads, weight, 1e-5), rms_norm(heads.contiguous(), weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_norms_the_rounded_sum(dtype):
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in [(5, 576), (5, 576), (576,)])
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(out.double(), normed(total, weight, 1e-5), rtol=RELATIVE[dtype], atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (9, 3), (8, 2)]),
    dims=st.sampled_from([(64, 64), (80, 32), (128, 128), (96, 96)]),
    dtype=st.sampled_from(DTYPES),
    adjacent=st.booleans(),
)
def test_rope_and_cache(num_tokens, heads, dims, dtype, adjacent):
    (num_heads, num_kv_heads), (head_dim, rot) = heads, dims
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    before = qkv.clone()
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
    if not adjacent:
        k = k.clone()
    cos_sin = torch.randn(50, rot)
    positions = torch.randint(0, 50, (num_tokens,))
    slots = torch.randperm(4 * 16)[:num_tokens]
    k_cache = torch.full((4, 16, num_kv_heads, head_dim), 7.0, dtype=dtype)
    v_cache = k_cache.clone()

    out = rope_and_cache(q, k, v, cos_sin, positions, slots, k_cache, v_cache)

    assert out.is_contiguous()
    assert torch.equal(qkv, before)
    close = {"rtol": RELATIVE[dtype], "atol": 1e-6}
    torch.testing.assert_close(out.double(), rotated(q, cos_sin, positions), **close)
    torch.testing.assert_close(k_cache.view(-1, *k.shape[1:])[slots].double(), rotated(k, cos_sin, positions), **close)
    assert torch.equal(v_cache.view(-1, *v.shape[1:])[slots], v)
    others = torch.ones(64, dtype=torch.bool).index_fill_(0, slots, False)
    for cache in (k_cache, v_cache):
        assert (cache.view(64, -1)[others] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype):
    x = torch.randn(5, 2 * 100).to(dtype)
    gate, up = x.double().chunk(2, -1)
    expected = gate / (1 + (-gate).exp()) * up
    # Rounded twice.
    torch.testing.assert_close(silu_and_mul(x).double(), expected, rtol=2.1 * RELATIVE[dtype], atol=1e-6)
