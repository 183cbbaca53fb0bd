from dataclasses import replace

import pytest
import torch
from attention_checks import MIXED_REQUESTS, TOLERANCE, attend, check_attention
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted_samples import sample_product

from nanovllm_kernels.attention import paged_attention, plan_batch
from nanovllm_kernels.attention.plan import tile_configs
from nanovllm_kernels.platform import has_cute, has_flash_attention


@pytest.mark.parametrize(
    ("shape", "dtype"),
    sample_product([(64, 16), (80, 32), (96, 64), (128, 16), (256, 64)], [torch.float32, torch.float16]),
)
def test_mixed_batch_matches_float64(device, paged_batch, naive_attention, shape, dtype):
    head_dim, page_size = shape
    batch = paged_batch(
        MIXED_REQUESTS, num_heads=6, num_kv_heads=2, head_dim=head_dim, page_size=page_size, dtype=dtype, device=device
    )
    check_attention(batch, naive_attention)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    sample_product([(64, 16), (80, 32), (128, 16), (256, 64)], [torch.float32, torch.float16]),
)
def test_fp8_cache_matches_float64(device, paged_batch, quantized, naive_attention, shape, dtype):
    head_dim, page_size = shape
    batch = paged_batch(
        MIXED_REQUESTS, num_heads=6, num_kv_heads=2, head_dim=head_dim, page_size=page_size, dtype=dtype, device=device
    )
    check_attention(quantized(batch), naive_attention)


def test_fp8_cache_in_many_parts_is_merged(device, paged_batch, quantized, naive_attention, monkeypatch):
    monkeypatch.setattr(tile_configs, "choose_num_parts", lambda *_: 7)
    monkeypatch.setattr(tile_configs, "MIN_PART_TOKENS", 32)
    batch = paged_batch(
        [(1, 400), (1, 3), (7, 150), (2, 2)],
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        dtype=torch.float32,
        device=device,
    )
    check_attention(quantized(batch), naive_attention)


@pytest.mark.parametrize("query_factor", [1e-20, 1e4, 1e8])
def test_fp8_cache_supports_queries_of_any_magnitude(device, paged_batch, quantized, naive_attention, query_factor):
    batch = paged_batch(
        MIXED_REQUESTS, num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16, device=device
    )
    check_attention(
        quantized(replace(batch, q=batch.q * query_factor, scale=batch.scale / query_factor)), naive_attention
    )


# (query_len, context) pairs.
MIXES = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.integers(0, 300)),
        st.tuples(st.integers(2, 5), st.integers(0, 300)),
        st.tuples(st.integers(6, 40), st.integers(200, 600)),
        st.tuples(st.integers(6, 90), st.just(0)),
        st.just((0, 0)),
    ),
    min_size=1,
    max_size=5,
).filter(lambda requests: any(count for count, _ in requests))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(MIXES, st.sampled_from([(4, 4), (4, 1), (6, 2), (20, 1)]), st.booleans(), st.sampled_from([1, 4, 13]))
def test_any_mix_of_requests_in_any_order_matches_float64(
    device, paged_batch, quantized, naive_attention, requests, heads, is_fp8, num_parts
):
    num_heads, num_kv_heads = heads
    batch = paged_batch(
        [(count, count + context) for count, context in requests],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        page_size=16,
        dtype=torch.float16,
        device=device,
    )
    batch = quantized(batch) if is_fp8 else batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_configs, "choose_num_parts", lambda *_: num_parts)
        patch.setattr(tile_configs, "MIN_PART_TOKENS", 32)
        out = attend(batch, knows_decodes=False)
    torch.testing.assert_close(out.double(), naive_attention(batch), atol=TOLERANCE[out.dtype], rtol=0)


@pytest.mark.parametrize("count", [2, 4, 5])
def test_steps_that_verify_draft_tokens_match_float64(device, paged_batch, naive_attention, count):
    requests = [(count, 40), (1, 300), (count, count), (0, 0), (count - 1, 130)]
    batch = paged_batch(
        requests, num_heads=8, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.float32, device=device
    )
    out = attend(batch, knows_decodes=False)
    torch.testing.assert_close(out.double(), naive_attention(batch), atol=TOLERANCE[out.dtype], rtol=0)


