"""Tests that work lists put each key block of the listed queries into exactly one part."""

import itertools
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm_kernels.attention.plan import flash_requests, tile_configs, work_list
from nanovllm_kernels.attention.plan.work_list import NO_LIMIT, WorkListFilter, make_work_list, split_query_lens

CONFIG = tile_configs.TileConfig(128, 64, 8, 3, 1)
NO_FILTER = WorkListFilter()
ANY_QUERY_LEN = range(1, NO_LIMIT)


class Segment(NamedTuple):
    """The key blocks of one tile that one part computes."""

    part: int
    request: int
    first_query: int
    first_block: int
    end_block: int


def make_lengths(device, requests, num_empty=0):
    """requests: (query_len, seq_len) pairs. Returns (seq_lens, query_start_loc)."""
    query_lens = [query_len for query_len, _ in requests] + [0] * num_empty
    seq_lens = [seq_len for _, seq_len in requests] + [0] * num_empty
    query_starts = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
    return (torch.tensor(values, dtype=torch.int32, device=device) for values in (seq_lens, query_starts))


def plan(
    device,
    requests,
    *,
    block_q,
    num_empty=0,
    query_lens=ANY_QUERY_LEN,
    request_filter=NO_FILTER,
    num_tokens=None,
    num_head_blocks=8,
):
    """Return the work list and the query lengths of excluded requests."""
    num_tokens = sum(query_len for query_len, _ in requests) if num_tokens is None else num_tokens
    return make_work_list(
        *make_lengths(device, requests, num_empty),
        range(query_lens.start, min(query_lens.stop, num_tokens + 1)),
        request_filter,
        CONFIG,
        block_q=block_q,
        num_head_blocks=num_head_blocks,
        num_tokens=num_tokens,
    )


def list_segments(work):
    tile_starts, tiles, parts = work.tile_first_blocks.tolist(), work.tiles.tolist(), work.parts.tolist()
    segments = []
    for part, ((block, tile), (part_end, _)) in enumerate(itertools.pairwise(parts)):
        while block < part_end:
            tile_start, tile_end = tile_starts[tile], tile_starts[tile + 1]
            assert tile_start <= block < tile_end
            end_block = min(part_end, tile_end)
            segments.append(Segment(part, *tiles[tile], block - tile_start, end_block - tile_start))
            block, tile = end_block, tile + 1
    return segments


