"""Draws a token from the tokens that a row's filters keep, by rejection sampling without a sort.

The token with the largest noisy logit (with Gumbel noise) is drawn if the filters keep this token. If not, the token
and all tokens with smaller or equal logits are dropped, and the draw is repeated (Ye et al. 2025, FlashInfer).
A segment is a range of consecutive token ids. The first candidates come from the segments with the largest maxima. If
the filters may keep tokens that are not among these candidates, the draw is from all tokens of the row.
A token's value is its logit divided by the temperature.
"""

import triton
import triton.language as tl

from nanovllm_kernels.sampling.triton_noise import LOG2_E, add_gumbel_noise, load_logits

# Lower bound of a row's maximum logit. Without a bound, a row without finite logits would give infinity minus infinity.
# This bound stays finite when divided by a temperature.
MIN_MAX_LOGIT = tl.constexpr(-1.0e30)
NO_TOKEN = tl.constexpr(2**31 - 1)  # larger than every token id


@triton.jit
def is_filtered(temperature, top_k, top_p, min_p, vocab_size, MIN_TEMPERATURE: tl.constexpr):
    """Whether a row's filters may drop tokens."""
    has_filter = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0)
    return (temperature >= MIN_TEMPERATURE) & has_filter


@triton.jit
def _divide_by_temperature(logits, temperature):
    """Divide logits by the temperature, rounded as in `sampling_reference`: other rounding could change ties."""
    return tl.div_rn(logits, temperature)


@triton.jit
def _pivot_between(low, max_value):
    """Return the middle of `low` and `max_value`, or `max_value` if no float32 is between them."""
    pivot = 0.5 * low + 0.5 * max_value
    return tl.where(pivot > low, pivot, max_value)


@triton.jit
def _raise_threshold(values, low, max_value, min_count, max_count):
    """Raise `low` by bisection until the number of `values` >= `low` is from `min_count` to `max_count`.

    If ties prevent this, `low` becomes the min_count-th largest value. max_value: the largest of `values`.
    Returns: `low`, and the number of values that are at least `low`.
    """
    count = tl.sum((values >= low).to(tl.int32), 0)
    while (count > max_count) & (low < max_value):
        pivot = _pivot_between(low, max_value)
        pivot_count = tl.sum((values >= pivot).to(tl.int32), 0)
        if pivot_count >= min_count:
            low = tl.min(tl.where(values >= pivot, values, float("inf")), 0)
            count = pivot_count
        else:
            max_value = tl.maximum(tl.max(tl.where(values >= pivot, float("-inf"), values), 0), low)
    return low, count


