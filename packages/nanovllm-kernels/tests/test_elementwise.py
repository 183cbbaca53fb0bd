"""Tests the plain torch norms, rotary embedding and gate against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_kernels import fp8
from nanovllm_kernels.elementwise import (
    QKNorm,
    plan_rotation,
    prepare_norm_weight,
    rms_norm,
    rope_and_cache,
    silu_and_mul,
)
from nanovllm_kernels.platform import computes_rows_in_float32

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place, with a margin for the float32 arithmetic.
RELATIVE_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8 * 1.02, torch.float16: 2**-11 * 1.02}


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
def test_rms_norm_matches_float64(dtype, shape):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5).double(), normed(x, weight, 1e-5), rtol=RELATIVE_TOLERANCE[dtype], atol=1e-7
    )


def test_rms_norm_accepts_strided_heads():
    qkv, weight = torch.randn(3, 6 * 16), torch.randn(16)
    heads = qkv[:, 16 : 4 * 16].view(3, 3, 16)
    torch.testing.assert_close(rms_norm(heads, weight, 1e-5), rms_norm(heads.contiguous(), weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_norm_weight_gives_same_result(dtype):
    x, weight = torch.randn(5, 576), torch.randn(576).to(dtype)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), normed(x, weight, 1e-5), rtol=1e-6, atol=1e-7)
    assert torch.equal(rms_norm(x, prepare_norm_weight(weight), 1e-5), rms_norm(x, weight, 1e-5))


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (9, 3), (8, 2)]),
    dims=st.sampled_from([(64, 64), (80, 32), (128, 128), (96, 96)]),
    dtype=st.sampled_from(DTYPES),
    float32_qkv=st.booleans(),
    with_norm=st.booleans(),
)
def test_rope_and_cache_matches_float64(num_tokens, heads, dims, dtype, float32_qkv, with_norm):
    (num_heads, num_kv_heads), (head_dim, rope_dim) = heads, dims
    # Tokens may have any stride.
    wide = torch.randn(num_tokens, num_heads + 2 * num_kv_heads + 1, head_dim)
    wide = wide if float32_qkv else wide.to(dtype)
    qkv = wide[:, :-1]
    q, k, v = qkv.clone().split((num_heads, num_kv_heads, num_kv_heads), 1)
    cos_sin = torch.randn(50, rope_dim)
    positions = torch.randint(0, 50, (num_tokens,))
    slots = torch.randperm(4 * 16)[:num_tokens]
    kv_cache = torch.full((4, 16, 2 * num_kv_heads, head_dim), 7.0, dtype=dtype)
    norm = QKNorm(torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype), 1e-5) if with_norm else None

    out = rope_and_cache(qkv, plan_rotation(cos_sin, positions), slots, kv_cache, norm)

    if norm is not None:
        q, k = normed(q, norm.q_weight, norm.eps), normed(k, norm.k_weight, norm.eps)
    # The two terms of a rotation may cancel. Only atol covers their rounding errors then.
    tolerances = {"rtol": 2 * RELATIVE_TOLERANCE[dtype], "atol": 8 * RELATIVE_TOLERANCE[dtype] if with_norm else 1e-6}
    stays_float32 = computes_rows_in_float32(num_tokens) and float32_qkv and dtype == torch.bfloat16
    assert out.dtype == (torch.float32 if stays_float32 else dtype)
    torch.testing.assert_close(out.double(), rotated(q, cos_sin, positions), **tolerances)
    keys, values = kv_cache.view(64, -1, head_dim)[slots].chunk(2, 1)
    torch.testing.assert_close(keys.double(), rotated(k, cos_sin, positions), **tolerances)
    assert torch.equal(values, v.to(dtype))
    others = torch.ones(64, dtype=torch.bool).index_fill_(0, slots, False)
    assert (kv_cache.view(64, -1)[others] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_rounds_to_nearest(dtype):
    sizes = torch.tensor([1e-30, 1e-6, 1.0, 447.9, 448.0, 448.1, 1e4]).view(-1, 1)
    x = (torch.randn(7, 64).clamp(-1, 1) * sizes).to(dtype)
    x[:, 0] = sizes[:, 0].to(dtype)
    numbers, exponents = fp8.quantize(x)
    found = fp8.dequantize(numbers, exponents, torch.float32).double()
    # Half a step of e4m3 is relative for normal numbers and absolute for subnormal numbers.
    half_steps = torch.maximum(x.double().abs() * 2**-4, (exponents.double() - 127).exp2().unsqueeze(-1) * 2**-10)
    assert ((found - x.double()).abs() <= half_steps).all()
    # The values of the first row are too small even for the smallest scale.
    max_magnitudes = numbers[1:].float().abs().amax(-1)
    assert ((max_magnitudes >= 224) & (max_magnitudes <= 448)).all()
    assert torch.equal(fp8.dequantize(numbers, exponents, torch.bfloat16).double(), found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_dequantizes_like_torch(dtype):
    numbers = torch.arange(256).to(torch.uint8)[torch.arange(256) % 128 < 127].view(fp8.DTYPE)
    ones = torch.full((), 127, dtype=torch.uint8)
    assert torch.equal(fp8.dequantize(numbers, ones, dtype).float(), numbers.float())


def test_fp8_of_zeros_is_zeros():
    assert not fp8.dequantize(*fp8.quantize(torch.zeros(2, 3, 16)), torch.float16).any()


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_cache_holds_quantised_keys_and_values(page_size, dtype):
    num_kv_heads, head_dim, num_tokens = 3, 64, 7
    qkv = torch.randn(num_tokens, 9 + 2 * num_kv_heads, head_dim).to(dtype)
    rotation = plan_rotation(torch.randn(50, head_dim), torch.randint(0, 50, (num_tokens,)))
    slots = torch.randperm(4 * page_size)[:num_tokens]
    plain = torch.zeros((4, page_size, 2 * num_kv_heads, head_dim), dtype=dtype)
    expected = rope_and_cache(qkv.clone(), rotation, slots, plain)

    kv_cache = torch.full(plain.shape, 7.0).to(fp8.DTYPE)
    kv_scales = fp8.make_scales(kv_cache)
    assert torch.equal(rope_and_cache(qkv, rotation, slots, kv_cache, kv_scales=kv_scales), expected)

    numbers, exponents = fp8.quantize(plain.view(-1, 2 * num_kv_heads, head_dim)[slots])
    found = kv_cache.view(-1, 2 * num_kv_heads, head_dim).view(torch.uint8)
    assert torch.equal(found[slots], numbers.view(torch.uint8))
    scales = kv_scales.transpose(1, 2).reshape(-1, 2 * num_kv_heads)
    assert torch.equal(scales[slots], exponents)
    others = torch.ones(4 * page_size, dtype=torch.bool).index_fill_(0, slots, False)
    assert (kv_cache.view(4 * page_size, -1)[others].float() == 7).all()
    assert (scales[others] == 127).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_matches_float64(dtype):
    x = torch.randn(5, 2 * 100).to(dtype)
    gate, up = x.double().chunk(2, -1)
    expected = gate / (1 + (-gate).exp()) * up
    # The result is rounded twice.
    torch.testing.assert_close(silu_and_mul(x).double(), expected, rtol=2.1 * RELATIVE_TOLERANCE[dtype], atol=1e-6)
