"""Tests that work lists put every key block of every listed query into exactly one part, and cut equal parts."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm_kernels.attention import flash_prefill, tiles
from nanovllm_kernels.attention.work_list import NO_LIMIT, Rule, make_work_list, query_classes

CONFIG = tiles.TileConfig(128, 64, 8, 3, 1)
NO_RULE = Rule()


def lengths(device, requests, places=0):
    """Return (seq_lens, query_start_loc) of (queries, length) pairs, followed by empty places."""
    counts = [count for count, _ in requests] + [0] * places
    seq_lens = [length for _, length in requests] + [0] * places
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    return (torch.tensor(values, dtype=torch.int32, device=device) for values in (seq_lens, starts))


def plan(device, requests, *, block_q, places=0, classes=range(1, NO_LIMIT), rule=NO_RULE, num_tokens=None, heads=8):
    num_tokens = sum(count for count, _ in requests) if num_tokens is None else num_tokens
    queries = range(classes.start, min(classes.stop, num_tokens + 1))
    return make_work_list(
        *lengths(device, requests, places),
        queries,
        rule,
        CONFIG,
        block_q=block_q,
        head_blocks=heads,
        num_tokens=num_tokens,
    )


def segments(work):
    """Return [part, request, first query, first block, end block] of all segments."""
    starts, table, parts = work.tile_starts.tolist(), work.tiles.tolist(), work.parts.tolist()
    found = []
    for part, ((begin, tile), (end, _)) in enumerate(itertools.pairwise(parts)):
        while begin < end:
            assert starts[tile] <= begin < starts[tile + 1]
            behind = min(end, starts[tile + 1])
            found.append([part, *table[tile], begin - starts[tile], behind - starts[tile]])
            begin, tile = behind, tile + 1
    return found


def expected_tiles(requests, block_q, listed):
    """Return the key blocks of each (request, first query)."""
    return {
        (request, query): -(-(length - count + min(query + block_q, count)) // CONFIG.block_n)
        for request, (count, length) in enumerate(requests)
        if listed(count, length - count)
        for query in range(0, count, block_q)
    }


def check_cover(work, expected):
    found = segments(work)
    covered = dict.fromkeys(expected, 0)
    for _, request, query, begin, end in found:
        assert covered[request, query] == begin
        covered[request, query] = end
    assert covered == expected
    sizes = [0] * work.num_parts
    for part, _, _, begin, end in found:
        sizes[part] += end - begin
    used = [size for size in sizes if size]
    assert sizes[: len(used)] == used
    # All parts are equal, except the last.
    assert len(set(used[:-1])) <= 1
    assert not used or used[-1] <= used[0]


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
    st.sampled_from([range(1, NO_LIMIT), range(1, 5), range(2, NO_LIMIT), range(5, 200)]),
    st.sampled_from(
        [Rule(), Rule(min_context=1), Rule(300, 1024), Rule(300, 1024, 2), Rule(min_context=1, max_rest=0)]
    ),
    st.sampled_from([1, 3, 8]),
)
def test_every_key_block_is_in_exactly_one_part(device, pairs, block_q, classes, rule, heads):
    requests = [(count, count + context) for count, context in pairs]
    if not sum(count for count, _ in requests) >= classes.start:
        return
    work, rest = plan(device, requests, block_q=block_q, classes=classes, rule=rule, places=2, heads=heads)

    def is_short(count, context):
        return 1 < count < rule.full_query_len and context >= rule.min_context

    num_queries = sum(count for count, length in requests if is_short(count, length - count))

    def may_be_left(count, context):
        return count > 1 and not (is_short(count, context) and num_queries < rule.full_query_len)

    left = [count if may_be_left(count, length - count) else 0 for count, length in requests]
    for index in [index for index, count in enumerate(left) if count][rule.max_rest :]:
        left[index] = 0
    assert rest.tolist() == [*left, 0, 0]
    listed = [0 if rest_len else count for (count, _), rest_len in zip(requests, left, strict=True)]
    kept = [(count if count in classes else 0, length) for count, (_, length) in zip(listed, requests, strict=True)]
    check_cover(work, expected_tiles(kept, block_q, lambda *_: True))


def test_a_step_without_listed_requests_has_no_work(device):
    work, rest = plan(device, [(1, 100), (0, 0), (7, 7)], block_q=4, classes=range(8, NO_LIMIT), num_tokens=512)
    assert segments(work) == []
    assert rest.tolist() == [0, 0, 0]


def test_more_tiles_and_requests_than_one_planning_block_are_covered(device, monkeypatch):
    from nanovllm_kernels.attention import triton_work_list

    monkeypatch.setattr(triton_work_list, "PLAN_BLOCK", 16)
    monkeypatch.setattr(tiles, "choose_parts", lambda *_: 53)
    requests = [(1 + 37 * i % 90, 100 + 211 * i % 1500) for i in range(45)]
    work, _ = plan(device, requests, block_q=4)
    check_cover(work, expected_tiles(requests, 4, lambda *_: True))


def test_more_than_2_to_the_31_blocks_are_counted(device, monkeypatch):
    monkeypatch.setattr(tiles, "choose_parts", lambda *_: 132)
    # Two chunks of 100 tokens at the end of 2^30 tokens; each token is a tile.
    work, _ = plan(device, [(100, 1 << 30)] * 2, block_q=1)
    total = 2 * sum(-(-length // 64) for length in range((1 << 30) - 99, (1 << 30) + 1))
    assert total > 1 << 31
    assert work.parts[-1].tolist() == [total, 200]
    bounds = work.parts[:, 0].diff()
    assert (bounds[:-1] == bounds[0]).all()


@pytest.mark.parametrize("num_heads", [2, 8, 16, 32])
@pytest.mark.parametrize("count", [16, 100, 512])
def test_one_short_chunk_over_a_long_context_fills_the_device(device, monkeypatch, count, num_heads):
    monkeypatch.setattr(tiles, "INTERPRETER_SMS", 132)
    monkeypatch.setattr("nanovllm_kernels.attention.work_list.describe_device", lambda _: NoDevice)
    # As in a captured step: 512 tokens, 256 places, lengths known only to the device.
    work, _ = plan(device, [(count, 32768)], block_q=32, places=255, num_tokens=512, heads=num_heads)
    check_cover(work, expected_tiles([(count, 32768)], 32, lambda *_: True))
    sizes = {}
    for part, _, _, begin, end in segments(work):
        sizes[part] = sizes.get(part, 0) + end - begin
    assert len(sizes) * num_heads >= 0.95 * 132
    assert max(sizes.values()) * len(sizes) < 1.1 * sum(sizes.values())


class NoDevice:
    num_sms = 0


def test_whole_prompts_are_cut_rarely(device, monkeypatch):
    monkeypatch.setattr(tiles, "INTERPRETER_SMS", 132)
    monkeypatch.setattr("nanovllm_kernels.attention.work_list.describe_device", lambda _: NoDevice)
    requests = [(2047, 2047)] * 4
    work, _ = plan(device, requests, block_q=64, places=28, num_tokens=8192)
    check_cover(work, expected_tiles(requests, 64, lambda *_: True))
    tiles_of_parts = [tuple(segment[1:3]) for segment in segments(work)]
    assert len(tiles_of_parts) - len(set(tiles_of_parts)) < work.num_parts


def test_requests_for_another_kernel_are_gathered_in_order(device, monkeypatch):
    from nanovllm_kernels.attention import triton_gather_requests

    monkeypatch.setattr(triton_gather_requests, "REQUEST_BLOCK", 16)
    monkeypatch.setattr(triton_gather_requests, "PAGE_BLOCK", 8)
    query_lens = torch.zeros(40, dtype=torch.int32, device=device)
    chosen = [3, 15, 16, 39]
    query_lens[chosen] = torch.tensor([5, 2, 700, 9], dtype=torch.int32, device=device)
    seq_lens = torch.arange(40, dtype=torch.int32, device=device) * 10
    starts = torch.arange(41, dtype=torch.int32, device=device) * 3
    tables = torch.arange(40 * 30, dtype=torch.int32, device=device).view(40, 30)[:, :27]
    found = flash_prefill.gather_requests(query_lens, seq_lens, starts, tables, 16)
    assert found.query_lens.tolist() == [5, 2, 700, 9] + [0] * 28
    assert found.query_starts.tolist()[:4] == [9, 45, 48, 117]
    assert found.seq_lens.tolist() == [30, 150, 160, 390] + [0] * 28
    for place, request in enumerate(chosen):
        pages = -(-10 * request // 16)
        assert found.block_tables[place, :pages].tolist() == tables[request, :pages].tolist()


def test_query_lengths_are_split_between_narrow_and_wide_tiles():
    # Decodes and few queries use narrow tiles, chunks wide tiles.
    assert query_classes(4, 32, 1, 512) == (range(1, 5), range(5, 513))
    # Another kernel takes the decodes: one launch takes the rest.
    assert query_classes(4, 32, 2, 512) == (range(0), range(2, 513))
    # A step that verifies draft tokens, and a step of decodes.
    assert query_classes(4, 32, 1, 4) == (range(1, 5), range(0))
    assert query_classes(4, 32, 1, 1) == (range(1, 2), range(0))
    # Both kinds of tile are equal.
    assert query_classes(1, 1, 1, 512) == (range(0), range(1, 513))
    for least in (1, 2):
        for bound in (1, 3, 4, 5, 700):
            narrow, wide = query_classes(4, 32, least, bound)
            assert sorted([*narrow, *wide]) == list(range(least, max(bound, 4 * (len(wide) > 0)) + 1))


def test_flash_attention_takes_chunks_that_fill_the_device():
    assert flash_prefill.list_rule(32, 132) == Rule(184, 1024, flash_prefill.MAX_REQUESTS)
    assert flash_prefill.list_rule(16, 132) == Rule(369, 1024, flash_prefill.MAX_REQUESTS)