def test_unused_entries_and_padding_tokens_do_not_change_results(device, paged_batch, naive_attention):
    batch = paged_batch(
        [(1, 70), (20, 90)], num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.float32, device=device
    )
    batch_plan = plan_batch(
        torch.nn.functional.pad(batch.block_tables, (0, 0, 0, 30)),
        torch.nn.functional.pad(batch.seq_lens, (0, 30)),
        torch.nn.functional.pad(batch.query_start_loc, (0, 30), value=21),
        num_decodes=None,
        max_query_len=64,
        max_seq_len=4096,
        num_heads=4,
        kv_cache=batch.kv_cache,
        backend="triton",
        num_tokens=64,
    )
    padded = torch.nn.functional.pad(batch.q, (0, 0, 0, 0, 0, 43), value=float("nan"))
    out = paged_attention(padded, batch.kv_cache, batch_plan, scale=batch.scale)
    torch.testing.assert_close(out[:21].double(), naive_attention(batch), atol=2e-5, rtol=0)


def test_queries_of_unplanned_element_size_are_rejected(device, paged_batch, quantized):
    batch = paged_batch(
        [(1, 4)], num_heads=1, num_kv_heads=1, head_dim=64, page_size=16, dtype=torch.float32, device=device
    )
    batch = quantized(batch)
    batch_plan = plan_batch(
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        num_decodes=1,
        max_query_len=1,
        max_seq_len=4,
        num_heads=1,
        kv_cache=batch.kv_cache,
        backend="triton",
    )
    with pytest.raises(ValueError, match=r"dtype=torch\.float32"):
        paged_attention(batch.q, batch.kv_cache, batch_plan, scale=batch.scale, kv_scales=batch.kv_scales)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (8, 1), (20, 1), (4, 4)])
def test_query_head_groups_of_any_size_match_float64(device, paged_batch, naive_attention, num_heads, num_kv_heads):
    batch = paged_batch(
        [(1, 30), (1, 5), (19, 40)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        page_size=16,
        dtype=torch.float32,
        device=device,
    )
    check_attention(batch, naive_attention)


@pytest.mark.parametrize(
    ("requests", "num_parts"),
    sample_product(
        [[(1, 9), (7, 150), (2, 2)], [(1, 700), (1, 3), (1, 129)], [(40, 130), (3, 290)]],
        [1, 3, 40],
    ),
)
def test_parts_are_merged(device, paged_batch, naive_attention, monkeypatch, num_parts, requests):
    monkeypatch.setattr(tile_configs, "choose_num_parts", lambda *_: num_parts)
    monkeypatch.setattr(tile_configs, "MIN_PART_TOKENS", 32)
    batch = paged_batch(
        requests, num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.float32, device=device
    )
    check_attention(batch, naive_attention)


def test_queries_may_be_strided_views(device, paged_batch, naive_attention):
    batch = paged_batch(
        MIXED_REQUESTS, num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.float32, device=device
    )
    wide = torch.full((batch.q.shape[0], 7, 64), float("nan"), device=device)
    wide[:, 2:6] = batch.q
    check_attention(replace(batch, q=wide[:, 2:6]), naive_attention)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_heads_below_16_match_float64(device, paged_batch, quantized, naive_attention, monkeypatch, is_fp8):
    if device == "cpu":
        from triton.runtime.interpreter import interpreter_builder

        # Triton's compiler rejects products with fewer than 16 terms per sum. The interpreter accepts any number.
        monkeypatch.setitem(interpreter_builder.codegen_fns, "min_dot_size", lambda *_: (1, 1, 16))
    batch = paged_batch(
        MIXED_REQUESTS, num_heads=4, num_kv_heads=2, head_dim=8, page_size=16, dtype=torch.float32, device=device
    )
    check_attention(quantized(batch) if is_fp8 else batch, naive_attention)


def test_heads_larger_than_256_are_rejected(device, paged_batch):
    batch = paged_batch(
        [(1, 4)], num_heads=1, num_kv_heads=1, head_dim=288, page_size=16, dtype=torch.float32, device=device
    )
    with pytest.raises(ValueError, match="288"):
        attend(batch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (32, 8), (16, 1), (4, 4)])
def test_all_shapes_match_float64(
    device, paged_batch, naive_attention, dtype, head_dim, page_size, num_heads, num_kv_heads
):
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
    check_attention(batch, naive_attention)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (32, 8), (16, 1), (4, 4)])
def test_all_shapes_of_fp8_cache_match_float64(
    device, paged_batch, quantized, naive_attention, dtype, head_dim, page_size, num_heads, num_kv_heads
):
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
    check_attention(quantized(batch), naive_attention)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("requests", [[(1, 32768)], [(1, 32768), (1, 100)], [(64, 16000)], [(1, 20000), (300, 5000)]])
