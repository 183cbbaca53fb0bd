"""Tests the CuTe DSL decode kernel on a GPU against a float64 loop."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from nanovllm_kernels.platform import has_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the extra cutedsl"),
    pytest.mark.skipif(not has_cuda() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"),
]

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
EDGE_LENGTHS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 500, 1000, 2049, 3]


def make_decodes(paged_batch, lengths, num_heads, num_kv_heads, head_dim, page_size, dtype=torch.bfloat16):
    """Block tables contain invalid pages past the end of a request. The kernel must not read these pages."""
    batch = paged_batch(
        [(1, length) for length in lengths],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        device="cuda",
    )
    page_counts = (batch.seq_lens + page_size - 1) // page_size
    is_past_end = torch.arange(batch.block_tables.shape[1], device="cuda") >= page_counts[:, None]
    return replace(batch, block_tables=batch.block_tables.masked_fill(is_past_end, 1 << 26))


def replace_lengths(batch, lengths):
    return replace(batch, seq_lens=torch.tensor(lengths, dtype=torch.int32, device="cuda"))


def allocate_workspace_for(batch):
    from nanovllm_kernels.attention.gqa.cute_decode import allocate_workspace

    num_reqs, num_heads, head_dim = batch.q.shape
    return allocate_workspace(num_reqs, num_heads, batch.kv_cache.shape[2] // 2, head_dim, batch.q.device)


def check_tiles(batch, naive_attention):
    from nanovllm_kernels.attention.gqa.cute_decode import (
        allocate_workspace,
        max_tile_queries,
        paged_decode,
        plan_tiles,
    )

    num_heads, head_dim = batch.q.shape[1:]
    num_kv_heads = batch.kv_cache.shape[2] // 2
    tile_queries = max_tile_queries(num_heads // num_kv_heads, batch.kv_cache.dtype)
    tiles = plan_tiles(batch.seq_lens, batch.query_start_loc, batch.max_query_len, tile_queries)
    sizes = (num_heads, num_kv_heads, head_dim, batch.q.device)
    workspace = allocate_workspace(len(tiles.visible_lens), *sizes, tile_queries=tile_queries)
    expected = naive_attention(batch)
    # The second run uses the counters that the first run left.
    for _ in range(2):
        out = torch.full(batch.q.shape, torch.nan, dtype=batch.q.dtype, device="cuda")
        paged_decode(
            *(batch.q, batch.kv_cache, batch.kv_scales, batch.block_tables, tiles.visible_lens),
            *(batch.scale, workspace, out),
            tiles=tiles.queries,
        )
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[out.dtype], rtol=0)
    assert not workspace.counters.any()


# (query_len, seq_len)
DRAFTS = [(1, 1), (1, 16), (0, 40), (6, 6), (2, 17), (5, 18), (16, 33), (3, 64), (6, 66), (4, 131), (7, 500), (6, 2049)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (9, 3), (32, 8), (14, 2), (16, 1)])
def test_tiles_of_several_queries_match_float64(
    paged_batch, quantized, naive_attention, dtype, head_dim, page_size, num_heads, num_kv_heads
):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": page_size}
    batch = paged_batch(DRAFTS, dtype=dtype, device="cuda", **sizes)
    check_tiles(batch, naive_attention)
    if head_dim > 64 and num_heads // num_kv_heads <= 8:
        check_tiles(quantized(batch), naive_attention)


@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_tiles_in_many_parts_are_merged(paged_batch, naive_attention, num_kv_heads):
    sizes = {"num_heads": 4 * num_kv_heads, "num_kv_heads": num_kv_heads, "head_dim": 128, "page_size": 16}
    batch = paged_batch([(6, 32768), (1, 5), (3, 9000)], dtype=torch.bfloat16, device="cuda", **sizes)
    check_tiles(batch, naive_attention)


def decode(batch, workspace, out):
    from nanovllm_kernels.attention.gqa.cute_decode import paged_decode

    paged_decode(
        batch.q, batch.kv_cache, batch.kv_scales, batch.block_tables, batch.seq_lens, batch.scale, workspace, out
    )


def check_decode(batch, naive_attention):
    workspace, expected = allocate_workspace_for(batch), naive_attention(batch)
    for _ in range(2):
        out = torch.full(batch.q.shape, torch.nan, dtype=batch.q.dtype, device="cuda")
        decode(batch, workspace, out)
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[out.dtype], rtol=0)
        assert not out[batch.seq_lens == 0].any()
    assert not workspace.counters.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (9, 3), (32, 8), (14, 2), (16, 1)])
def test_all_shapes_match_float64(paged_batch, naive_attention, dtype, head_dim, page_size, num_heads, num_kv_heads):
    batch = make_decodes(paged_batch, EDGE_LENGTHS, num_heads, num_kv_heads, head_dim, page_size, dtype)
    check_decode(batch, naive_attention)
    check_decode(replace_lengths(batch, [0, *EDGE_LENGTHS[1:4], 0, 0, *EDGE_LENGTHS[6:-1], 0]), naive_attention)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (9, 3), (32, 8), (16, 2)])
def test_fp8_cache_matches_float64(
    paged_batch, quantized, naive_attention, dtype, head_dim, page_size, num_heads, num_kv_heads
):
    batch = quantized(make_decodes(paged_batch, EDGE_LENGTHS, num_heads, num_kv_heads, head_dim, page_size, dtype))
    check_decode(batch, naive_attention)
    check_decode(replace_lengths(batch, [0, *EDGE_LENGTHS[1:4], 0, 0, *EDGE_LENGTHS[6:-1], 0]), naive_attention)


@pytest.mark.parametrize("magnitude", [1e-20, 1e8])
def test_fp8_cache_supports_queries_of_any_magnitude(paged_batch, quantized, naive_attention, magnitude):
    batch = quantized(make_decodes(paged_batch, EDGE_LENGTHS, 8, 2, 128, 16))
    check_decode(replace(batch, q=batch.q * magnitude, scale=batch.scale / magnitude), naive_attention)


@pytest.mark.parametrize("num_reqs", [1, 2, 33, 300])
@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_batches_of_any_size_match_float64(paged_batch, naive_attention, num_reqs, num_kv_heads):
    lengths = [1 + 37 * i % 700 for i in range(num_reqs)]
    batch = make_decodes(paged_batch, lengths, 4 * num_kv_heads, num_kv_heads, 128, 16)
    check_decode(batch, naive_attention)
    check_decode(replace_lengths(batch, [length * (i % 3 > 0) for i, length in enumerate(lengths)]), naive_attention)


@pytest.mark.parametrize("lengths", [[32768], [20000, 1, 9000], [5000, 7, 40000, 300, 33]])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_requests_in_many_parts_are_merged(paged_batch, quantized, naive_attention, lengths, num_kv_heads):
    check_decode(make_decodes(paged_batch, lengths, 2 * num_kv_heads, num_kv_heads, 64, 32), naive_attention)
    check_decode(
        quantized(make_decodes(paged_batch, lengths, 2 * num_kv_heads, num_kv_heads, 128, 32)), naive_attention
    )


def test_more_heads_than_sms_match_float64(paged_batch, naive_attention):
    check_decode(make_decodes(paged_batch, [300, 1, 77], 320, 160, 64, 32), naive_attention)


def test_queries_may_be_strided_views(paged_batch, naive_attention):
    batch = make_decodes(paged_batch, EDGE_LENGTHS, 8, 2, 128, 16)
    wide_rows = torch.full((len(EDGE_LENGTHS), 13, 128), torch.nan, dtype=batch.q.dtype, device="cuda")
    wide_rows[:, 2:10] = batch.q
    check_decode(replace(batch, q=wide_rows[:, 2:10]), naive_attention)


def test_one_graph_serves_any_lengths(paged_batch, naive_attention):
    batch = make_decodes(paged_batch, [1500] * 64, 32, 8, 128, 16)
    workspace, out = allocate_workspace_for(batch), torch.empty_like(batch.q)
    decode(batch, workspace, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(batch, workspace, out)
    for factor in (0, 53, 54):
        lengths = [i * factor % 1500 for i in range(64)]
        batch.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(out.double(), naive_attention(batch), atol=2e-2, rtol=0)
