"""Tests the kernels of latent attention."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm_kernels import fp8
from nanovllm_kernels.attention import mla
from nanovllm_kernels.attention.mla import latent_attention, plan_latent_batch
from nanovllm_kernels.attention.plan import tile_configs
from nanovllm_kernels.elementwise import elementwise_reference
from nanovllm_kernels.platform import has_flash_attention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
MIXED_REQUESTS = [(1, 1), (1, 37), (5, 5), (1, 20), (20, 70), (33, 33), (2, 9)]
OPS = torch.ops.nanovllm


@pytest.fixture(autouse=True)
def skipping_projection(monkeypatch):
    """Skip tokens of whole prompts even in small batches."""
    monkeypatch.setattr(mla, "MIN_SKIPPING_TOKENS", 1)


def attend(batch, backend, num_decodes):
    batch_plan = plan_latent_batch(
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        num_decodes=num_decodes,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        num_heads=batch.q.shape[1],
        kv_cache=batch.kv_cache,
        backend=backend,
        dtype=batch.q.dtype,
    )
    return latent_attention(
        batch.q, batch.expansion, batch.kv_cache, batch_plan, scale=batch.scale, kv_scales=batch.kv_scales
    )


def check_attention(batch, naive_latent_attention, backend="triton", *, knows_decodes=True):
    expected = naive_latent_attention(batch)
    for num_decodes in (batch.num_decodes, None) if knows_decodes else (None,):
        out = attend(batch, backend, num_decodes)
        assert out.dtype == batch.q.dtype
        assert out.is_contiguous()
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[out.dtype], rtol=0)


# (heads, key size, value size, latent size, rotated size)
@pytest.mark.parametrize(
    ("shape", "dtype", "page_size"),
    [((3, 16, 16, 32, 16), torch.float32, 16), ((20, 24, 16, 40, 8), torch.float16, 32)],
)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_mixed_batch_matches_float64(
    device, latent_batch, quantized_latents, naive_latent_attention, shape, dtype, page_size, is_fp8
):
    batch = latent_batch(MIXED_REQUESTS, shape, page_size=page_size, dtype=dtype, device=device)
    check_attention(quantized_latents(batch) if is_fp8 else batch, naive_latent_attention)


def test_more_heads_than_a_tile_match_float64(device, latent_batch, naive_latent_attention):
    requests = [(1, 20), (3, 3), (2, 30)]
    batch = latent_batch(requests, (70, 16, 24, 32, 16), page_size=16, dtype=torch.float16, device=device)
    check_attention(batch, naive_latent_attention)


def test_widths_of_deepseek_models_match_float64(device, latent_batch, naive_latent_attention):
    batch = latent_batch(
        [(1, 70), (3, 3), (2, 40)], (16, 128, 128, 512, 64), page_size=64, dtype=torch.float16, device=device
    )
    check_attention(batch, naive_latent_attention)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_parts_are_merged(device, latent_batch, quantized_latents, naive_latent_attention, monkeypatch, is_fp8):
    monkeypatch.setattr(tile_configs, "choose_num_parts", lambda *_: 7)
    monkeypatch.setattr(tile_configs, "MIN_PART_TOKENS", 32)
    requests = [(1, 300), (1, 3), (7, 150), (2, 2), (9, 12)]
    batch = latent_batch(requests, (4, 16, 16, 32, 16), page_size=16, dtype=torch.float32, device=device)
    check_attention(quantized_latents(batch) if is_fp8 else batch, naive_latent_attention)


# (query_len, context) pairs.
MIXES = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.integers(0, 200)),
        st.tuples(st.integers(2, 5), st.integers(0, 200)),
        st.tuples(st.integers(6, 20), st.integers(100, 250)),
        st.tuples(st.integers(6, 30), st.just(0)),
        st.just((0, 0)),
    ),
    min_size=1,
    max_size=4,
).filter(lambda requests: any(count for count, _ in requests))


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(MIXES, st.sampled_from([3, 16]), st.booleans(), st.sampled_from([1, 4, 13]))
def test_any_mix_of_requests_in_any_order_matches_float64(
    device, latent_batch, quantized_latents, naive_latent_attention, requests, num_heads, is_fp8, num_parts
):
    requests = [(count, count + context) for count, context in requests]
    batch = latent_batch(requests, (num_heads, 16, 16, 32, 16), page_size=16, dtype=torch.float16, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_configs, "choose_num_parts", lambda *_: num_parts)
        patch.setattr(tile_configs, "MIN_PART_TOKENS", 32)
        check_attention(quantized_latents(batch) if is_fp8 else batch, naive_latent_attention, knows_decodes=False)


@pytest.mark.parametrize("requests", [[(1, 5), (1, 40)], [(6, 6), (3, 3)], [(6, 20)]])
def test_batches_of_one_kind_match_float64(device, latent_batch, naive_latent_attention, requests):
    batch = latent_batch(requests, (4, 16, 16, 32, 16), page_size=16, dtype=torch.float32, device=device)
    check_attention(batch, naive_latent_attention)


def test_whole_prompts_are_not_absorbed(device, latent_batch, naive_latent_attention):
    shape = (3, 16, 16, 32, 16)
    requests = [(1, 1), (1, 37), (20, 70), (5, 5), (80, 80)]
    batch = latent_batch(requests, shape, page_size=16, dtype=torch.float32, device=device)
    check_attention(batch, naive_latent_attention)
    lengths, starts = (torch.nn.functional.pad(batch.seq_lens, (0, 2)), [*batch.query_start_loc, 107, 107])
    batch_plan = plan_latent_batch(
        torch.nn.functional.pad(batch.block_tables, (0, 0, 0, 2)),
        lengths,
        torch.tensor(starts, dtype=torch.int32, device=device),
        num_decodes=None,
        max_query_len=107,
        max_seq_len=107,
        num_heads=3,
        kv_cache=batch.kv_cache,
        backend="triton",
    )
    assert batch_plan.num_absorbed_tokens.tolist() == [22]
    x, weight = torch.randn(107, 3, 16, device=device), torch.randn(3, 32, 16, device=device).transpose(1, 2)
    projected = torch.full((107, 3, 32), 7.0, device=device)
    OPS.project_heads(x, weight, batch_plan.num_absorbed_tokens, projected)
    torch.testing.assert_close(projected[:22], torch.einsum("thk,hkn->thn", x, weight)[:22])
    assert (projected[22:] == 7).all()


def check_rope_and_cache(num_tokens, num_heads, dims, dtype, device, *, is_fp8):
    key_dim, latent_dim, rope_dim = dims
    q = torch.randn(num_tokens, num_heads + 1, key_dim + rope_dim, device=device).to(dtype)[:, :-1]
    latents = torch.randn(num_tokens, latent_dim + rope_dim + 8, device=device).to(dtype)[:, :-8]
    weight = torch.randn(latent_dim, device=device).to(dtype)
    cos_sin = torch.randn(300, rope_dim, device=device)
    positions = torch.randint(0, 300, (num_tokens,), device=device)
    num_blocks = num_tokens // 16 + 2
    slots = torch.randperm(num_blocks * 16, device=device)[:num_tokens]
    kv_cache = torch.full((num_blocks, 16, 1, latent_dim + rope_dim), 7.0, device=device)
    kv_cache = kv_cache.to(fp8.DTYPE if is_fp8 else dtype)
    kv_scales = fp8.make_scales(kv_cache) if is_fp8 else None
    expected_q, expected_cache = q.float(), kv_cache.float()
    rotation = elementwise_reference.gather_rotation(cos_sin, positions)
    elementwise_reference.latent_rope_and_cache(
        expected_q, latents.float(), weight.float(), 1e-5, rotation, slots, expected_cache, None
    )
    OPS.latent_rope_and_cache(q, latents, weight, 1e-5, cos_sin, positions, slots, kv_cache, kv_scales)
    rtol = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(q.float(), expected_q, rtol=rtol, atol=1e-5)
    found_cache = kv_cache.cpu().view(-1, latent_dim + rope_dim)
    if kv_scales is not None:
        found_cache = fp8.dequantize(found_cache, kv_scales.cpu().view(-1), torch.float32)
        rtol = 2**-4
    expected_cache = expected_cache.cpu().view(-1, latent_dim + rope_dim)
    atol = float(expected_cache.abs().max()) * 2**-16 if is_fp8 else 1e-5
    torch.testing.assert_close(found_cache.float(), expected_cache, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_rope_and_cache_matches_reference(device, dtype, is_fp8):
    for num_heads, dims in [(1, (16, 32, 16)), (17, (24, 40, 8)), (16, (128, 512, 64))]:
        check_rope_and_cache(5, num_heads, dims, dtype, device, is_fp8=is_fp8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_heads", [8, 16, 32, 128])
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_all_shapes_match_float64(
    device, latent_batch, quantized_latents, naive_latent_attention, dtype, num_heads, page_size, is_fp8
):
    requests = [(1, 1), (1, 1000), (1, 64), (1, 2049), (130, 130), (64, 1000), (1, 77), (513, 600)]
    batch = latent_batch(requests, (num_heads, 128, 128, 512, 64), page_size=page_size, dtype=dtype, device=device)
    check_attention(quantized_latents(batch) if is_fp8 else batch, naive_latent_attention)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_heads", "dtype"), [(16, torch.bfloat16), (16, torch.float32), (128, torch.bfloat16)])
@pytest.mark.parametrize(
    "requests", [[(1, 32768)], [(1, 32768), (1, 100)], [(64, 16000)], [(1, 1 + i) for i in range(256)]]
)
def test_long_contexts_and_many_decodes_match_float64(
    device, latent_batch, naive_latent_attention, requests, num_heads, dtype
):
    batch = latent_batch(requests, (num_heads, 128, 128, 512, 64), page_size=64, dtype=dtype, device=device)
    check_attention(batch, naive_latent_attention)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [64, 192])
def test_specialized_kernel_supports_multiples_of_64_heads(device, latent_batch, naive_latent_attention, num_heads):
    requests = [(1, length) for length in (1, 63, 64, 65, 128, 700, 5000)] + [(3, 40), (50, 50)]
    batch = latent_batch(requests, (num_heads, 128, 128, 512, 64), page_size=16, dtype=torch.bfloat16, device=device)
    check_attention(batch, naive_latent_attention)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(
    "requests",
    [[(100, 16384)], [(1, 9000), (1, 3), (5, 2000), (100, 5000), (70, 70)], [(4, 700)] * 40, [(1, 20000), (1, 64)]],
)
def test_chunks_over_long_contexts_match_float64(
    device, latent_batch, quantized_latents, naive_latent_attention, num_heads, page_size, is_fp8, requests
):
    shape = (num_heads, 128, 128, 512, 64)
    batch = latent_batch(requests, shape, page_size=page_size, dtype=torch.bfloat16, device=device)
    check_attention(quantized_latents(batch) if is_fp8 else batch, naive_latent_attention)


@pytest.mark.gpu
@pytest.mark.skipif(not has_flash_attention(), reason="needs the extra flash-attn and a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("requests", [MIXED_REQUESTS, [(1, 1), (700, 700), (2, 2), (300, 300)], [(1, 5), (40, 400)]])
def test_whole_prompts_match_float64_with_flash_attention(
    device, latent_batch, quantized_latents, naive_latent_attention, dtype, is_fp8, requests
):
    batch = latent_batch(requests, (16, 128, 128, 512, 64), page_size=64, dtype=dtype, device=device)
    check_attention(quantized_latents(batch) if is_fp8 else batch, naive_latent_attention, backend="fastest")


def check_non_finite_latents(device, make_batch, shape, dtype, backend):
    """Check that a prompt's results do not change if the latents of the next prompt are not finite."""
    batch = make_batch([(33, 33), (40, 40)], shape, page_size=16, dtype=dtype, device=device)
    expected = attend(batch, backend, num_decodes=0)[:33]
    batch.kv_cache[batch.block_tables[1, :3].long()] = float("nan")
    assert torch.equal(attend(batch, backend, num_decodes=0)[:33], expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # The interpreter computes with NumPy.
def test_non_finite_latents_do_not_change_other_prompts(device, latent_batch):
    check_non_finite_latents(device, latent_batch, (3, 16, 16, 32, 16), torch.float16, "triton")


@pytest.mark.gpu
@pytest.mark.skipif(not has_flash_attention(), reason="needs the extra flash-attn and a Hopper GPU")
def test_non_finite_latents_do_not_change_other_prompts_with_flash_attention(device, latent_batch):
    check_non_finite_latents(device, latent_batch, (16, 128, 128, 512, 64), torch.bfloat16, "fastest")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_only_non_finite_elements_of_gathered_latents_become_zero(device, value):
    kv_cache = torch.randn(2, 16, 1, 24, device=device)
    kv_cache[1, 2, 0, [3, 20]] = value  # One element of a latent, and one of a rotated key part.
    arguments = [torch.tensor(row, dtype=torch.int32, device=device) for row in ([[1]], [5], [0, 5])]
    gathered = OPS.gather_latents(kv_cache, None, *arguments, 5, 16, torch.float32)
    expected = kv_cache[1, :5, 0].clone()
    expected[2, 3] = 0
    torch.testing.assert_close(gathered, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "num_absorbed"), [(1, 1), (300, 200), (8192, 8191), (8192, 0)])
def test_large_head_projections_match_bmm(device, dtype, num_tokens, num_absorbed):
    for depth, columns, is_transposed in ((128, 512, False), (512, 128, True)):
        x = torch.randn(128, num_tokens, depth, device=device).to(dtype).transpose(0, 1)
        shape = (128, columns, depth) if is_transposed else (128, depth, columns)
        weight = torch.randn(shape, device=device).to(dtype) * depth**-0.5
        weight = weight.transpose(1, 2) if is_transposed else weight
        projected = torch.full((num_tokens, 128, columns), 7.0, dtype=dtype, device=device)
        OPS.project_heads(x, weight, torch.tensor([num_absorbed], dtype=torch.int32, device=device), projected)
        expected = torch.bmm(x[:num_absorbed].transpose(0, 1).float(), weight.float()).transpose(0, 1)
        rtol = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
        torch.testing.assert_close(projected[:num_absorbed].float(), expected, rtol=rtol, atol=1e-4)
        assert (projected[num_absorbed:] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 63, 8192])
def test_large_rope_and_cache_matches_reference(device, dtype, num_tokens):
    for is_fp8 in (False, True):
        check_rope_and_cache(num_tokens, 128, (128, 512, 64), dtype, device, is_fp8=is_fp8)
