import pytest
import torch

from nanovllm_kernels import fp8
from nanovllm_kernels.elementwise import QKNorm, elementwise_reference, norm_parts, rms_norm

SMALL_TEST_DTYPES = [torch.float32, torch.float16]
LARGE_TEST_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.float16: {"rtol": 2**-10, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5},
}
OPS = torch.ops.nanovllm


def check_rms_norm(shape, dtype, device):
    x, weight = torch.randn(shape, device=device), torch.randn(shape[-1], device=device).to(dtype)
    for rows in (x, x.to(dtype)):
        expected = elementwise_reference.rms_norm(rows.float(), weight.float(), 1e-5)
        actual = OPS.rms_norm(rows, weight, 1e-5)
        assert actual.dtype == dtype
        assert torch.equal(OPS.rms_norm(rows, weight.float(), 1e-5, dtype), actual)
        torch.testing.assert_close(actual.float(), expected, **TOLERANCE[dtype])


def check_silu_and_mul(shape, dtype, device):
    x = torch.randn(shape, device=device).to(dtype)
    torch.testing.assert_close(
        OPS.silu_and_mul(x).float(), elementwise_reference.silu_and_mul(x.float()), **TOLERANCE[dtype]
    )


def check_sigmoid_and_mul(shape, dtype, device):
    x, gate = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    strided_gate = torch.cat((gate, gate), 1)[:, : shape[1]]
    expected = x.float() * gate.float().sigmoid()
    torch.testing.assert_close(OPS.sigmoid_and_mul(x, strided_gate).float(), expected, **TOLERANCE[dtype])


def check_rope_and_cache(num_tokens, heads, dims, dtype, device, *, with_norm):
    (num_heads, num_kv_heads), (head_dim, rope_dim) = heads, dims
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads + 1, head_dim, device=device).to(dtype)[:, :-1]
    cos_sin = torch.randn(300, rope_dim, device=device)
    positions = torch.randint(0, 300, (num_tokens,), device=device)
    num_blocks = num_tokens // 16 + 2
    slots = torch.randperm(num_blocks * 16, device=device)[:num_tokens]
    kv_cache = torch.full((num_blocks, 16, 2 * num_kv_heads, head_dim), 7.0, dtype=dtype, device=device)
    weights = [torch.randn(head_dim, device=device).to(dtype) for _ in range(2)] if with_norm else [None, None]
    norm = QKNorm(weights[0].float(), weights[1].float(), 1e-5) if with_norm else None
    expected, expected_cache = qkv.float(), kv_cache.float()
    elementwise_reference.rope_and_cache(
        expected, elementwise_reference.gather_rotation(cos_sin, positions), slots, expected_cache, None, norm
    )
    original_qkv = qkv.clone()
    OPS.rope_and_cache(qkv, cos_sin, positions, slots, kv_cache, None, *weights, 1e-5, False)
    if qkv.dtype == kv_cache.dtype:
        updated_qkv, cache = original_qkv, torch.zeros_like(kv_cache)
        OPS.rope_and_cache(updated_qkv, cos_sin, positions, slots, cache, None, *weights, 1e-5, True)
        assert torch.equal(updated_qkv[:, :num_heads], qkv[:, :num_heads])
        assert torch.equal(updated_qkv[:, num_heads:], cache.flatten(0, 1)[slots])
    torch.testing.assert_close(qkv[:, :num_heads].float(), expected[:, :num_heads], **TOLERANCE[dtype])
    torch.testing.assert_close(
        kv_cache[:, :, :num_kv_heads].float(), expected_cache[:, :, :num_kv_heads], **TOLERANCE[dtype]
    )
    assert torch.equal(kv_cache[:, :, num_kv_heads:].float(), expected_cache[:, :, num_kv_heads:])