def count_tile_blocks(requests, block_q):
    return {
        (request, first_query): -(-(seq_len - query_len + min(first_query + block_q, query_len)) // CONFIG.block_n)
        for request, (query_len, seq_len) in enumerate(requests)
        for first_query in range(0, query_len, block_q)
    }


def check_cover(work, num_blocks_by_tile):
    """All parts except the last must have equal sizes."""
    num_covered = dict.fromkeys(num_blocks_by_tile, 0)
    part_sizes = [0] * work.num_parts
    for segment in list_segments(work):
        tile = (segment.request, segment.first_query)
        assert num_covered[tile] == segment.first_block
        num_covered[tile] = segment.end_block
        part_sizes[segment.part] += segment.end_block - segment.first_block
    assert num_covered == num_blocks_by_tile
    used_sizes = [size for size in part_sizes if size]
    assert part_sizes[: len(used_sizes)] == used_sizes
    assert len(set(used_sizes[:-1])) <= 1
    assert not used_sizes or used_sizes[-1] <= used_sizes[0]


REQUESTS = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.integers(0, 3000)),
        st.tuples(st.integers(2, 5), st.integers(0, 3000)),
        st.tuples(st.integers(6, 400), st.sampled_from([0, 0, 63, 64, 1024, 40000])),
        st.just((0, 0)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    REQUESTS,
    st.sampled_from([1, 4, 32, 42]),
    st.sampled_from([ANY_QUERY_LEN, range(1, 5), range(2, NO_LIMIT), range(5, 200)]),
    st.sampled_from(
        [
            NO_FILTER,
            WorkListFilter(min_context=1),
            WorkListFilter(300, 1024),
            WorkListFilter(300, 1024, 2),
            WorkListFilter(min_context=1, max_excluded=0),
        ]
    ),
    st.sampled_from([1, 3, 8]),
)
def test_every_key_block_is_in_exactly_one_part(
    device, queries_and_contexts, block_q, query_lens, request_filter, num_head_blocks
):
    requests = [(query_len, query_len + context) for query_len, context in queries_and_contexts]
    if sum(query_len for query_len, _ in requests) < query_lens.start:
        return
    work, excluded = plan(
        device,
        requests,
        block_q=block_q,
        query_lens=query_lens,
        request_filter=request_filter,
        num_empty=2,
        num_head_blocks=num_head_blocks,
    )

    def is_short(query_len, context):
        return 1 < query_len < request_filter.query_limit and context >= request_filter.min_context

    num_short_queries = sum(query_len for query_len, context in queries_and_contexts if is_short(query_len, context))
    are_short_queries_listed = num_short_queries < request_filter.query_limit
    excluded_query_lens = [
        query_len if query_len > 1 and not (is_short(query_len, context) and are_short_queries_listed) else 0
        for query_len, context in queries_and_contexts
    ]
    for request in [request for request, count in enumerate(excluded_query_lens) if count][
        request_filter.max_excluded :
    ]:
        excluded_query_lens[request] = 0
    assert excluded.tolist() == [*excluded_query_lens, 0, 0]
    listed = [
        (query_len if not excluded_len and query_len in query_lens else 0, seq_len)
        for (query_len, seq_len), excluded_len in zip(requests, excluded_query_lens, strict=True)
    ]
    check_cover(work, count_tile_blocks(listed, block_q))


def test_step_without_listed_requests_has_no_work(device):
    work, excluded = plan(device, [(1, 100), (0, 0), (7, 7)], block_q=4, query_lens=range(8, NO_LIMIT), num_tokens=512)
    assert list_segments(work) == []
    assert excluded.tolist() == [0, 0, 0]


def test_more_tiles_and_requests_than_one_planning_block_are_covered(device, monkeypatch):
    from nanovllm_kernels.attention.plan import triton_work_list

    monkeypatch.setattr(triton_work_list, "PLAN_BLOCK", 16)
    monkeypatch.setattr(tile_configs, "choose_num_parts", lambda *_: 53)
    requests = [(1 + 37 * i % 90, 100 + 211 * i % 1500) for i in range(45)]
    work, _ = plan(device, requests, block_q=4)
    check_cover(work, count_tile_blocks(requests, 4))


