"""Pairs of a token and an expert, put into the order of experts on the device, and cut into tiles of one expert each.

Up to `ALONE` pairs are one program's: it counts each expert's, and where a pair found the count is its place among
them. More are parts, whose programs a launch before counts, and which then add up what the parts before theirs have.
Nothing waits for the device, and no launch depends on what the tokens chose.

This room must not know what is done with a tile.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.moe.tiles import most_tiles
from nanovllm_kernels.platform import can_overlap_launches

# Pairs that one program sorts alone, and those of a part where there are up to FEW_PARTS, and where there are more. On
# one H200, us: 704 of 513 experts 3.1, 2,048 of 256 experts 5.2; 2,816 of 513 alone 8.4, in parts of 1,024 5.5, of
# 2,048 8.2; 11,264 in these 6.3 and 8.5; 90,112 in these 17.5 and 12.2.
ALONE = 2048
PART = 1024
FEW_PARTS = 16
LARGE_PART = 2048
# Parts whose counts are on their way at once.
COUNTED_AT_ONCE = 8


class SortedPairs(NamedTuple):
    """order: int32 [T k], the pairs, those of an expert among themselves in no order to rely on. starts: int32 [E + 1],
    where each expert's begin in it, and where the last's end. tiles: int32 [.., 2], in the first row how many there
    are, then of each its expert and its first place in the order.
    """

    order: Tensor
    starts: Tensor
    tiles: Tensor


def sort_pairs(ids: Tensor, num_experts: int, block_m: int) -> SortedPairs:
    """The pairs of `ids`, int32 [T, k], by expert, in tiles of `block_m` or less."""
    num_pairs, overlap = ids.numel(), can_overlap_launches(ids.device)
    integers = {"dtype": torch.int32, "device": ids.device}
    order, starts = torch.empty(num_pairs, **integers), torch.empty(num_experts + 1, **integers)
    tiles = torch.empty((most_tiles(num_pairs, num_experts, block_m) + 1, 2), **integers)
    alone = num_pairs <= ALONE
    part = PART if num_pairs <= FEW_PARTS * PART else LARGE_PART
    if alone:
        part = triton.next_power_of_2(num_pairs)
    num_parts, padded = triton.cdiv(num_pairs, part), triton.next_power_of_2(num_experts + 1)
    counts = torch.empty((num_parts, padded), **integers)
    # Of one part a pair's place among its expert's stays in a register.
    ranks = order if alone else torch.empty_like(order)
    launch = {"PADDED": padded, "BLOCK": part, "OVERLAP": overlap, "num_warps": 8, "launch_pdl": overlap}
    if not alone:
        _count_pairs[(num_parts,)](ids, counts, ranks, num_pairs, **launch)
    _sort_pairs[(num_parts,)](
        ids,
        counts,
        ranks,
        torch.empty((num_parts, 2, padded), **integers),
        order,
        starts,
        tiles,
        num_pairs,
        num_experts,
        BLOCK_M=block_m,
        PARTS=COUNTED_AT_ONCE,
        ALONE=alone,
        **launch,
    )
    return SortedPairs(order, starts, tiles)


@triton.jit
def _load_ids(ids_ptr, num_pairs, BLOCK: tl.constexpr):
    """The pairs of this program's part, which of them there are, and their experts."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pairs < num_pairs
    return pairs, inside, tl.load(ids_ptr + pairs, mask=inside, other=0)


@triton.jit
def _count(counts_ptr, ids, inside, PADDED: tl.constexpr):
    """Count each expert's pairs, and return how many each pair has found counted. By atomics in memory: Triton's
    histogram says no places, and takes the longer the more experts there are.
    """
    tl.store(counts_ptr + tl.arange(0, PADDED), tl.zeros((PADDED,), tl.int32))
    # Other threads count on what these wrote.
    tl.debug_barrier()
    return tl.atomic_add(counts_ptr + ids, 1, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["num_pairs"])
def _count_pairs(
    ids_ptr, counts_ptr, ranks_ptr, num_pairs, PADDED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """How many pairs of each expert a part has, and which of them each is."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    pairs, inside, ids = _load_ids(ids_ptr, num_pairs, BLOCK)
    tl.store(ranks_ptr + pairs, _count(counts_ptr + tl.program_id(0) * PADDED, ids, inside, PADDED), mask=inside)


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs(
    ids_ptr,
    counts_ptr,
    ranks_ptr,
    begins_ptr,
    order_ptr,
    starts_ptr,
    tiles_ptr,
    num_pairs,
    num_experts,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,
    ALONE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Where each expert's pairs begin in the order; this part's pairs to their places, those of an expert behind its
    pairs in the parts before; and of each pair that begins a tile this tile.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part, num_parts = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, PADDED)
    pairs, inside, ids = _load_ids(ids_ptr, num_pairs, BLOCK)
    earlier = tl.zeros((PADDED,), tl.int32)
    if ALONE:
        ranks = _count(counts_ptr, ids, inside, PADDED)
        tl.debug_barrier()
        totals = tl.load(counts_ptr + experts)
    else:
        ranks = tl.load(ranks_ptr + pairs, mask=inside, other=0)
        totals = tl.zeros((PADDED,), tl.int32)
        for first in range(0, num_parts, PARTS):
            parts = first + tl.arange(0, PARTS)
            counts_ptrs = counts_ptr + parts[:, None] * PADDED + experts[None, :]
            counts = tl.load(counts_ptrs, mask=(parts < num_parts)[:, None], other=0)
            totals += tl.sum(counts, 0)
            earlier += tl.sum(tl.where((parts < part)[:, None], counts, 0), 0)
    starts = tl.cumsum(totals, 0) - totals
    own = (totals + BLOCK_M - 1) // BLOCK_M
    before = tl.cumsum(own, 0) - own
    # Of this part's first pair of an expert the place, and the same if tiles were full.
    begins_ptr += part * (2 * PADDED)
    tl.store(begins_ptr + experts, starts + earlier)
    tl.store(begins_ptr + PADDED + experts, before * BLOCK_M + earlier)
    tl.debug_barrier()
    places = tl.load(begins_ptr + ids, mask=inside, other=0) + ranks
    in_tiles = tl.load(begins_ptr + PADDED + ids, mask=inside, other=0) + ranks
    tl.store(order_ptr + places, pairs, mask=inside)
    entry_ptrs = tiles_ptr + 2 * (1 + in_tiles // BLOCK_M)
    begins_tile = inside & (in_tiles % BLOCK_M == 0)
    tl.store(entry_ptrs, ids, mask=begins_tile)
    tl.store(entry_ptrs + 1, places, mask=begins_tile)
    if part == 0:
        tl.store(tiles_ptr, tl.sum(own, 0))
        # With the next one's after the last: its pairs end where those would begin.
        tl.store(starts_ptr + experts, starts, mask=experts <= num_experts)
