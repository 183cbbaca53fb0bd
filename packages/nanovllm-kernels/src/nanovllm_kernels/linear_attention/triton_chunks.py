"""Computes, for all chunks of all requests at once on CUDA, what does not depend on the recurrent states.

These are convolution, gates, and a triangular system per chunk and value head (see `reference`). A tile is a whole
chunk: rows before the request's first token or after its last are masked.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.linear_attention import DeltaWeights, StateBatch
from nanovllm_kernels.linear_attention.reference import CHECKPOINT
from nanovllm_kernels.linear_attention.triton_decode import L2_EPS, Sizes, log_decay, silu

SIZE = tl.constexpr(CHECKPOINT)
# Rows of the diagonal blocks of a triangular matrix, which are inverted row by row.
BLOCK = tl.constexpr(16)
# Least side of a tile of a matrix product. With 16, Triton 3.6 miscompiles `_solve` of 16-bit elements for Hopper: its
# results are wrong.
MIN_TILE = 32
CHANNEL_BLOCK = 1024


class Chunks(NamedTuple):
    """Results for every chunk that do not depend on states: T tokens, Hv value heads of dimension V, keys of K.

    mixed: [T, channels], convolved queries, keys and values.
    readers, new_values: [T, Hv, K] and [T, Hv, V], solutions of the system: a state S changes by
        new_values - readers S^T.
    scores: [T, Hv, CHECKPOINT], weights with which a token reads its chunk's changes.
    totals: float32 [T, Hv], logarithm of the decay since the chunk's beginning. Others: dtype of the projections.
    """

    mixed: Tensor
    readers: Tensor
    new_values: Tensor
    scores: Tensor
    totals: Tensor


def padded(dim: int) -> int:
    """Return the side of a matrix product's tile that holds `dim`."""
    return max(MIN_TILE, triton.next_power_of_2(dim))


def count_tiles(num_tokens: int, num_reqs: int) -> int:
    """Return the number of tiles that `find_chunk` numbers: at least the number of chunks, for any lengths."""
    return num_tokens // CHECKPOINT + 2 * num_reqs


def prepare(qkvz: Tensor, ba: Tensor, weights: DeltaWeights, conv: Tensor, batch: StateBatch, sizes: Sizes) -> Chunks:
    """Compute `Chunks`, and store the convolution's last inputs in the requests' slots and in slots of saved states."""
    num_tokens, num_reqs = len(qkvz), len(batch.slots)
    num_tiles = count_tiles(num_tokens, num_reqs)
    padded_k, padded_v = padded(sizes.k_dim), padded(sizes.v_dim)
    mixed = qkvz.new_empty((num_tokens, sizes.channels))
    readers = qkvz.new_empty((num_tokens, sizes.num_v_heads, sizes.k_dim))
    new_values = qkvz.new_empty((num_tokens, sizes.num_v_heads, sizes.v_dim))
    scores = qkvz.new_empty((num_tokens, sizes.num_v_heads, CHECKPOINT))
    totals = qkvz.new_empty((num_tokens, sizes.num_v_heads), dtype=torch.float32)
    _convolve[(num_tiles, 2 * sizes.num_k_heads + sizes.num_v_heads)](
        qkvz,
        weights.conv,
        conv,
        batch.slots,
        batch.seq_lens,
        batch.query_start_loc,
        mixed,
        num_reqs,
        qkvz.stride(0),
        GROUP=sizes.group,
        K_DIM=sizes.k_dim,
        V_DIM=sizes.v_dim,
        PADDED=max(padded_k, padded_v),
        CHANNELS=sizes.channels,
        WIDTH=sizes.width,
        num_warps=8,
    )
    _keep_inputs[(num_reqs, triton.cdiv(sizes.channels, CHANNEL_BLOCK))](
        qkvz,
        conv,
        batch.slots,
        batch.saves,
        batch.seq_lens,
        batch.query_start_loc,
        qkvz.stride(0),
        batch.saves.shape[1],
        PER_KEY=2 * sizes.k_dim + sizes.group * sizes.v_dim,
        GATES=sizes.group * sizes.v_dim,
        CHANNELS=sizes.channels,
        WIDTH=sizes.width,
        CHANNEL_BLOCK=CHANNEL_BLOCK,
        num_warps=4,
    )
    _solve[(num_tiles, sizes.num_v_heads)](
        mixed,
        ba,
        weights.decay,
        weights.dt_bias,
        batch.seq_lens,
        batch.query_start_loc,
        readers,
        new_values,
        scores,
        totals,
        num_reqs,
        ba.stride(0),
        HEADS=sizes.num_v_heads,
        GROUP=sizes.group,
        K_DIM=sizes.k_dim,
        V_DIM=sizes.v_dim,
        PADDED_K=padded_k,
        PADDED_V=padded_v,
        CHANNELS=sizes.channels,
        num_warps=4,
    )
    return Chunks(mixed, readers, new_values, scores, totals)


