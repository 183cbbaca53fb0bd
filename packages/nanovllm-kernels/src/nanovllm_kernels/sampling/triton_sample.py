"""The draw on CUDA: one pass over the logits by one program per chunk, then one program per row.

The pass leaves each chunk's best token with Gumbel noise; of rows with filters it leaves maxima and masses instead, see
`triton_filter`. The device reads a row's kind, so that a captured graph serves any mixture.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.sampling.reference import MIN_TEMPERATURE
from nanovllm_kernels.sampling.triton_filter import LOWEST, NO_TOKEN, draw_filtered, is_filtered
from nanovllm_kernels.sampling.triton_noise import LOG2_E, load_logits, scores

# Tokens per program, and tokens per segment, whose maximum is stored: 64 bytes of float32, so that gathering a segment
# wastes no bandwidth.
CHUNK = 4096
SEGMENT = 16
SCAN_WARPS = 4
CHOOSE_WARPS = 16
# Most segments that a filtered row gathers: 8192 candidates, which fit the registers of one program.
HITS = 512
# Tokens processed at once if the gathered candidates are not enough.
ROW_BLOCK = 8192

# Noise lies between -2.9 and 22.2: logits this far below the largest are never drawn.
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
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    filtered = any_filter and not all_greedy
    num_segments = num_chunks * (CHUNK // SEGMENT)
    best = logits.new_empty((num_rows, num_chunks), dtype=torch.float32)
    best_ids = logits.new_empty((num_rows, num_chunks), dtype=torch.int32)
    masses = torch.empty_like(best) if filtered else best
    peaks = best.new_empty((num_rows, num_segments)) if filtered else best
    hits = best_ids.new_empty((num_rows, HITS)) if filtered else best_ids
    out = best_ids.new_empty((num_rows,))
    settings = (temperature, top_k, top_p, min_p, seeds, positions)
    _scan_chunk[(num_rows, num_chunks)](
        logits,
        *settings,
        best,
        best_ids,
        masses,
        peaks,
        logits.stride(0),
        vocab_size,
        ALL_GREEDY=all_greedy,
        FILTER=filtered,
        MIN_TEMPERATURE=MIN_TEMPERATURE,
        SEGMENT=SEGMENT,
        SEGMENTS=CHUNK // SEGMENT,
        num_warps=SCAN_WARPS,
    )
    _choose[(num_rows,)](
        logits,
        *settings,
        best,
        best_ids,
        masses,
        peaks,
        hits,
        out,
        logits.stride(0),
        vocab_size,
        num_chunks,
        FILTER=filtered,
        MIN_TEMPERATURE=MIN_TEMPERATURE,
        NEVER_DRAWN=NEVER_DRAWN,
        PADDED_CHUNKS=triton.next_power_of_2(num_chunks),
        SEGMENT=SEGMENT,
        SEGMENTS=CHUNK // SEGMENT,
        HITS=HITS,
        BLOCK=ROW_BLOCK,
        num_warps=CHOOSE_WARPS if filtered else 1,
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
    best_ptr,
    best_ids_ptr,
    masses_ptr,
    peaks_ptr,
    logits_stride,
    vocab_size,
    ALL_GREEDY: tl.constexpr,
    FILTER: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Store one chunk's best token; for a filtered row the chunk's maximum, mass and segment maxima."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = row * tl.num_programs(1) + chunk
    segments = tl.arange(0, SEGMENTS)
    tokens = chunk * (SEGMENTS * SEGMENT) + segments[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    logits = load_logits(logits_ptr + row * logits_stride, tokens, tokens < vocab_size)
    temperature = 0.0 if ALL_GREEDY else tl.load(temperature_ptr + row)
    random = temperature >= MIN_TEMPERATURE
    scale = LOG2_E / tl.where(random, temperature, 1.0)
    filtered = False
    if FILTER:
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        filtered = is_filtered(temperature, top_k, top_p, min_p, vocab_size, MIN_TEMPERATURE)
    if filtered:
        peaks = tl.max(logits, 1)
        best = tl.max(peaks, 0)
        mass = tl.sum(tl.sum(tl.exp2((logits - tl.maximum(best, LOWEST)) * scale), 1), 0)
        tl.store(peaks_ptr + place * SEGMENTS + segments, peaks)
        tl.store(masses_ptr + place, mass)
        tl.store(best_ptr + place, best)
    else:
        values = logits
        if random:
            values = scores(logits, tokens, scale, tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        best = tl.max(tl.max(values, 1), 0)
        tl.store(best_ptr + place, best)
        tl.store(best_ids_ptr + place, tl.min(tl.min(tl.where(values == best, tokens, NO_TOKEN), 1), 0))


@triton.jit
def _choose(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    best_ptr,
    best_ids_ptr,
    masses_ptr,
    peaks_ptr,
    hits_ptr,
    out_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    FILTER: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    NEVER_DRAWN: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose one row's token from the results of its chunks."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, PADDED_CHUNKS)
    place = row * num_chunks + chunks
    best = tl.load(best_ptr + place, mask=chunks < num_chunks, other=float("-inf"))
    # For a filtered row this id is undefined, and replaced below.
    token = tl.load(best_ids_ptr + row * num_chunks + tl.argmax(best, 0))
    if FILTER:
        temperature = tl.load(temperature_ptr + row)
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        if is_filtered(temperature, top_k, top_p, min_p, vocab_size, MIN_TEMPERATURE):
            peak = tl.maximum(tl.max(best, 0), LOWEST)
            masses = tl.load(masses_ptr + place, mask=chunks < num_chunks, other=0.0)
            token = draw_filtered(
                logits_ptr + row * logits_stride,
                peaks_ptr + row * num_chunks * SEGMENTS,
                hits_ptr + row * HITS,
                peak,
                tl.sum(masses * tl.exp2((best - peak) * (LOG2_E / temperature)), 0),
                temperature,
                top_k,
                top_p,
                min_p,
                tl.load(seeds_ptr + row),
                tl.load(positions_ptr + row),
                vocab_size,
                num_chunks * SEGMENTS,
                NEVER_DRAWN=NEVER_DRAWN,
                SEGMENT=SEGMENT,
                PADDED_SEGMENTS=PADDED_CHUNKS * SEGMENTS,
                HITS=HITS,
                BLOCK=BLOCK,
            )
    tl.store(out_ptr + row, token)
