"""The attention kernel against a loop in float64, over a cache in which every unowned slot is NaN."""

from dataclasses import replace

import pytest
import torch

from nanovllm_kernels.attention import paged_attention, plan_batch, tiles
from nanovllm_kernels.platform import has_cute, has_flash_attention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MIXED = [(1, 1), (1, 37), (1, 64), (5, 5), (1, 20), (20, 70), (33, 33)]


def run(batch, *, blindly=False, backend="triton"):
    planned = plan_batch(
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        num_decodes=None if blindly else batch.num_decodes,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        num_heads=batch.q.shape[1],
        kv_cache=batch.kv_cache,
        backend=backend,
        dtype=batch.q.dtype,
    )
    return paged_attention(batch.q, batch.kv_cache, planned, scale=batch.scale, kv_scales=batch.kv_scales)


def check(batch, naive_attention):
    expected = naive_attention(batch)
    for blindly in (False, True):
        out = run(batch, blindly=blindly)
        assert out.dtype == batch.q.dtype
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[out.dtype], rtol=0)


@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (80, 32), (96, 64), (128, 16), (256, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mixed_batch(device, paged_batch, naive_attention, head_dim, page_size, dtype):
    batch = paged_batch(
        MIXED, num_heads=6, num_kv_heads=2, head_dim=head_dim, page_size=page_size, dtype=dtype, device=device
    )
    check(batch, naive_attention)


@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (80, 32), (128, 16), (256, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fp8_cache(device, paged_batch, quantized, naive_attention, head_dim, page_size, dtype):
    batch = paged_batch(
        MIXED, num_heads=6, num_kv_heads=2, head_dim=head_dim, page_size=page_size, dtype=dtype, device=device
    )
    check(quantized(batch), naive_attention)


def test_fp8_cache_in_splits_and_units(device, paged_batch, quantized, naive_attention, monkeypatch):
    monkeypatch.setattr(tiles, "choose_splits", lambda *_: 3)
    monkeypatch.setattr(tiles, "choose_units", lambda *_: 5)
    monkeypatch.setattr(tiles, "MIN_UNIT_TOKENS", 32)
    batch = paged_batch(
        [(1, 400), (1, 3), (7, 150), (2, 2)],
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        dtype=torch.float32,
        device=device,
    )
    check(quantized(batch), naive_attention)


@pytest.mark.parametrize("size", [1e-20, 1e4, 1e8])
def test_fp8_cache_under_queries_of_any_size(device, paged_batch, quantized, naive_attention, size):
    batch = paged_batch(
        MIXED, num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16, device=device
    )
    check(quantized(replace(batch, q=batch.q * size, scale=batch.scale / size)), naive_attention)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (8, 1), (20, 1), (4, 4)])
def test_groups(device, paged_batch, naive_attention, num_heads, num_kv_heads):
    batch = paged_batch(
        [(1, 30), (1, 5), (19, 40)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        page_size=16,
        dtype=torch.float32,
        device=device,
    )
    check(batch, naive_attention)


@pytest.mark.parametrize("num_splits", [2, 5, 8])
def test_splits_of_prefills(device, paged_batch, naive_attention, monkeypatch, num_splits):
    monkeypatch.setattr(tiles, "choose_splits", lambda *_: num_splits)
    batch = paged_batch(
        [(1, 9), (7, 150), (2, 2)],
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        dtype=torch.float32,
        device=device,
    )
    check(batch, naive_attention)


@pytest.mark.parametrize("num_units", [1, 3, 40])
def test_units_of_decodes(device, paged_batch, naive_attention, monkeypatch, num_units):
    monkeypatch.setattr(tiles, "choose_units", lambda *_: num_units)
    monkeypatch.setattr(tiles, "MIN_UNIT_TOKENS", 32)
    batch = paged_batch(
        [(1, 700), (1, 3), (1, 129)],
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        dtype=torch.float32,
        device=device,
    )
    check(batch, naive_attention)


def test_units_share_the_tokens_of_all_decodes(device):
    seq_lens = torch.tensor([1000, 0, 130, 5000, 1], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1, 1, 2, 9, 10], dtype=torch.int32, device=device)
    first, owners, unit_len = torch.ops.nanovllm.plan_units(seq_lens, starts, 4, 128)
    # Of 1131 tokens; the request of 5000 has eight queries, and the second none.
    assert unit_len.tolist() == [384]
    assert first.tolist() == [0, 3, 3, 4, 4, 5]
    assert owners.tolist() == [0, 0, 0, 2, 4, -1, -1, -1, -1]


