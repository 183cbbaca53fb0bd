"""Sorts pairs of a token and an expert by expert on the device, and cuts them into tiles of one expert each.

One program sorts up to `ALONE` pairs: a pair's count when it is added is its rank within the expert. More pairs are
split into parts: a first launch counts each part, and the second adds the counts of the parts before.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.moe.policy import most_tiles
from nanovllm_kernels.platform import can_overlap_launches

# ALONE: most pairs that one program sorts. PART: pairs per part for up to FEW_PARTS parts; LARGE_PART: for more. Chosen
# on an H200: 2,816 pairs took 8.4 us alone, 5.5 us in small parts; 90,112 took 17.5 us in small parts, 12.2 in large.
ALONE = 2048
PART = 1024
FEW_PARTS = 16
LARGE_PART = 2048
# Parts whose counts are loaded at once.
COUNTED_AT_ONCE = 8


class SortedPairs(NamedTuple):
    """order: int32 [T k], pairs sorted by expert; the order within an expert is unspecified.
    starts: int32 [E + 1], each expert's first place in `order`, then the end of the last expert's.
    tiles: int32 [.., 2], the first row holds the number of tiles; then each tile's expert and its first place.
    """

    order: Tensor
    starts: Tensor
    tiles: Tensor


def sort_pairs(ids: Tensor, num_experts: int, block_m: int) -> SortedPairs:
    """Sort the pairs of `ids`, int32 [T, k], by expert, into tiles of at most `block_m` pairs."""
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
    # A single part keeps ranks in registers, and does not use this tensor.
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
    """Return the pairs of this program's part, a mask of those that exist, and their experts."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pairs < num_pairs
    return pairs, inside, tl.load(ids_ptr + pairs, mask=inside, other=0)


@triton.jit
def _count(counts_ptr, ids, inside, PADDED: tl.constexpr):
    """Count each expert's pairs and return each pair's rank within its expert. Atomics are used because Triton's
    histogram gives no ranks and slows down with the number of experts.
    """
    tl.store(counts_ptr + tl.arange(0, PADDED), tl.zeros((PADDED,), tl.int32))
    # The zeros must be visible to all threads before they count.
    tl.debug_barrier()
    return tl.atomic_add(counts_ptr + ids, 1, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["num_pairs"])
def _count_pairs(
    ids_ptr, counts_ptr, ranks_ptr, num_pairs, PADDED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Store each expert's number of pairs in this part, and each pair's rank within its expert and part."""
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
    """Store the first place of each expert, each pair of this part at its place in the order, and an entry for each
    tile whose first pair is in this part. An expert's pairs follow its pairs of the parts before.
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
    # Per expert: the place of this part's first pair, and the same place if every tile were full.
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
        # The entry after the last expert's marks the end of that expert's pairs.
        tl.store(starts_ptr + experts, starts, mask=experts <= num_experts)