def check_fp8_cache(num_tokens, heads, dims, dtype, device, *, page_size, exactly):
    """exactly: rotate by 0 or 90 degrees. These rotations round nothing, so the bytes must be equal."""
    (num_heads, num_kv_heads), (head_dim, rope_dim) = heads, dims
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    qkv *= torch.randint(-9, 9, (*qkv.shape[:2], 1), device=device).exp2()
    qkv[0, -1] = 0
    cos_sin = torch.randn(300, rope_dim, device=device)
    if exactly:
        cosines = torch.randint(0, 2, (300, rope_dim // 2), device=device).float()
        cos_sin = torch.cat((cosines, 1 - cosines), 1)
    positions = torch.randint(0, 300, (num_tokens,), device=device)
    num_blocks = num_tokens // page_size + 2
    slots = torch.randperm(num_blocks * page_size, device=device)[:num_tokens]
    kv_cache = torch.full((num_blocks, page_size, 2 * num_kv_heads, head_dim), 7.0, device=device).to(fp8.DTYPE)
    kv_scales = fp8.make_scales(kv_cache)
    expected, expected_cache, expected_scales = qkv.float(), kv_cache.cpu(), kv_scales.cpu()
    rotation = elementwise_reference.gather_rotation(cos_sin.cpu(), positions.cpu())
    elementwise_reference.rope_and_cache(expected.cpu(), rotation, slots.cpu(), expected_cache, expected_scales, None)
    OPS.rope_and_cache(qkv, cos_sin, positions, slots, kv_cache, kv_scales, None, None, 0.0, False)
    if exactly:
        assert torch.equal(kv_cache.cpu().view(torch.uint8), expected_cache.view(torch.uint8))
        assert torch.equal(kv_scales.cpu(), expected_scales)
        return
    found_values = fp8.dequantize(kv_cache.cpu(), kv_scales.cpu().transpose(1, 2), torch.float32)
    expected_values = fp8.dequantize(expected_cache, expected_scales.transpose(1, 2), torch.float32)
    # A difference in the last bit of a float32 may change the e4m3 value or the scale by one step.
    smallest = 2.0 ** (expected_scales.transpose(1, 2).unsqueeze(-1).float() - fp8.EXPONENT_BIAS - 9)
    assert ((found_values - expected_values).abs() <= expected_values.abs() / 8 + 2 * smallest).all()
    assert (found_values == expected_values).float().mean() > 0.999


@pytest.mark.parametrize("dtype", SMALL_TEST_DTYPES)
def test_fp8_cache_matches_reference(device, dtype):
    for heads, dims in [((9, 3), (64, 64)), ((2, 1), (80, 32)), ((17, 9), (96, 48))]:
        for page_size in (16, 64):
            check_fp8_cache(5, heads, dims, dtype, device, page_size=page_size, exactly=True)
        check_fp8_cache(5, heads, dims, dtype, device, page_size=16, exactly=False)


@pytest.mark.parametrize("dtype", SMALL_TEST_DTYPES)
def test_small_shapes_match_reference(device, dtype):
    for shape in [(1, 64), (5, 576), (3, 4, 80), (17, 3, 64)]:
        check_rms_norm(shape, dtype, device)
    for shape in [(1, 6), (3, 2 * 1500)]:
        check_silu_and_mul(shape, dtype, device)
        check_sigmoid_and_mul(shape, dtype, device)
    for heads, dims in [((9, 3), (64, 64)), ((2, 1), (80, 32)), ((4, 4), (128, 128)), ((17, 9), (96, 48))]:
        check_rope_and_cache(3, heads, dims, dtype, device, with_norm=False)
        check_rope_and_cache(3, heads, dims, dtype, device, with_norm=True)


def test_norm_accepts_strided_heads(device):
    qkv, weight = torch.randn(3, 6 * 16, device=device), torch.randn(16, device=device)
    heads = qkv[:, 16 : 4 * 16].view(3, 3, 16)
    torch.testing.assert_close(OPS.rms_norm(heads, weight, 1e-5), elementwise_reference.rms_norm(heads, weight, 1e-5))


@pytest.mark.parametrize("cache_dtype", [torch.float16, fp8.DTYPE])
def test_non_finite_values_are_cached_as_zero(device, cache_dtype):
    qkv = torch.randn(3, 6, 64, device=device).half()
    for token, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        qkv[token, 4, 7] = value
    values = qkv[:, 4:].float().nan_to_num(0, 0, 0)
    kv_cache = torch.zeros((1, 16, 4, 64), device=device).to(cache_dtype)
    kv_scales = fp8.make_scales(kv_cache) if cache_dtype == fp8.DTYPE else None
    positions = torch.arange(3, device=device)
    OPS.rope_and_cache(
        *(qkv, torch.randn(8, 64, device=device), positions, positions, kv_cache, kv_scales, None, None, 0.0),
        kv_scales is None,
    )
    if kv_scales is None:
        assert torch.equal(qkv[:, 4:].float(), values)
    found = kv_cache[0, :3, 2:]
    if kv_scales is not None:
        found = fp8.dequantize(found.cpu(), kv_scales[0, 2:, :3].T.cpu(), torch.float32)
    assert found.float().isfinite().all()
    assert (found[:, 0, 7] == 0).all()
    torch.testing.assert_close(found.float().cpu(), values.cpu(), rtol=2**-4 if kv_scales is not None else 0, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LARGE_TEST_DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 63, 8192])
def test_large_fp8_cache_matches_reference(device, dtype, num_tokens):
    for heads, dims in [((9, 3), (64, 64)), ((32, 8), (128, 128)), ((32, 2), (128, 64))]:
        for exactly in (False, True):
            check_fp8_cache(num_tokens, heads, dims, dtype, device, page_size=16, exactly=exactly)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LARGE_TEST_DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 256, 8192])
def test_large_shapes_match_reference(device, dtype, num_tokens):
    for width in (576, 1024, 4096, 8192):
        check_rms_norm((num_tokens, width), dtype, device)
        check_silu_and_mul((num_tokens, 3 * width), dtype, device)
    check_rms_norm((num_tokens, 32, 128), dtype, device)
    for heads, dims in [((9, 3), (64, 64)), ((32, 8), (128, 128)), ((32, 2), (128, 64)), ((16, 16), (80, 32))]:
        check_rope_and_cache(num_tokens, heads, dims, dtype, device, with_norm=False)
        check_rope_and_cache(num_tokens, heads, dims, dtype, device, with_norm=True)


@pytest.mark.parametrize(("sizes", "width"), [((48, 16), 100), ((96, 32), 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_norm_parts_matches_two_norms(sizes, width, dtype, device):
    x = torch.randn((3, width + 8), device=device).to(dtype)[:, :width]
    first, second = (torch.randn(size, device=device).to(dtype) for size in sizes)
    expected = x.clone()
    begin, end = sizes[0], sum(sizes)
    expected[:, :begin] = rms_norm(x[:, :begin], first, 1e-5)
    expected[:, begin:end] = rms_norm(x[:, begin:end], second, 1e-5)
    # On a CPU, the function runs plain torch, and the operator runs the interpreted Triton kernel.
    contiguous = x.clone()
    norm_parts(contiguous, sizes, (first, second), 1e-5)
    torch.ops.nanovllm.norm_parts(x, list(sizes), first, second, 1e-5)
    for result in (contiguous, x):
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-5)