def test_queries_that_are_views(device, paged_batch, naive_attention):
    batch = paged_batch(
        MIXED, num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.float32, device=device
    )
    wide = torch.full((batch.q.shape[0], 7, 64), float("nan"), device=device)
    wide[:, 2:6] = batch.q
    check(replace(batch, q=wide[:, 2:6]), naive_attention)


def test_splits_follow_from_what_the_host_knows():
    assert tiles.choose_splits(1000, 32768, 264) == 1
    assert tiles.choose_splits(300, 32768, 264) == 2
    assert tiles.choose_splits(8, 512, 264) == 2
    assert tiles.choose_splits(8, 32768, 264) == 64
    assert tiles.choose_splits(64, 32768, 264) == 9
    assert tiles.choose_splits(8, 1, 264) == 1


def test_heads_beyond_256_are_refused(device, paged_batch):
    batch = paged_batch(
        [(1, 4)], num_heads=1, num_kv_heads=1, head_dim=288, page_size=16, dtype=torch.float32, device=device
    )
    with pytest.raises(ValueError, match="288"):
        run(batch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (32, 8), (16, 1), (4, 4)])
def test_grid(device, paged_batch, naive_attention, dtype, head_dim, page_size, num_heads, num_kv_heads):
    requests = [(1, 1), (1, 1000), (1, 64), (1, 2049), (130, 130), (64, 1000), (1, 77), (513, 600)]
    batch = paged_batch(
        requests,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        device=device,
    )
    check(batch, naive_attention)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (32, 8), (16, 1), (4, 4)])
def test_fp8_grid(device, paged_batch, quantized, naive_attention, dtype, head_dim, page_size, num_heads, num_kv_heads):
    requests = [(1, 1), (1, 1000), (1, 64), (1, 2049), (130, 130), (64, 1000), (1, 77), (513, 600)]
    batch = paged_batch(
        requests,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        device=device,
    )
    check(quantized(batch), naive_attention)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("requests", [[(1, 32768)], [(1, 32768), (1, 100)], [(64, 16000)], [(1, 20000), (300, 5000)]])
def test_long_contexts(device, paged_batch, naive_attention, requests, dtype):
    batch = paged_batch(requests, num_heads=8, num_kv_heads=2, head_dim=128, page_size=16, dtype=dtype, device=device)
    check(batch, naive_attention)


@pytest.mark.gpu
def test_many_decodes(device, paged_batch, naive_attention):
    requests = [(1, 1 + 37 * i % 700) for i in range(256)]
    batch = paged_batch(
        requests, num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16, device=device
    )
    check(batch, naive_attention)


@pytest.mark.gpu
@pytest.mark.skipif(not (has_flash_attention() and has_cute()), reason="needs both extras and a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("backend", ["flash", "cutedsl", "fastest"])
def test_backends(device, paged_batch, naive_attention, dtype, head_dim, page_size, backend):
    for requests in ([(1, 1), (1, 1000), (130, 130), (64, 1000), (513, 600)], [(70, 70), (2, 300)], [(1, 50), (1, 7)]):
        batch = paged_batch(
            requests,
            num_heads=8,
            num_kv_heads=2,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            device=device,
        )
        if backend != "cutedsl":
            # Unlike our kernels FlashAttention reads what lies behind a request's last token, and weighs it with 0.
            batch.kv_cache.nan_to_num_()
        expected = naive_attention(batch)
        for blindly in (False, True):
            out = run(batch, blindly=blindly, backend=backend)
            torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not has_cute(), reason="needs the extra cutedsl and a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_fp8_cache_by_the_fastest(device, paged_batch, quantized, naive_attention, dtype, head_dim):
    batch = paged_batch(
        [(1, 1), (1, 1000), (130, 130), (64, 1000), (513, 600)],
        num_heads=8,
        num_kv_heads=2,
        head_dim=head_dim,
        page_size=16,
        dtype=dtype,
        device=device,
    )
    batch = quantized(batch)
    for blindly in (False, True):
        out = run(batch, blindly=blindly, backend="fastest")
        torch.testing.assert_close(out.double(), naive_attention(batch), atol=TOLERANCE[dtype], rtol=0)