def test_more_than_2_to_the_31_blocks_are_counted(device, monkeypatch):
    monkeypatch.setattr(tile_configs, "choose_num_parts", lambda *_: 132)
    work, _ = plan(device, [(100, 1 << 30)] * 2, block_q=1)
    num_blocks = 2 * sum(-(-length // 64) for length in range((1 << 30) - 99, (1 << 30) + 1))
    assert num_blocks > 1 << 31
    assert work.parts[-1].tolist() == [num_blocks, 200]
    part_sizes = work.parts[:, 0].diff()
    assert (part_sizes[:-1] == part_sizes[0]).all()


@pytest.mark.parametrize("num_heads", [2, 8, 16, 32])
@pytest.mark.parametrize("query_len", [16, 100, 512])
def test_one_short_chunk_over_a_long_context_fills_the_device(device, monkeypatch, query_len, num_heads):
    monkeypatch.setattr(work_list, "INTERPRETER_SMS", 132)
    monkeypatch.setattr("nanovllm_kernels.attention.plan.work_list.describe_device", lambda _: CpuDescription)
    work, _ = plan(device, [(query_len, 32768)], block_q=32, num_empty=255, num_tokens=512, num_head_blocks=num_heads)
    check_cover(work, count_tile_blocks([(query_len, 32768)], 32))
    size_by_part = {}
    for segment in list_segments(work):
        size_by_part[segment.part] = size_by_part.get(segment.part, 0) + segment.end_block - segment.first_block
    assert len(size_by_part) * num_heads >= 0.95 * 132
    assert max(size_by_part.values()) * len(size_by_part) < 1.1 * sum(size_by_part.values())


class CpuDescription:
    num_sms = 0


def test_whole_prompts_are_cut_rarely(device, monkeypatch):
    monkeypatch.setattr(work_list, "INTERPRETER_SMS", 132)
    monkeypatch.setattr("nanovllm_kernels.attention.plan.work_list.describe_device", lambda _: CpuDescription)
    requests = [(2047, 2047)] * 4
    work, _ = plan(device, requests, block_q=64, num_empty=28, num_tokens=8192)
    check_cover(work, count_tile_blocks(requests, 64))
    segment_tiles = [(segment.request, segment.first_query) for segment in list_segments(work)]
    num_cuts = len(segment_tiles) - len(set(segment_tiles))
    assert num_cuts < work.num_parts


def test_requests_for_another_kernel_are_gathered_in_order(device, monkeypatch):
    from nanovllm_kernels.attention.plan import triton_flash_requests

    monkeypatch.setattr(triton_flash_requests, "REQUEST_BLOCK", 16)
    monkeypatch.setattr(triton_flash_requests, "PAGE_BLOCK", 8)
    query_lens = torch.zeros(40, dtype=torch.int32, device=device)
    chosen = [3, 15, 16, 39]
    query_lens[chosen] = torch.tensor([5, 2, 700, 9], dtype=torch.int32, device=device)
    seq_lens = torch.arange(40, dtype=torch.int32, device=device) * 10
    query_starts = torch.arange(41, dtype=torch.int32, device=device) * 3
    tables = torch.arange(40 * 30, dtype=torch.int32, device=device).view(40, 30)[:, :27]
    gathered = flash_requests.gather_flash_requests(query_lens, seq_lens, query_starts, tables, 16)
    assert gathered.query_lens.tolist() == [5, 2, 700, 9] + [0] * 28
    assert gathered.query_starts.tolist()[:4] == [9, 45, 48, 117]
    assert gathered.seq_lens.tolist() == [30, 150, 160, 390] + [0] * 28
    for entry, request in enumerate(chosen):
        num_pages = -(-10 * request // 16)
        assert gathered.block_tables[entry, :num_pages].tolist() == tables[request, :num_pages].tolist()


def test_query_lengths_are_split_between_narrow_and_wide_tiles():
    # Narrow tiles take decodes and requests of few queries. Wide tiles take chunks.
    assert split_query_lens(4, 32, 1, 512) == (range(1, 5), range(5, 513))
    # One launch takes all other requests if another kernel takes the decodes.
    assert split_query_lens(4, 32, 2, 512) == (range(0), range(2, 513))
    # All requests use narrow tiles in steps without chunks.
    assert split_query_lens(4, 32, 1, 4) == (range(1, 5), range(0))
    assert split_query_lens(4, 32, 1, 1) == (range(1, 2), range(0))
    # One launch takes all requests if narrow and wide tiles have the same size.
    assert split_query_lens(1, 1, 1, 512) == (range(0), range(1, 513))
    for min_len in (1, 2):
        for max_len in (1, 3, 4, 5, 700):
            narrow, wide = split_query_lens(4, 32, min_len, max_len)
            assert sorted([*narrow, *wide]) == list(range(min_len, max(max_len, 4 * (len(wide) > 0)) + 1))


def test_work_list_query_limit_is_inverse_to_number_of_heads():
    assert flash_requests.work_list_filter(32, 132) == WorkListFilter(184, 1024, flash_requests.MAX_FLASH_REQUESTS)
    assert flash_requests.work_list_filter(16, 132) == WorkListFilter(369, 1024, flash_requests.MAX_FLASH_REQUESTS)
