"""Draws a token from what a row's filters keep, without sorting and usually without another pass over the row.

Candidates come from the segments whose maxima reach a cut that keeps all tokens that the filters may keep. The best of
these is drawn if the filters keep it; if not, all tokens up to its level are dropped and the next best is tried
(rejection sampling, Ye et al. 2025, FlashInfer, but with fixed noise: the result is exactly the best kept token).
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import triton
import triton.language as tl

from nanovllm_kernels.sampling.triton_noise import LOG2_E, load_logits, scores

# Lower bound of a row's peak: avoids infinity minus infinity in a row without finite logits, and stays finite when
# divided by any temperature.
LOWEST = tl.constexpr(-1.0e30)
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def is_filtered(temperature, top_k, top_p, min_p, vocab_size, MIN_TEMPERATURE: tl.constexpr):
    """Whether a row draws from a part of its tokens only."""
    some_out = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0)
    return (temperature >= MIN_TEMPERATURE) & some_out


@triton.jit
def _scaled(logits, temperature):
    """Divide logits by the temperature with the reference's rounding, on which the filters' ties depend."""
    return tl.div_rn(logits, temperature)


@triton.jit
def _between(low, top):
    """Return a pivot above `low`: halfway to `top`, or `top` if no number lies between."""
    pivot = 0.5 * low + 0.5 * top
    return tl.where(pivot > low, pivot, top)


@triton.jit
def _raise_cut(values, low, top, least, most):
    """Raise `low` by bisection until at most `most`, but at least `least`, of `values` reach it.

    top: the largest value. Both ends move to values that occur, so that ties end the search: then more than `most` may
    reach the cut, which is the least-th largest value.
    """
    count = tl.sum((values >= low).to(tl.int32), 0)
    while (count > most) & (low < top):
        pivot = _between(low, top)
        reached = tl.sum((values >= pivot).to(tl.int32), 0)
        if reached >= least:
            low = tl.min(tl.where(values >= pivot, values, float("inf")), 0)
            count = reached
        else:
            top = tl.maximum(tl.max(tl.where(values >= pivot, float("-inf"), values), 0), low)
    return low, count


@triton.jit
def _weigh_row(logits_ptr, vocab_size, temperature, peak, low, INCLUSIVE: tl.constexpr, BLOCK: tl.constexpr):
    """Return count, mass (likeliest token = 1) and least value of a row's tokens above `low` (INCLUSIVE: or at it)."""
    lanes = tl.arange(0, BLOCK)
    scale = LOG2_E / temperature
    count = tl.zeros([BLOCK], dtype=tl.int32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    least = tl.full([BLOCK], float("inf"), dtype=tl.float32)
    for first in tl.range(0, vocab_size, BLOCK):
        logits = load_logits(logits_ptr, first + lanes, first + lanes < vocab_size)
        scaled = _scaled(logits, temperature)
        inside = scaled >= low if INCLUSIVE else scaled > low
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp2((logits - peak) * scale), 0.0)
        least = tl.minimum(least, tl.where(inside, scaled, float("inf")))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(least, 0)


@triton.jit
def _raise_cut_of_row(logits_ptr, vocab_size, temperature, peak, low, wanted, BLOCK: tl.constexpr):
    """Like `_raise_cut` over a whole row: return the wanted-th largest value, or `low` if fewer reach it."""
    lanes = tl.arange(0, BLOCK)
    top = _scaled(peak, temperature)
    count, _, low = _weigh_row(logits_ptr, vocab_size, temperature, peak, low, True, BLOCK)
    while (count > wanted) & (low < top):
        pivot = _between(low, top)
        inside = tl.zeros([BLOCK], dtype=tl.int32)
        above = tl.full([BLOCK], float("inf"), dtype=tl.float32)
        below = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        for first in tl.range(0, vocab_size, BLOCK):
            scaled = _scaled(load_logits(logits_ptr, first + lanes, first + lanes < vocab_size), temperature)
            inside += (scaled >= pivot).to(tl.int32)
            above = tl.minimum(above, tl.where(scaled >= pivot, scaled, float("inf")))
            below = tl.maximum(below, tl.where(scaled >= pivot, float("-inf"), scaled))
        reached = tl.sum(inside, 0)
        if reached >= wanted:
            low = tl.min(above, 0)
            count = reached
        else:
            top = tl.maximum(tl.max(below, 0), low)
    return low


@triton.jit
def _draw_from_row(logits_ptr, vocab_size, temperature, seed, position, peak, low, limit, target, BLOCK: tl.constexpr):
    """Draw a row's best token from `low` up that has fewer than `limit` tokens and less mass than `target` above it."""
    lanes = tl.arange(0, BLOCK)
    token = vocab_size
    searching = True
    while searching:
        lane_best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        lane_token = tl.full([BLOCK], NO_TOKEN, dtype=tl.int32)
        for first in tl.range(0, vocab_size, BLOCK):
            tokens = first + lanes
            logits = load_logits(logits_ptr, tokens, tokens < vocab_size)
            drawn = scores(logits, tokens, LOG2_E / temperature, seed, position)
            better = (_scaled(logits, temperature) >= low) & (drawn > lane_best)
            lane_best = tl.where(better, drawn, lane_best)
            lane_token = tl.where(better, tokens, lane_token)
        token = tl.min(tl.where(lane_best == tl.max(lane_best, 0), lane_token, NO_TOKEN), 0)
        # A row without finite logits has no best token.
        token = tl.minimum(token, vocab_size - 1)
        level = _scaled(load_logits(logits_ptr, token, token < vocab_size), temperature)
        searching = False
        if ((limit < vocab_size) | (target < float("inf"))) & (level < _scaled(peak, temperature)):
            count, mass, low = _weigh_row(logits_ptr, vocab_size, temperature, peak, level, False, BLOCK)
            searching = (count >= limit) | ((count > 0) & (mass >= target))
    return token


