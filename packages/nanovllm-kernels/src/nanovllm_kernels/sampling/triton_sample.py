"""The draw on CUDA: thresholds for the filters without a sort, then one pass of argmax with Gumbel noise.

A row's filters come down to one threshold on its scaled logits. It is found exactly by bisection between two logits
that occur in the row: every pass over the row (it stays in the L2 cache) also learns the nearest logits on either side
of the pivot, so that the bracket always ends on the logit sought.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.sampling import noise
from nanovllm_kernels.sampling.reference import MIN_TEMPERATURE

# Elements of a row that one program draws among, so that even a single row spreads over the device.
CHUNK = 8192
DRAW_BLOCK = 2048
FILTER_BLOCK = 4096

SEED_MULTIPLIER = tl.constexpr(noise.SEED_MULTIPLIER)
POSITION_MULTIPLIER = tl.constexpr(noise.POSITION_MULTIPLIER)
KEY_OFFSET = tl.constexpr(noise.KEY_OFFSET)
MIX_MULTIPLIER = tl.constexpr(noise.MIX_MULTIPLIER)
TOKEN_MULTIPLIER = tl.constexpr(noise.TOKEN_MULTIPLIER)
FIRST_MULTIPLIER = tl.constexpr(noise.FIRST_MULTIPLIER)
SECOND_MULTIPLIER = tl.constexpr(noise.SECOND_MULTIPLIER)
UNIFORM_MASK = tl.constexpr(noise.UNIFORM_MASK)
UNIFORM_SCALE = tl.constexpr(noise.UNIFORM_SCALE)
UNIFORM_OFFSET = tl.constexpr(noise.UNIFORM_OFFSET)

# Noise lies between -2.9 and 22.2, so that no logit this far below the largest is ever drawn: bisection stops there.
NEVER_DRAWN = 30.0


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    all_greedy: bool,
    any_filter: bool,
) -> Tensor:
    """See the package's `sample`."""
    num_rows, vocab_size = logits.shape
    thresholds = temperature
    if any_filter and not all_greedy:
        thresholds = torch.empty_like(temperature)
        _find_thresholds[(num_rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            thresholds,
            logits.stride(0),
            vocab_size,
            MIN_TEMPERATURE=MIN_TEMPERATURE,
            NEVER_DRAWN=NEVER_DRAWN,
            BLOCK=FILTER_BLOCK,
            num_warps=16,
        )
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    best = logits.new_empty((num_rows, num_chunks), dtype=torch.float32)
    best_ids = logits.new_empty((num_rows, num_chunks), dtype=torch.int32)
    _draw_chunk[(num_rows, num_chunks)](
        logits,
        temperature,
        thresholds,
        seeds,
        positions,
        best,
        best_ids,
        logits.stride(0),
        vocab_size,
        ALL_GREEDY=all_greedy,
        FILTER=any_filter,
        MIN_TEMPERATURE=MIN_TEMPERATURE,
        CHUNK=CHUNK,
        BLOCK=DRAW_BLOCK,
        num_warps=8,
    )
    out = best_ids.new_empty((num_rows,))
    _pick_chunk[(num_rows,)](
        best, best_ids, out, num_chunks, PADDED_CHUNKS=triton.next_power_of_2(num_chunks), num_warps=1
    )
    return out


@triton.jit
def _scaled(logits_ptr, index, vocab_size, temperature):
    """Logits over the temperature, exactly alike wherever it is asked for; -inf behind the row's end and for a NaN."""
    logits = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    scaled = tl.div_rn(logits, temperature)
    return tl.where(scaled == scaled, scaled, float("-inf"))


@triton.jit
def _gumbel(tokens, seed, position):
    """Gumbel noise of each token: the integer steps of `noise`, then -log of its exponential draw."""
    mixed = seed * SEED_MULTIPLIER + position.to(tl.int64) * POSITION_MULTIPLIER + KEY_OFFSET
    mixed ^= mixed >> 32
    mixed *= MIX_MULTIPLIER
    mixed ^= mixed >> 29
    bits = (tokens * TOKEN_MULTIPLIER) ^ (mixed >> 32).to(tl.int32)
    bits ^= (bits >> 16) & 0xFFFF
    bits *= FIRST_MULTIPLIER
    bits ^= (bits >> 15) & 0x1FFFF
    bits += mixed.to(tl.int32)
    bits *= SECOND_MULTIPLIER
    u = (bits & UNIFORM_MASK).to(tl.float32) * UNIFORM_SCALE + UNIFORM_OFFSET
    # log1p: where 1 - u would lose the digits of a small u, its series, to one part in 10^8.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    exponential = tl.where(u < 0.0625, series, -tl.log(1 - u))
    return -tl.log(exponential)


@triton.jit
def _bisect(
    logits_ptr, vocab_size, temperature, row_max, low, floor, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest logit v of the row for which {z >= v} weighs at least `target`.

    A token weighs exp(z - row_max) if BY_MASS, else 1; none below `floor` counts. `low` is a logit that satisfies.
    """
    lanes = tl.arange(0, BLOCK)
    top = row_max
    while low < top:
        pivot = 0.5 * low + 0.5 * top
        # Neighbours in float32 have nothing between them.
        pivot = tl.where(pivot > low, pivot, top)
        weight = tl.zeros([BLOCK], dtype=tl.float32)
        above = tl.full([BLOCK], float("inf"), dtype=tl.float32)
        below = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        for first in tl.range(0, vocab_size, BLOCK):
            scaled = _scaled(logits_ptr, first + lanes, vocab_size, temperature)
            inside = scaled >= pivot
            if BY_MASS:
                weight += tl.where(inside, tl.exp(scaled - row_max), 0.0)
            else:
                weight += tl.where(inside, 1.0, 0.0)
            above = tl.minimum(above, tl.where(inside, scaled, float("inf")))
            below = tl.maximum(below, tl.where(inside, float("-inf"), scaled))
        enough = tl.sum(weight, 0) >= target
        low = tl.where(enough, tl.min(above, 0), low)
        top = tl.where(enough, top, tl.maximum(tl.max(below, 0), floor))
    return low


@triton.jit
def _find_thresholds(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    thresholds_ptr,
    logits_stride,
    vocab_size,
    MIN_TEMPERATURE: tl.constexpr,
    NEVER_DRAWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: the least scaled logit that its filters keep, -inf where none is on and where the row is greedy."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    threshold = float("-inf")
    if (temperature >= MIN_TEMPERATURE) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        logits_ptr += row * logits_stride
        lanes = tl.arange(0, BLOCK)
        # Finite from the start, so that nothing below subtracts infinity from infinity in a row that has nothing else.
        lane_max = tl.full([BLOCK], -3.0e38, dtype=tl.float32)
        for first in tl.range(0, vocab_size, BLOCK):
            lane_max = tl.maximum(lane_max, _scaled(logits_ptr, first + lanes, vocab_size, temperature))
        row_max = tl.max(lane_max, 0)
        floor = row_max - NEVER_DRAWN
        count = tl.zeros([BLOCK], dtype=tl.float32)
        least = tl.full([BLOCK], float("inf"), dtype=tl.float32)
        for first in tl.range(0, vocab_size, BLOCK):
            scaled = _scaled(logits_ptr, first + lanes, vocab_size, temperature)
            count += tl.where(scaled >= floor, 1.0, 0.0)
            least = tl.minimum(least, tl.where(scaled >= floor, scaled, float("inf")))
        threshold = tl.min(least, 0)
        if (top_k > 0) & (tl.sum(count, 0) > top_k):
            wanted = top_k.to(tl.float32)
            threshold = _bisect(
                logits_ptr, vocab_size, temperature, row_max, threshold, threshold, wanted, False, BLOCK
            )
        if top_p < 1:
            mass = tl.zeros([BLOCK], dtype=tl.float32)
            for first in tl.range(0, vocab_size, BLOCK):
                scaled = _scaled(logits_ptr, first + lanes, vocab_size, temperature)
                mass += tl.where(scaled >= threshold, tl.exp(scaled - row_max), 0.0)
            wanted = top_p * tl.sum(mass, 0)
            threshold = _bisect(logits_ptr, vocab_size, temperature, row_max, threshold, threshold, wanted, True, BLOCK)
        if min_p > 0:
            threshold = tl.minimum(tl.maximum(threshold, row_max + tl.log(min_p)), row_max)
    tl.store(thresholds_ptr + row, threshold)


@triton.jit
def _draw_chunk(
    logits_ptr,
    temperature_ptr,
    thresholds_ptr,
    seeds_ptr,
    positions_ptr,
    best_ptr,
    best_ids_ptr,
    logits_stride,
    vocab_size,
    ALL_GREEDY: tl.constexpr,
    FILTER: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best token of one chunk of one row: by its logit, plus Gumbel noise unless the row is greedy."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    logits_ptr += row * logits_stride
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, vocab_size)
    best = float("-inf")
    best_id = begin
    if ALL_GREEDY:
        temperature = 1.0
        greedy = True
    else:
        temperature = tl.load(temperature_ptr + row)
        greedy = temperature < MIN_TEMPERATURE
        temperature = tl.where(greedy, 1.0, temperature)
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row)
        if FILTER:
            threshold = tl.load(thresholds_ptr + row)
    for first in tl.range(begin, end, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        scores = _scaled(logits_ptr, tokens, vocab_size, temperature)
        if not ALL_GREEDY:
            if FILTER:
                scores = tl.where(scores >= threshold, scores, float("-inf"))
            if not greedy:
                scores += _gumbel(tokens, seed, position)
        block_best, block_lane = tl.max(scores, 0, return_indices=True)
        better = block_best > best
        best_id = tl.where(better, first + block_lane, best_id)
        best = tl.where(better, block_best, best)
    place = row * tl.num_programs(1) + chunk
    tl.store(best_ptr + place, best)
    tl.store(best_ids_ptr + place, best_id)


@triton.jit
def _pick_chunk(best_ptr, best_ids_ptr, out_ptr, num_chunks, PADDED_CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, PADDED_CHUNKS)
    best = tl.load(best_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
    winner = tl.argmax(best, 0)
    tl.store(out_ptr + row, tl.load(best_ids_ptr + row * num_chunks + winner))