@triton.jit
def _weigh_tokens_above(
    logits_ptr, vocab_size, temperature, max_logit, low, INCLUSIVE: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the number, mass and smallest value of a row's tokens with values above `low`, or >= `low` if INCLUSIVE.

    A token's mass is its probability divided by the likeliest token's probability.
    """
    lanes = tl.arange(0, BLOCK)
    scale = LOG2_E / temperature
    count = tl.zeros([BLOCK], dtype=tl.int32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    min_value = tl.full([BLOCK], float("inf"), dtype=tl.float32)
    for first in tl.range(0, vocab_size, BLOCK):
        logits = load_logits(logits_ptr, first + lanes, first + lanes < vocab_size)
        scaled = _divide_by_temperature(logits, temperature)
        is_above = scaled >= low if INCLUSIVE else scaled > low
        count += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp2((logits - max_logit) * scale), 0.0)
        min_value = tl.minimum(min_value, tl.where(is_above, scaled, float("inf")))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(min_value, 0)


@triton.jit
def _raise_threshold_of_row(logits_ptr, vocab_size, temperature, max_logit, low, k, BLOCK: tl.constexpr):
    """Return the larger of two values of a row: the k-th largest value, and the smallest value that is >= `low`."""
    lanes = tl.arange(0, BLOCK)
    max_value = _divide_by_temperature(max_logit, temperature)
    count, _, low = _weigh_tokens_above(logits_ptr, vocab_size, temperature, max_logit, low, True, BLOCK)
    while (count > k) & (low < max_value):
        pivot = _pivot_between(low, max_value)
        num_above = tl.zeros([BLOCK], dtype=tl.int32)
        min_above = tl.full([BLOCK], float("inf"), dtype=tl.float32)
        max_below = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        for first in tl.range(0, vocab_size, BLOCK):
            logits = load_logits(logits_ptr, first + lanes, first + lanes < vocab_size)
            scaled = _divide_by_temperature(logits, temperature)
            num_above += (scaled >= pivot).to(tl.int32)
            min_above = tl.minimum(min_above, tl.where(scaled >= pivot, scaled, float("inf")))
            max_below = tl.maximum(max_below, tl.where(scaled >= pivot, float("-inf"), scaled))
        pivot_count = tl.sum(num_above, 0)
        if pivot_count >= k:
            low = tl.min(min_above, 0)
            count = pivot_count
        else:
            max_value = tl.maximum(tl.max(max_below, 0), low)
    return low


@triton.jit
def _draw_from_row(
    logits_ptr, vocab_size, temperature, seed, position, max_logit, low, count_limit, mass_limit, BLOCK: tl.constexpr
):
    """Draw the row's token with the largest noisy logit among the tokens that the filters keep.

    The filters keep a token if three conditions hold. Its value is at least `low`. Fewer than `count_limit`
    tokens have larger values. The mass of these larger tokens (as in `_weigh_tokens_above`) is below `mass_limit`.
    """
    lanes = tl.arange(0, BLOCK)
    token = vocab_size
    is_rejected = True
    while is_rejected:
        lane_max = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        lane_token = tl.full([BLOCK], NO_TOKEN, dtype=tl.int32)
        for first in tl.range(0, vocab_size, BLOCK):
            tokens = first + lanes
            logits = load_logits(logits_ptr, tokens, tokens < vocab_size)
            noisy_logits = add_gumbel_noise(logits, tokens, LOG2_E / temperature, seed, position)
            is_better = (_divide_by_temperature(logits, temperature) >= low) & (noisy_logits > lane_max)
            lane_max = tl.where(is_better, noisy_logits, lane_max)
            lane_token = tl.where(is_better, tokens, lane_token)
        token = tl.min(tl.where(lane_max == tl.max(lane_max, 0), lane_token, NO_TOKEN), 0)
        # `token` is NO_TOKEN if the row has no finite logit.
        token = tl.minimum(token, vocab_size - 1)
        token_value = _divide_by_temperature(load_logits(logits_ptr, token, token < vocab_size), temperature)
        is_rejected = False
        has_limit = (count_limit < vocab_size) | (mass_limit < float("inf"))
        if has_limit & (token_value < _divide_by_temperature(max_logit, temperature)):
            count, mass, low = _weigh_tokens_above(
                logits_ptr, vocab_size, temperature, max_logit, token_value, False, BLOCK
            )
            is_rejected = (count >= count_limit) | ((count > 0) & (mass >= mass_limit))
    return token


@triton.jit
def _draw_from_candidates(values, noisy_logits, weights, tokens, low, count_limit, mass_limit):
    """Draw from candidates, like `_draw_from_row`.

    values: value of each of `tokens`; -inf for tokens that are not candidates. weights: mass of each of `tokens`.
    """
    token = NO_TOKEN
    is_rejected = True
    while is_rejected:
        candidate_scores = tl.where(values >= low, noisy_logits, float("-inf"))
        token = tl.min(tl.where(candidate_scores == tl.max(candidate_scores, 0), tokens, NO_TOKEN), 0)
        token_value = tl.max(tl.where(tokens == token, values, float("-inf")), 0)
        is_above = values > token_value
        count = tl.sum(is_above.to(tl.int32), 0)
        mass = tl.sum(tl.where(is_above, weights, 0.0), 0)
        low = tl.min(tl.where(is_above, values, float("inf")), 0)
        is_rejected = (count >= count_limit) | ((count > 0) & (mass >= mass_limit))
    return token


@triton.jit
def draw_filtered(
    logits_ptr,
    segment_maxima_ptr,
    candidate_segments_ptr,
    max_logit,
    total_mass,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    vocab_size,
    num_segments,
    MAX_DISTANCE_FROM_MAX: tl.constexpr,
    SEGMENT_TOKENS: tl.constexpr,
    PADDED_SEGMENTS: tl.constexpr,
    MAX_CANDIDATE_SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw the token of one row with filters.

    segment_maxima_ptr: the largest logit of each segment of SEGMENT_TOKENS tokens.
    candidate_segments_ptr: scratch space for MAX_CANDIDATE_SEGMENTS segment ids.
    max_logit: the largest logit, at least MIN_MAX_LOGIT.
    total_mass: sum of the masses of all tokens, which is 1 / (probability of the likeliest token).
    """
    max_value = _divide_by_temperature(max_logit, temperature)
    # Tokens below `min_drawn_value` are never drawn, and their mass does not change the float32 sum.
    min_drawn_value = max_value - MAX_DISTANCE_FROM_MAX
    min_kept_value = min_drawn_value
    if min_p > 0:
        min_kept_value = tl.maximum(min_drawn_value, tl.minimum(max_value + tl.log(min_p), max_value))
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    # top-p applies to the mass that top-k keeps, before min-p.
    has_top_k_and_top_p = has_top_k & (top_p < 1)
    low = tl.where(has_top_k_and_top_p, min_drawn_value, min_kept_value)
    count_limit = tl.where(has_top_k & (top_p >= 1), top_k, vocab_size)

    segments = tl.arange(0, PADDED_SEGMENTS)
    segment_values = tl.load(segment_maxima_ptr + segments, mask=segments < num_segments, other=float("-inf"))
    segment_values = _divide_by_temperature(segment_values, temperature)
    # If `top_k` segments have a maximum >= threshold, at least `top_k` tokens have a value >= threshold.
    min_segments = tl.where(has_top_k & (top_k <= MAX_CANDIDATE_SEGMENTS), top_k, MAX_CANDIDATE_SEGMENTS // 2)
    threshold, num_candidate_segments = _raise_threshold(
        segment_values, low, max_value, min_segments, MAX_CANDIDATE_SEGMENTS
    )
    token = -1
    if num_candidate_segments <= MAX_CANDIDATE_SEGMENTS:
        is_candidate = segment_values >= threshold
        tl.store(candidate_segments_ptr + tl.cumsum(is_candidate.to(tl.int32), 0) - 1, segments, mask=is_candidate)
        tl.debug_barrier()
        index = tl.arange(0, MAX_CANDIDATE_SEGMENTS * SEGMENT_TOKENS)
        is_gathered = index // SEGMENT_TOKENS < num_candidate_segments
        token_segments = tl.load(candidate_segments_ptr + index // SEGMENT_TOKENS, mask=is_gathered, other=0)
        tokens = token_segments * SEGMENT_TOKENS + index % SEGMENT_TOKENS
        logits = load_logits(logits_ptr, tokens, is_gathered & (tokens < vocab_size))
        values = _divide_by_temperature(logits, temperature)
        values = tl.where(values >= threshold, values, float("-inf"))
        weights = tl.where(values >= threshold, tl.exp2((logits - max_logit) * (LOG2_E / temperature)), 0.0)
        mass = tl.sum(weights, 0)
        count = tl.sum((values >= threshold).to(tl.int32), 0)
        # Whether the candidates include all tokens that the filters may keep.
        is_complete = (threshold <= low) | tl.where(
            has_top_k, count >= top_k, (top_p < 1) & (mass >= top_p * total_mass)
        )
        if is_complete:
            kept_mass = total_mass
            if has_top_k_and_top_p:
                threshold, count = _raise_threshold(values, threshold, max_value, top_k, top_k)
                kept_mass = tl.sum(tl.where(values >= threshold, weights, 0.0), 0)
            mass_limit = tl.where(top_p < 1, top_p * kept_mass, float("inf"))
            noisy_logits = add_gumbel_noise(logits, tokens, LOG2_E / temperature, seed, position)
            token = _draw_from_candidates(
                values, noisy_logits, weights, tokens, tl.maximum(threshold, min_kept_value), count_limit, mass_limit
            )
            token = tl.minimum(token, vocab_size - 1)
    if token < 0:
        kept_mass = total_mass
        if has_top_k_and_top_p:
            low = _raise_threshold_of_row(logits_ptr, vocab_size, temperature, max_logit, low, top_k, BLOCK)
            count, kept_mass, low = _weigh_tokens_above(
                logits_ptr, vocab_size, temperature, max_logit, low, True, BLOCK
            )
        mass_limit = tl.where(top_p < 1, top_p * kept_mass, float("inf"))
        low = tl.maximum(low, min_kept_value)
        token = _draw_from_row(
            logits_ptr, vocab_size, temperature, seed, position, max_logit, low, count_limit, mass_limit, BLOCK
        )
    return token
