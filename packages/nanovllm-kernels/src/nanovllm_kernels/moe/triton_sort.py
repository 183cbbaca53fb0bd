"""Sorts (token, expert) pairs by expert on the device, and cuts the pairs into tiles of one expert each.

One program sorts up to MAX_SINGLE_PART_PAIRS pairs. More pairs are split into parts: a first launch counts each part's
pairs per expert, and a second launch sorts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.moe.policy import max_tiles
from nanovllm_kernels.moe.triton_local_experts import to_local
from nanovllm_kernels.platform import can_overlap_launches

# Maximum number of pairs that one program sorts alone.
MAX_SINGLE_PART_PAIRS = 2048
# More pairs are split into small parts if this takes at most MAX_SMALL_PARTS parts, and into large parts otherwise.
SMALL_PART_PAIRS = 1024
MAX_SMALL_PARTS = 16
LARGE_PART_PAIRS = 2048
# Number of parts whose counts (pairs per expert) are loaded at once.
PARTS_PER_LOAD = 8


class SortedPairs(NamedTuple):
    """Pairs of this rank's E experts, sorted by expert, in tiles of one expert each.

    order: int32 [T k], the sorted pairs: `t * k + j` for `ids[t, j]`. The order within an expert is unspecified.
        Elements from starts[E] on are undefined.
    starts: int32 [E + 1]. The pairs of expert e are order[starts[e] : starts[e + 1]].
    tiles: int32 [.., 2]. tiles[0, 0] is the number of tiles. Each further row has a tile's expert, and the index in
        `order` of the tile's first pair. Rows after the last tile are undefined.
    """

    order: Tensor
    starts: Tensor
    tiles: Tensor


def sort_pairs(ids: Tensor, num_experts: int, block_m: int, first_id: int | None = None) -> SortedPairs:
    """Sort the pairs of `ids`, int32 [T, k], by expert, into tiles of at most `block_m` pairs.

    first_id: id of the first of this rank's `num_experts` experts. Pairs of other experts are left out. None: this
        rank has all experts.
    """
    num_pairs, overlap = ids.numel(), can_overlap_launches(ids.device)  # programmatic dependent launch
    int32_options = {"dtype": torch.int32, "device": ids.device}
    order, starts = torch.empty(num_pairs, **int32_options), torch.empty(num_experts + 1, **int32_options)
    tiles = torch.empty((max_tiles(num_pairs, num_experts, block_m) + 1, 2), **int32_options)
    is_single_part = num_pairs <= MAX_SINGLE_PART_PAIRS
    part_pairs = SMALL_PART_PAIRS if num_pairs <= MAX_SMALL_PARTS * SMALL_PART_PAIRS else LARGE_PART_PAIRS
    if is_single_part:
        part_pairs = triton.next_power_of_2(num_pairs)
    num_parts, padded_experts = triton.cdiv(num_pairs, part_pairs), triton.next_power_of_2(num_experts + 1)
    counts = torch.empty((num_parts, padded_experts), **int32_options)
    # Index of each pair among its part's pairs of the same expert. A single part does not use this tensor.
    indices_in_expert = order if is_single_part else torch.empty_like(order)
    launch_options = {
        "first_id": first_id or 0,
        "num_experts": num_experts,
        "PARTIAL": first_id is not None,  # `ids` also has experts of other ranks
        "PADDED_EXPERTS": padded_experts,
        "BLOCK": part_pairs,  # pairs per part, one part per program
        "OVERLAP": overlap,
        "num_warps": 8,
        "launch_pdl": overlap,
    }
    if not is_single_part:
        _count_pairs[(num_parts,)](ids, counts, indices_in_expert, num_pairs, **launch_options)
    _sort_pairs[(num_parts,)](
        ids,
        counts,
        indices_in_expert,
        torch.empty((num_parts, 2, padded_experts), **int32_options),  # scratch
        order,
        starts,
        tiles,
        num_pairs,
        BLOCK_M=block_m,  # pairs per tile
        PARTS_PER_LOAD=PARTS_PER_LOAD,
        SINGLE_PART=is_single_part,
        **launch_options,
    )
    return SortedPairs(order, starts, tiles)


@triton.jit
def _load_experts(ids_ptr, num_pairs, first_id, num_experts, PARTIAL: tl.constexpr, BLOCK: tl.constexpr):
    """Return the indices of this part's pairs, the mask of this rank's pairs, and the pairs' experts."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pairs < num_pairs
    experts = tl.load(ids_ptr + pairs, mask=mask, other=0)
    if PARTIAL:
        experts = to_local(experts, first_id, num_experts)
        mask = mask & (experts >= 0)
    return pairs, mask, experts