@triton.jit
def _draw_from(values, drawn, weights, tokens, low, limit, target):
    """Like `_draw_from_row`, from candidates: scaled logits (-inf if excluded), scores, masses and ids."""
    token = NO_TOKEN
    searching = True
    while searching:
        left = tl.where(values >= low, drawn, float("-inf"))
        token = tl.min(tl.where(left == tl.max(left, 0), tokens, NO_TOKEN), 0)
        level = tl.max(tl.where(tokens == token, values, float("-inf")), 0)
        above = values > level
        count = tl.sum(above.to(tl.int32), 0)
        mass = tl.sum(tl.where(above, weights, 0.0), 0)
        low = tl.min(tl.where(above, values, float("inf")), 0)
        searching = (count >= limit) | ((count > 0) & (mass >= target))
    return token


@triton.jit
def draw_filtered(
    logits_ptr,
    peaks_ptr,
    hits_ptr,
    peak,
    total,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    vocab_size,
    num_segments,
    NEVER_DRAWN: tl.constexpr,
    SEGMENT: tl.constexpr,
    PADDED_SEGMENTS: tl.constexpr,
    HITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the token of one filtered row.

    peaks_ptr: the largest logit of each segment of SEGMENT tokens. hits_ptr: space for HITS segment ids.
    peak: the largest logit, at least LOWEST. total: mass of the row, with 1 for the likeliest token.
    """
    top = _scaled(peak, temperature)
    # Tokens below this are never drawn, and have no measurable mass.
    never = top - NEVER_DRAWN
    floor = never
    if min_p > 0:
        floor = tl.maximum(never, tl.minimum(top + tl.log(min_p), top))
    limited = (top_k > 0) & (top_k < vocab_size)
    # top-p applies to the mass that top-k keeps, before min-p.
    both = limited & (top_p < 1)
    low = tl.where(both, never, floor)
    limit = tl.where(limited & (top_p >= 1), top_k, vocab_size)

    segments = tl.arange(0, PADDED_SEGMENTS)
    heights = tl.load(peaks_ptr + segments, mask=segments < num_segments, other=float("-inf"))
    heights = _scaled(heights, temperature)
    # At least as many tokens as segments reach a cut.
    wanted = tl.where(limited & (top_k <= HITS), top_k, HITS // 2)
    cut, num_hits = _raise_cut(heights, low, top, wanted, HITS)
    token = -1
    if num_hits <= HITS:
        hit = heights >= cut
        tl.store(hits_ptr + tl.cumsum(hit.to(tl.int32), 0) - 1, segments, mask=hit)
        tl.debug_barrier()
        index = tl.arange(0, HITS * SEGMENT)
        gathered = index // SEGMENT < num_hits
        tokens = tl.load(hits_ptr + index // SEGMENT, mask=gathered, other=0) * SEGMENT + index % SEGMENT
        logits = load_logits(logits_ptr, tokens, gathered & (tokens < vocab_size))
        values = _scaled(logits, temperature)
        values = tl.where(values >= cut, values, float("-inf"))
        weights = tl.where(values >= cut, tl.exp2((logits - peak) * (LOG2_E / temperature)), 0.0)
        mass = tl.sum(weights, 0)
        count = tl.sum((values >= cut).to(tl.int32), 0)
        # Whether the candidates include all tokens that the filters may keep.
        complete = (cut <= low) | tl.where(limited, count >= top_k, (top_p < 1) & (mass >= top_p * total))
        if complete:
            share = total
            if both:
                cut, count = _raise_cut(values, cut, top, top_k, top_k)
                share = tl.sum(tl.where(values >= cut, weights, 0.0), 0)
            target = tl.where(top_p < 1, top_p * share, float("inf"))
            drawn = scores(logits, tokens, LOG2_E / temperature, seed, position)
            token = _draw_from(values, drawn, weights, tokens, tl.maximum(cut, floor), limit, target)
            token = tl.minimum(token, vocab_size - 1)
    if token < 0:
        share = total
        if both:
            low = _raise_cut_of_row(logits_ptr, vocab_size, temperature, peak, low, top_k, BLOCK)
            count, share, low = _weigh_row(logits_ptr, vocab_size, temperature, peak, low, True, BLOCK)
        target = tl.where(top_p < 1, top_p * share, float("inf"))
        low = tl.maximum(low, floor)
        token = _draw_from_row(logits_ptr, vocab_size, temperature, seed, position, peak, low, limit, target, BLOCK)
    return token
