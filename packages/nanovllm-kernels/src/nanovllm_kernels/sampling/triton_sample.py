"""Draws tokens on CUDA.

`_scan_chunk` reads one chunk of a row per program. `_choose_token` chooses one row's token per program.
Programs read the settings of rows from the device, so that a captured graph can be replayed with other settings.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.sampling.draw_settings import MIN_TEMPERATURE, DrawSettings
from nanovllm_kernels.sampling.triton_filter import MIN_MAX_LOGIT, NO_TOKEN, draw_filtered, is_filtered
from nanovllm_kernels.sampling.triton_noise import LOG2_E, add_gumbel_noise, load_logits

CHUNK_TOKENS = 4096
# Tokens per segment of a chunk. A segment's float32 logits are 64 bytes: two whole sectors of memory.
SEGMENT_TOKENS = 16
NUM_SCAN_WARPS = 4  # warps per program of `_scan_chunk`
NUM_CHOOSE_WARPS = 16  # warps per program of `_choose_token` with filters
# Maximum number of segments with candidates. The 8192 tokens of these segments fit the registers of one program.
MAX_CANDIDATE_SEGMENTS = 512
# Tokens per iteration if a row has candidates in more segments. The program then reads the whole row.
ROW_BLOCK_TOKENS = 8192
# Tokens whose logit / temperature is more than this number below the row's maximum are never drawn: Gumbel noise is
# between -2.9 and 22.2, so it can make up for a difference of at most 25.1.
MAX_DISTANCE_FROM_MAX = 30.0


def sample(logits: Tensor, settings: DrawSettings, positions: Tensor, all_greedy: bool, any_filter: bool) -> Tensor:
    """See the package's `sample`."""
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK_TOKENS)
    has_filters = any_filter and not all_greedy
    num_segments = num_chunks * (CHUNK_TOKENS // SEGMENT_TOKENS)
    chunk_maxima = logits.new_empty((num_rows, num_chunks), dtype=torch.float32)
    best_ids = logits.new_empty((num_rows, num_chunks), dtype=torch.int32)
    masses = torch.empty_like(chunk_maxima) if has_filters else chunk_maxima
    segment_maxima = chunk_maxima.new_empty((num_rows, num_segments)) if has_filters else chunk_maxima
    candidate_segments = best_ids.new_empty((num_rows, MAX_CANDIDATE_SEGMENTS)) if has_filters else best_ids
    out = best_ids.new_empty((num_rows,))
    _scan_chunk[(num_rows, num_chunks)](
        logits,
        *settings,
        positions,
        chunk_maxima,
        best_ids,
        masses,
        segment_maxima,
        logits.stride(0),
        vocab_size,
        ALL_GREEDY=all_greedy,
        HAS_FILTERS=has_filters,
        MIN_TEMPERATURE=MIN_TEMPERATURE,
        SEGMENT_TOKENS=SEGMENT_TOKENS,
        SEGMENTS_PER_CHUNK=CHUNK_TOKENS // SEGMENT_TOKENS,
        num_warps=NUM_SCAN_WARPS,
    )
    _choose_token[(num_rows,)](
        logits,
        *settings,
        positions,
        chunk_maxima,
        best_ids,
        masses,
        segment_maxima,
        candidate_segments,
        out,
        logits.stride(0),
        vocab_size,
        num_chunks,
        HAS_FILTERS=has_filters,
        MIN_TEMPERATURE=MIN_TEMPERATURE,
        MAX_DISTANCE_FROM_MAX=MAX_DISTANCE_FROM_MAX,
        PADDED_CHUNKS=triton.next_power_of_2(num_chunks),
        SEGMENT_TOKENS=SEGMENT_TOKENS,
        SEGMENTS_PER_CHUNK=CHUNK_TOKENS // SEGMENT_TOKENS,
        MAX_CANDIDATE_SEGMENTS=MAX_CANDIDATE_SEGMENTS,
        BLOCK=ROW_BLOCK_TOKENS,
        num_warps=NUM_CHOOSE_WARPS if has_filters else 1,
    )
    return out


@triton.jit
def _scan_chunk(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    chunk_maxima_ptr,
    best_ids_ptr,
    masses_ptr,
    segment_maxima_ptr,
    logits_stride,
    vocab_size,
    ALL_GREEDY: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    SEGMENT_TOKENS: tl.constexpr,
    SEGMENTS_PER_CHUNK: tl.constexpr,
):
    """Store a chunk's largest noisy logit and its token.

    For a filtered row, store the chunk's largest logit, the chunk's mass and each segment's largest logit instead. The
    mass is the sum of the tokens' probabilities, divided by the probability of the chunk's likeliest token.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunk_index = row * tl.num_programs(1) + chunk
    segments = tl.arange(0, SEGMENTS_PER_CHUNK)
    segment_tokens = tl.arange(0, SEGMENT_TOKENS)
    tokens = (chunk * SEGMENTS_PER_CHUNK + segments[:, None]) * SEGMENT_TOKENS + segment_tokens[None, :]
    logits = load_logits(logits_ptr + row * logits_stride, tokens, tokens < vocab_size)
    temperature = 0.0 if ALL_GREEDY else tl.load(temperature_ptr + row)
    is_random = temperature >= MIN_TEMPERATURE
    scale = LOG2_E / tl.where(is_random, temperature, 1.0)
    has_filters = False
    if HAS_FILTERS:
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        has_filters = is_filtered(temperature, top_k, top_p, min_p, vocab_size, MIN_TEMPERATURE)
    if has_filters:
        segment_maxima = tl.max(logits, 1)
        chunk_max = tl.max(segment_maxima, 0)
        mass = tl.sum(tl.sum(tl.exp2((logits - tl.maximum(chunk_max, MIN_MAX_LOGIT)) * scale), 1), 0)
        tl.store(segment_maxima_ptr + chunk_index * SEGMENTS_PER_CHUNK + segments, segment_maxima)
        tl.store(masses_ptr + chunk_index, mass)
        tl.store(chunk_maxima_ptr + chunk_index, chunk_max)
    else:
        noisy_logits = logits
        if is_random:
            noisy_logits = add_gumbel_noise(
                logits, tokens, scale, tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
            )
        chunk_max = tl.max(tl.max(noisy_logits, 1), 0)
        tl.store(chunk_maxima_ptr + chunk_index, chunk_max)
        best_id = tl.min(tl.min(tl.where(noisy_logits == chunk_max, tokens, NO_TOKEN), 1), 0)
        tl.store(best_ids_ptr + chunk_index, best_id)


@triton.jit
def _choose_token(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    chunk_maxima_ptr,
    best_ids_ptr,
    masses_ptr,
    segment_maxima_ptr,
    candidate_segments_ptr,
    out_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    HAS_FILTERS: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    MAX_DISTANCE_FROM_MAX: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    SEGMENT_TOKENS: tl.constexpr,
    SEGMENTS_PER_CHUNK: tl.constexpr,
    MAX_CANDIDATE_SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose one row's token from the results of its chunks."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, PADDED_CHUNKS)
    chunk_index = row * num_chunks + chunks
    chunk_maxima = tl.load(chunk_maxima_ptr + chunk_index, mask=chunks < num_chunks, other=float("-inf"))
    # A filtered row has no valid id here, and its token is replaced below.
    token = tl.load(best_ids_ptr + row * num_chunks + tl.argmax(chunk_maxima, 0))
    if HAS_FILTERS:
        temperature = tl.load(temperature_ptr + row)
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        if is_filtered(temperature, top_k, top_p, min_p, vocab_size, MIN_TEMPERATURE):
            max_logit = tl.maximum(tl.max(chunk_maxima, 0), MIN_MAX_LOGIT)
            masses = tl.load(masses_ptr + chunk_index, mask=chunks < num_chunks, other=0.0)
            token = draw_filtered(
                logits_ptr + row * logits_stride,
                segment_maxima_ptr + row * num_chunks * SEGMENTS_PER_CHUNK,
                candidate_segments_ptr + row * MAX_CANDIDATE_SEGMENTS,
                max_logit,
                tl.sum(masses * tl.exp2((chunk_maxima - max_logit) * (LOG2_E / temperature)), 0),
                temperature,
                top_k,
                top_p,
                min_p,
                tl.load(seeds_ptr + row),
                tl.load(positions_ptr + row),
                vocab_size,
                num_chunks * SEGMENTS_PER_CHUNK,
                MAX_DISTANCE_FROM_MAX=MAX_DISTANCE_FROM_MAX,
                SEGMENT_TOKENS=SEGMENT_TOKENS,
                PADDED_SEGMENTS=PADDED_CHUNKS * SEGMENTS_PER_CHUNK,
                MAX_CANDIDATE_SEGMENTS=MAX_CANDIDATE_SEGMENTS,
                BLOCK=BLOCK,
            )
    tl.store(out_ptr + row, token)