@triton.jit
def _count(counts_ptr, pair_experts, mask, PADDED_EXPERTS: tl.constexpr):
    """Count each expert's pairs, and return each pair's index among the pairs of the same expert."""
    tl.store(counts_ptr + tl.arange(0, PADDED_EXPERTS), tl.zeros((PADDED_EXPERTS,), tl.int32))
    # All threads must see the zeros before any thread counts.
    tl.debug_barrier()
    return tl.atomic_add(counts_ptr + pair_experts, 1, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["num_pairs", "first_id"])
def _count_pairs(
    ids_ptr,
    counts_ptr,
    indices_in_expert_ptr,
    num_pairs,
    num_experts,
    first_id,
    PARTIAL: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Store the number of pairs per expert in this part, and each pair's index in its expert and part."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    pairs, mask, pair_experts = _load_experts(ids_ptr, num_pairs, first_id, num_experts, PARTIAL, BLOCK)
    part_counts_ptr = counts_ptr + tl.program_id(0) * PADDED_EXPERTS
    tl.store(indices_in_expert_ptr + pairs, _count(part_counts_ptr, pair_experts, mask, PADDED_EXPERTS), mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "first_id"])
def _sort_pairs(
    ids_ptr,
    counts_ptr,
    indices_in_expert_ptr,
    first_rows_ptr,
    order_ptr,
    starts_ptr,
    tiles_ptr,
    num_pairs,
    num_experts,
    first_id,
    PARTIAL: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS_PER_LOAD: tl.constexpr,
    SINGLE_PART: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Store each expert's start, the sorted pairs of this part, and the tiles whose first pair is in this part."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part, num_parts = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, PADDED_EXPERTS)
    pairs, mask, pair_experts = _load_experts(ids_ptr, num_pairs, first_id, num_experts, PARTIAL, BLOCK)
    earlier_counts = tl.zeros((PADDED_EXPERTS,), tl.int32)  # each expert's pairs in earlier parts
    if SINGLE_PART:
        indices_in_expert = _count(counts_ptr, pair_experts, mask, PADDED_EXPERTS)
        tl.debug_barrier()
        totals = tl.load(counts_ptr + experts)
    else:
        indices_in_expert = tl.load(indices_in_expert_ptr + pairs, mask=mask, other=0)
        totals = tl.zeros((PADDED_EXPERTS,), tl.int32)
        for first_part in range(0, num_parts, PARTS_PER_LOAD):
            parts = first_part + tl.arange(0, PARTS_PER_LOAD)
            counts_ptrs = counts_ptr + parts[:, None] * PADDED_EXPERTS + experts[None, :]
            counts = tl.load(counts_ptrs, mask=(parts < num_parts)[:, None], other=0)
            totals += tl.sum(counts, 0)
            earlier_counts += tl.sum(tl.where((parts < part)[:, None], counts, 0), 0)
    starts = tl.cumsum(totals, 0) - totals
    num_expert_tiles = (totals + BLOCK_M - 1) // BLOCK_M
    first_tiles = tl.cumsum(num_expert_tiles, 0) - num_expert_tiles
    # For each expert's first pair in this part, store the pair's index in `order`, and the index that the pair would
    # have if every tile were padded to BLOCK_M pairs.
    first_rows_ptr += part * (2 * PADDED_EXPERTS)
    tl.store(first_rows_ptr + experts, starts + earlier_counts)
    tl.store(first_rows_ptr + PADDED_EXPERTS + experts, first_tiles * BLOCK_M + earlier_counts)
    tl.debug_barrier()
    sorted_rows = tl.load(first_rows_ptr + pair_experts, mask=mask, other=0) + indices_in_expert
    padded_rows = tl.load(first_rows_ptr + PADDED_EXPERTS + pair_experts, mask=mask, other=0) + indices_in_expert
    tl.store(order_ptr + sorted_rows, pairs, mask=mask)
    entry_ptrs = tiles_ptr + 2 * (1 + padded_rows // BLOCK_M)  # the tile's row in `SortedPairs.tiles`
    is_tile_start = mask & (padded_rows % BLOCK_M == 0)
    tl.store(entry_ptrs, pair_experts, mask=is_tile_start)
    tl.store(entry_ptrs + 1, sorted_rows, mask=is_tile_start)
    if part == 0:
        tl.store(tiles_ptr, tl.sum(num_expert_tiles, 0))
        # starts[num_experts] is the number of this rank's pairs.
        tl.store(starts_ptr + experts, starts, mask=experts <= num_experts)
