"""The elementwise kernels against the plain torch reference, computed in float32 from the same numbers."""

import pytest
import torch

from nanovllm_kernels.elementwise import reference

SMALL = [torch.float32, torch.float16]
LARGE = [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.float16: {"rtol": 2**-10, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5},
}
OPS = torch.ops.nanovllm


def check_rms_norm(shape, dtype, device):
    x, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[-1], device=device).to(dtype)
    expected = reference.rms_norm(x.float(), weight.float(), 1e-5)
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-5).float(), expected, **CLOSE[dtype])


def check_add_rms_norm(shape, dtype, device):
    x, residual = torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device).to(dtype)
    weight = torch.randn(shape[-1], device=device).to(dtype)
    out, total = OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    expected = reference.rms_norm(total.float(), weight.float(), 1e-5)
    torch.testing.assert_close(out.float(), expected, **CLOSE[dtype])


def check_silu_and_mul(shape, dtype, device):
    x = torch.randn(shape, device=device).to(dtype)
    torch.testing.assert_close(OPS.silu_and_mul(x).float(), reference.silu_and_mul(x.float()), **CLOSE[dtype])


def check_rope_and_cache(num_tokens, heads, dims, dtype, device):
    (num_heads, num_kv_heads), (head_dim, rot) = heads, dims
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
    cos_sin = torch.randn(300, rot, device=device)
    positions = torch.randint(0, 300, (num_tokens,), device=device)
    num_blocks = num_tokens // 16 + 2
    slots = torch.randperm(num_blocks * 16, device=device)[:num_tokens]
    k_cache = torch.full((num_blocks, 16, num_kv_heads, head_dim), 7.0, dtype=dtype, device=device)
    v_cache, expected_k, expected_v = k_cache.clone(), k_cache.float(), k_cache.float()
    out = OPS.rope_and_cache(q, k, v, cos_sin, positions, slots, k_cache, v_cache)
    expected = reference.rope_and_cache(
        q.float(), k.float(), v.float(), cos_sin, positions, slots, expected_k, expected_v
    )
    torch.testing.assert_close(out.float(), expected, **CLOSE[dtype])
    torch.testing.assert_close(k_cache.float(), expected_k, **CLOSE[dtype])
    assert torch.equal(v_cache.float(), expected_v)


@pytest.mark.parametrize("dtype", SMALL)
def test_small(device, dtype):
    for shape in [(1, 64), (5, 576), (3, 4, 80), (17, 3, 64)]:
        check_rms_norm(shape, dtype, device)
    for shape in [(1, 64), (5, 576)]:
        check_add_rms_norm(shape, dtype, device)
    for shape in [(1, 6), (3, 2 * 1500)]:
        check_silu_and_mul(shape, dtype, device)
    for heads, dims in [((9, 3), (64, 64)), ((2, 1), (80, 32)), ((4, 4), (128, 128)), ((17, 9), (96, 48))]:
        check_rope_and_cache(3, heads, dims, dtype, device)


def test_norm_of_heads_within_a_projection(device):
    qkv, weight = torch.randn(3, 6 * 16, device=device), torch.randn(16, device=device)
    heads = qkv[:, 16 : 4 * 16].view(3, 3, 16)
    torch.testing.assert_close(OPS.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads, weight, 1e-5))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LARGE)
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 256, 8192])
def test_large(device, dtype, num_tokens):
    for width in (576, 1024, 4096, 8192):
        check_rms_norm((num_tokens, width), dtype, device)
        check_add_rms_norm((num_tokens, width), dtype, device)
        check_silu_and_mul((num_tokens, 3 * width), dtype, device)
    check_rms_norm((num_tokens, 32, 128), dtype, device)
    for heads, dims in [((9, 3), (64, 64)), ((32, 8), (128, 128)), ((32, 2), (128, 64)), ((16, 16), (80, 32))]:
        check_rope_and_cache(num_tokens, heads, dims, dtype, device)