def test_long_contexts_match_float64(device, paged_batch, naive_attention, requests, dtype):
    batch = paged_batch(requests, num_heads=8, num_kv_heads=2, head_dim=128, page_size=16, dtype=dtype, device=device)
    check_attention(batch, naive_attention)


@pytest.mark.gpu
def test_many_decodes_match_float64(device, paged_batch, naive_attention):
    requests = [(1, 1 + 37 * i % 700) for i in range(256)]
    batch = paged_batch(
        requests, num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16, device=device
    )
    check_attention(batch, naive_attention)


BACKEND_MIXES = [
    [(1, 1), (1, 1000), (130, 130), (64, 1000), (513, 600)],
    [(70, 70), (2, 300)],
    [(1, 50), (1, 7)],
    [(1, 9), (6, 70), (16, 1000), (2, 2)],
]


@pytest.mark.gpu
@pytest.mark.skipif(not (has_flash_attention() and has_cute()), reason="needs both extras and a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("backend", ["flash", "cutedsl", "fastest"])
def test_backends_match_float64(device, paged_batch, naive_attention, dtype, head_dim, page_size, backend):
    for requests in BACKEND_MIXES:
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
            # FlashAttention multiplies unfilled values by 0, and NaN * 0 is NaN.
            batch.kv_cache.nan_to_num_()
        expected = naive_attention(batch)
        for knows_decodes in (True, False):
            out = attend(batch, knows_decodes=knows_decodes, backend=backend)
            torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not has_cute(), reason="needs the extra cutedsl and a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_fastest_backend_supports_fp8_cache(device, paged_batch, quantized, naive_attention, dtype, head_dim):
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
    for knows_decodes in (True, False):
        out = attend(batch, knows_decodes=knows_decodes, backend="fastest")
        torch.testing.assert_close(out.double(), naive_attention(batch), atol=TOLERANCE[dtype], rtol=0)


# The limits of `work_list_filter` are 184 queries and 1,024 tokens of context (32 heads, 132 SMs).
SPLIT_MIXES = [
    [(1, 300), (16, 2000), (100, 9000), (300, 1500), (700, 700), (600, 3000), (2, 5)],
    [(100, 32868)],
    [(1, 300), (183, 1207), (184, 1208)],
    [(100, 9000), (84, 3000), (5, 20)],
    [(100, 9000), (83, 3000), (5, 20)],
    [(1, 1), (2, 1025), (2, 1026), (2, 1027), (1500, 1500)],
]


@pytest.mark.gpu
@pytest.mark.skipif(not has_flash_attention(), reason="needs the extra flash-attn and a Hopper GPU")
@pytest.mark.parametrize("requests", SPLIT_MIXES)
@pytest.mark.parametrize("backend", ["flash", "fastest"])
@pytest.mark.parametrize("knows_decodes", [False, True])
def test_chunks_around_the_work_list_limits_match_float64(
    device, paged_batch, naive_attention, requests, backend, knows_decodes
):
    batch = paged_batch(
        requests, num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16, device=device
    )
    batch.kv_cache.nan_to_num_()
    out = attend(batch, knows_decodes=knows_decodes, backend=backend)
    torch.testing.assert_close(out.double(), naive_attention(batch), atol=2e-2, rtol=0)
    triton_out = attend(batch, knows_decodes=knows_decodes)
    torch.testing.assert_close(out.float(), triton_out.float(), atol=2e-2, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not has_flash_attention(), reason="needs the extra flash-attn and a Hopper GPU")
@pytest.mark.parametrize("knows_decodes", [False, True])
def test_many_short_prompts_beside_a_chunk_match_float64(device, paged_batch, naive_attention, knows_decodes):
    requests = [(1, 70), *[(20 + 3 * index, 20 + 3 * index) for index in range(40)], (600, 700)]
    batch = paged_batch(
        requests, num_heads=8, num_kv_heads=2, head_dim=128, page_size=16, dtype=torch.bfloat16, device=device
    )
    batch.kv_cache.nan_to_num_()
    out = attend(batch, knows_decodes=knows_decodes, backend="fastest")
    torch.testing.assert_close(out.double(), naive_attention(batch), atol=2e-2, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not has_flash_attention(), reason="needs the extra flash-attn and a Hopper GPU")
@pytest.mark.parametrize("backend", ["flash", "fastest"])
@pytest.mark.parametrize("knows_decodes", [False, True])
@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (8, 1)])
def test_whole_prompts_read_the_steps_own_keys_and_values(
    device, paged_batch, naive_attention, backend, knows_decodes, heads
):
    requests = [(1, 300), (1, 1), (2, 2), (700, 700), (33, 33), (0, 0), (130, 130)]
    num_heads, num_kv_heads = heads
    batch = paged_batch(
        requests,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        page_size=16,
        dtype=torch.bfloat16,
        device=device,
    )
    batch.kv_cache.nan_to_num_()
    batch_plan = plan_batch(
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        num_decodes=batch.num_decodes if knows_decodes else None,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        num_heads=num_heads,
        kv_cache=batch.kv_cache,
        backend=backend,
        has_only_whole_prompts=True,
    )
    assert batch_plan.reads_step_keys
    query_start_loc, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    qkv = torch.zeros(len(batch.q), num_heads + 2 * num_kv_heads, 128, dtype=torch.bfloat16, device=device)
    qkv[:, :num_heads] = batch.q
    for request, length in enumerate(lengths):
        positions = torch.arange(
            length - (query_start_loc[request + 1] - query_start_loc[request]), length, device=device
        )
        pages = batch.block_tables[request].long()[positions // 16]
        qkv[query_start_loc[request] : query_start_loc[request + 1], num_heads:] = batch.kv_cache[pages, positions % 16]
    # Prompts must not read the cache, so overwrite their pages.
    for request, length in enumerate(lengths):
        if query_start_loc[request + 1] - query_start_loc[request] > 1:
            batch.kv_cache[batch.block_tables[request, : -(-length // 16)].long()] = 1e4
    expected = naive_attention(
        replace(batch, kv_cache=replace_step_keys_values(batch, qkv[:, num_heads:], query_start_loc, lengths))
    )
    out = paged_attention(
        qkv[:, :num_heads], batch.kv_cache, batch_plan, scale=batch.scale, step_keys_values=qkv[:, num_heads:]
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=0)


def replace_step_keys_values(batch, keys_values, query_start_loc, lengths):
    kv_cache = batch.kv_cache.clone()
    for request, length in enumerate(lengths):
        count = query_start_loc[request + 1] - query_start_loc[request]
        positions = torch.arange(length - count, length, device=kv_cache.device)
        pages = batch.block_tables[request].long()[positions // 16]
        kv_cache[pages, positions % 16] = keys_values[query_start_loc[request] : query_start_loc[request + 1]]
    return kv_cache


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "fastest"])
def test_one_captured_graph_serves_any_lengths(device, paged_batch, naive_attention, backend):
    num_entries, num_tokens, width = 16, 640, 2400
    mixes = [
        *SPLIT_MIXES[1:2],
        [(1, 700), (5, 50), (0, 0), (600, 600)],
        [(1, 40)] * 16,
        [(1, 9), (33, 20000), (512, 900)],
    ]
    batches = [
        paged_batch(mix, num_heads=8, num_kv_heads=2, head_dim=128, page_size=16, dtype=torch.bfloat16, device=device)
        for mix in mixes
    ]
    num_blocks = max(batch.kv_cache.shape[0] for batch in batches)
    kv_cache = torch.zeros(num_blocks, *batches[0].kv_cache.shape[1:], dtype=torch.bfloat16, device=device)
    q = torch.zeros(num_tokens, 8, 128, dtype=torch.bfloat16, device=device)
    tables = torch.zeros(num_entries, width, dtype=torch.int32, device=device)
    seq_lens = torch.zeros(num_entries, dtype=torch.int32, device=device)
    query_start_loc = torch.zeros(num_entries + 1, dtype=torch.int32, device=device)

    def attend():
        batch_plan = plan_batch(
            tables,
            seq_lens,
            query_start_loc,
            num_decodes=None,
            max_query_len=num_tokens,
            max_seq_len=width * 16,
            num_heads=8,
            kv_cache=kv_cache,
            backend=backend,
            num_tokens=num_tokens,
        )
        return paged_attention(q, kv_cache, batch_plan, scale=batches[0].scale)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for batch in batches:
        count, num_reqs = batch.q.shape[0], len(batch.seq_lens)
        kv_cache[: batch.kv_cache.shape[0]] = batch.kv_cache.nan_to_num()
        q[:count] = batch.q
        tables[:num_reqs, : batch.block_tables.shape[1]] = batch.block_tables
        seq_lens.zero_()[:num_reqs] = batch.seq_lens
        query_start_loc.fill_(count)[: num_reqs + 1] = batch.query_start_loc
        graph.replay()
        torch.testing.assert_close(out[:count].double(), naive_attention(batch), atol=2e-2, rtol=0)