@triton.jit
def find_chunk(query_start_loc_ptr, seq_lens_ptr, num_reqs, tile):
    """Return a tile's request, the request's first token and position in this step, its length (0 if the tile is
    unused), and the chunk's first position.

    Request r's tiles are numbered from start_r // SIZE + 2 r, which leaves numbers for an incomplete first and last
    chunk. Binary search for the last request that begins at or before `tile`.
    """
    low = 0
    high = num_reqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = tl.load(query_start_loc_ptr + middle) // SIZE + 2 * middle
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle - 1)
    start = tl.load(query_start_loc_ptr + low)
    count = tl.load(query_start_loc_ptr + low + 1) - start
    seq_len = tl.load(seq_lens_ptr + low)
    first = seq_len - count
    begin = (first // SIZE + tile - (start // SIZE + 2 * low)) * SIZE
    seq_len = tl.where((count > 1) & (begin < seq_len), seq_len, 0)
    return low, start, first, seq_len, begin


@triton.jit(
    do_not_specialize=["num_reqs"],
    do_not_specialize_on_alignment=["slots_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _convolve(
    qkvz_ptr,
    weight_ptr,
    conv_ptr,
    slots_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    mixed_ptr,
    num_reqs,
    qkvz_stride,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Apply convolution and SiLU to a chunk's query, key or value head; norm queries and keys."""
    request, start, first, seq_len, begin = find_chunk(query_start_loc_ptr, seq_lens_ptr, num_reqs, tl.program_id(0))
    if seq_len == 0:
        return
    k_head = tl.program_id(1) // (2 + GROUP)
    piece = tl.program_id(1) % (2 + GROUP)
    inner = tl.where(piece < 2, piece * K_DIM, 2 * K_DIM + (piece - 2) * V_DIM)
    dim = tl.where(piece < 2, K_DIM, V_DIM)
    columns = tl.arange(0, PADDED)
    channels = k_head * (2 * K_DIM + GROUP * V_DIM) + inner + columns
    sources = k_head * (2 * K_DIM + 2 * GROUP * V_DIM) + inner + columns
    column_mask = columns < dim
    positions = begin + tl.arange(0, SIZE)
    row_mask = (positions >= first) & (positions < seq_len)
    slot_ptr = conv_ptr + tl.load(slots_ptr + request).to(tl.int64) * (WIDTH * CHANNELS)
    tokens = (start + positions - first).to(tl.int64)
    total = tl.zeros([SIZE, PADDED], dtype=tl.float32)
    for back in tl.static_range(WIDTH):
        there = positions - back
        mask = (row_mask & (there >= first))[:, None] & column_mask[None, :]
        x = tl.load(qkvz_ptr + (tokens - back)[:, None] * qkvz_stride + sources[None, :], mask=mask, other=0.0)
        x = x.to(conv_ptr.dtype.element_ty)
        if begin < first + back:
            mask = (row_mask & (there < first) & (there >= 0))[:, None] & column_mask[None, :]
            places = (there + WIDTH) % WIDTH * CHANNELS
            x += tl.load(slot_ptr + places[:, None] + channels[None, :], mask=mask, other=0.0)
        weight = tl.load(weight_ptr + (WIDTH - 1 - back) * CHANNELS + channels, mask=column_mask, other=0.0)
        total += x.to(tl.float32) * weight[None, :]
    total = silu(total)
    if piece < 2:
        scale = tl.where(piece == 0, K_DIM**-0.5, 1.0)
        total *= (tl.rsqrt(tl.sum(total * total, 1) + L2_EPS) * scale)[:, None]
    mask = row_mask[:, None] & column_mask[None, :]
    mixed_ptrs = mixed_ptr + tokens[:, None] * CHANNELS + channels[None, :]
    tl.store(mixed_ptrs, total.to(mixed_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_saves"],
    do_not_specialize_on_alignment=["slots_ptr", "saves_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _keep_inputs(
    qkvz_ptr,
    conv_ptr,
    slots_ptr,
    saves_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    qkvz_stride,
    num_saves,
    PER_KEY: tl.constexpr,
    GATES: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
):
    """Store one request's last inputs in its slot, and the inputs before each saved position in that state's slot."""
    request = tl.program_id(0)
    start = tl.load(query_start_loc_ptr + request)
    count = tl.load(query_start_loc_ptr + request + 1) - start
    if count < 2:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    first = seq_len - count
    channels = tl.program_id(1) * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    mask = channels < CHANNELS
    # Offset so that adding a position gives that token's row.
    sources = channels + channels // PER_KEY * GATES
    row_ptr = qkvz_ptr + (start - first).to(tl.int64) * qkvz_stride + sources
    slot_ptr = conv_ptr + tl.load(slots_ptr + request).to(tl.int64) * (WIDTH * CHANNELS) + channels
    for index in range(num_saves):
        save_ptr = saves_ptr + (request * num_saves + index) * 2
        at = tl.load(save_ptr)
        if (at > first) & (at <= seq_len):
            there_ptr = conv_ptr + tl.load(save_ptr + 1).to(tl.int64) * (WIDTH * CHANNELS) + channels
            for back in tl.static_range(1, WIDTH):
                place = (at - back) % WIDTH * CHANNELS
                if at - back >= first:
                    x = tl.load(row_ptr + (at - back).to(tl.int64) * qkvz_stride, mask=mask, other=0.0)
                    tl.store(there_ptr + place, x.to(conv_ptr.dtype.element_ty), mask=mask)
                else:
                    tl.store(there_ptr + place, tl.load(slot_ptr + place, mask=mask, other=0.0), mask=mask)
    # If there are fewer than WIDTH - 1 new inputs, the slot already holds the older ones.
    tl.debug_barrier()
    for back in tl.static_range(1, WIDTH):
        if back <= count:
            x = tl.load(row_ptr + (seq_len - back).to(tl.int64) * qkvz_stride, mask=mask, other=0.0)
            tl.store(slot_ptr + (seq_len - back) % WIDTH * CHANNELS, x.to(conv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _invert(a):
    """Return (1 + a)^-1 for float32 a [SIZE, SIZE] that is 0 on and above its diagonal.

    Diagonal blocks are inverted row by row, all at once. With D the diagonal of their inverses and L the blocks below,
    n = D L is nilpotent of order 4 (the number of blocks), so the inverse is (1 + n)^-1 D = (1 - n) (1 + n^2) D.
    """
    blocks: tl.constexpr = SIZE // BLOCK
    tl.static_assert(blocks == 4)
    rows = tl.arange(0, SIZE)
    within = (rows // BLOCK)[:, None] == (rows // BLOCK)[None, :]
    found = tl.sum(tl.reshape(tl.where(within, -a, 0.0), [SIZE, blocks, BLOCK]), 1)
    found = tl.reshape(found, [blocks, BLOCK, BLOCK])
    inner = tl.arange(0, BLOCK)
    for index in range(1, BLOCK):
        here = (inner == index)[None, :, None]
        row = tl.sum(tl.where(here, found, 0.0), 1)
        row += tl.sum(row[:, :, None] * found, 1)
        found = tl.where(here, row[:, None, :], found)
    wide = tl.broadcast_to(tl.reshape(found, [SIZE, 1, BLOCK]), [SIZE, blocks, BLOCK])
    eye = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    diagonal = tl.where(within, tl.reshape(wide, [SIZE, SIZE]), 0.0) + eye
    n = tl.dot(diagonal, tl.where(within, 0.0, a), input_precision="tf32x3")
    left = eye - n
    left = tl.dot(left, tl.dot(n, n, input_precision="tf32x3"), left, input_precision="tf32x3")
    return tl.dot(left, diagonal, input_precision="tf32x3")


@triton.jit(
    do_not_specialize=["num_reqs"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_loc_ptr"],
)
def _solve(
    mixed_ptr,
    ba_ptr,
    decay_ptr,
    dt_bias_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    readers_ptr,
    new_values_ptr,
    scores_ptr,
    totals_ptr,
    num_reqs,
    ba_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Solve one chunk of one value head, without the state before it; the formulas are in `reference`."""
    _, start, first, seq_len, begin = find_chunk(query_start_loc_ptr, seq_lens_ptr, num_reqs, tl.program_id(0))
    if seq_len == 0:
        return
    head = tl.program_id(1)
    k_head = head // GROUP
    place = head % GROUP
    rows = tl.arange(0, SIZE)
    positions = begin + rows
    row_mask = (positions >= first) & (positions < seq_len)
    tokens = (start + positions - first).to(tl.int64)
    ba_ptrs = ba_ptr + tokens * ba_stride + k_head * (2 * GROUP) + place
    beta = tl.sigmoid(tl.load(ba_ptrs, mask=row_mask, other=0.0).to(tl.float32))
    a = tl.load(ba_ptrs + GROUP, mask=row_mask, other=0.0).to(tl.float32)
    left = tl.where(row_mask, log_decay(a, tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)), 0.0)
    total = tl.cumsum(left, 0)
    tl.store(totals_ptr + tokens * HEADS + head, total, mask=row_mask)

    k_dims = tl.arange(0, PADDED_K)
    k_mask = row_mask[:, None] & (k_dims < K_DIM)[None, :]
    first_ptrs = mixed_ptr + tokens[:, None] * CHANNELS + k_head * (2 * K_DIM + GROUP * V_DIM)
    q = tl.load(first_ptrs + k_dims[None, :], mask=k_mask, other=0.0)
    k = tl.load(first_ptrs + K_DIM + k_dims[None, :], mask=k_mask, other=0.0)
    causal = rows[:, None] >= rows[None, :]
    between = tl.where(causal, tl.exp(tl.where(causal, total[:, None] - total[None, :], 0.0)), 0.0)
    scores = tl.dot(q, k.T, input_precision="tf32x3") * between
    scores_ptrs = scores_ptr + (tokens * HEADS + head)[:, None] * SIZE + rows[None, :]
    tl.store(scores_ptrs, scores.to(scores_ptr.dtype.element_ty), mask=row_mask[:, None])
    system = tl.dot(k, k.T, input_precision="tf32x3") * between * beta[:, None]
    inverse = _invert(tl.where(rows[:, None] > rows[None, :], system, 0.0)).to(k.dtype)

    sides = (k.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(k.dtype)
    readers = tl.dot(inverse, sides, input_precision="tf32x3")
    readers_ptrs = readers_ptr + (tokens * HEADS + head)[:, None] * K_DIM + k_dims[None, :]
    tl.store(readers_ptrs, readers.to(readers_ptr.dtype.element_ty), mask=k_mask)
    v_dims = tl.arange(0, PADDED_V)
    v_mask = row_mask[:, None] & (v_dims < V_DIM)[None, :]
    v = tl.load(first_ptrs + 2 * K_DIM + place * V_DIM + v_dims[None, :], mask=v_mask, other=0.0)
    new_values = tl.dot(inverse, (v.to(tl.float32) * beta[:, None]).to(v.dtype), input_precision="tf32x3")
    new_values_ptrs = new_values_ptr + (tokens * HEADS + head)[:, None] * V_DIM + v_dims[None, :]
    tl.store(new_values_ptrs, new_values.to(new_values_ptr.dtype.element_ty), mask=v_mask)
