"""Computes the part of Gated DeltaNet that does not depend on recurrent states, for all chunks in parallel, on CUDA.

A chunk is CHECKPOINT_INTERVAL positions of one prompt, and begins at a multiple of this number. A program of
`_convolve_chunks` computes the convolution of one chunk of one head. A program of `_solve_chunks` computes the chunk's
gates and solves its triangular system. Positions without a token are masked.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.linear_attention.layer_inputs import CHECKPOINT_INTERVAL, DeltaWeights, LayerSizes, StateBatch
from nanovllm_kernels.linear_attention.triton_gates import L2_EPS, log_decay, silu

CHUNK = tl.constexpr(CHECKPOINT_INTERVAL)
# Rows per block in `_invert_unit_lower`.
BLOCK = tl.constexpr(16)
# With a tile side of 16, Triton 3.6 miscompiles `_solve_chunks` of 16-bit elements for Hopper.
MIN_TILE_SIDE = 32
CHANNEL_BLOCK = 1024  # channels per program of `_save_conv_inputs`


class ChunkTensors(NamedTuple):
    """Holds the state-independent results of all chunks. Formulas: `linear_attention_reference._scan_chunks`.

    All tensors except `cumulative_log_decays` have the dtype of the projections.
    convolved: [T, C], convolved queries, keys and values.
    wy_keys, wy_values: [T, Hv, Dk] and [T, Hv, Dv], keys and values of the WY form.
    scores: [T, Hv, CHECKPOINT_INTERVAL], products of a token's query and each key of its chunk, times the decay from
        the key's token to the query's token.
    cumulative_log_decays: float32 [T, Hv], logarithm of the decay since the chunk's beginning.
    """

    convolved: Tensor
    wy_keys: Tensor
    wy_values: Tensor
    scores: Tensor
    cumulative_log_decays: Tensor


def pad_to_tile(dim: int) -> int:
    """Return the smallest supported tile side that is at least `dim`."""
    return max(MIN_TILE_SIDE, triton.next_power_of_2(dim))


def max_num_chunks(num_tokens: int, num_reqs: int) -> int:
    """Return a number that is larger than all chunk numbers of `find_chunk`."""
    return num_tokens // CHECKPOINT_INTERVAL + 2 * num_reqs


def compute_chunks(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, conv_states: Tensor, batch: StateBatch, sizes: LayerSizes
) -> ChunkTensors:
    """Compute `ChunkTensors`, and store the convolution's last inputs in the slots of requests and checkpoints."""
    num_tokens, num_reqs = len(qkvz), len(batch.slots)
    num_chunks = max_num_chunks(num_tokens, num_reqs)
    padded_k, padded_v = pad_to_tile(sizes.k_dim), pad_to_tile(sizes.v_dim)
    convolved = qkvz.new_empty((num_tokens, sizes.num_channels))
    wy_keys = qkvz.new_empty((num_tokens, sizes.num_v_heads, sizes.k_dim))
    wy_values = qkvz.new_empty((num_tokens, sizes.num_v_heads, sizes.v_dim))
    scores = qkvz.new_empty((num_tokens, sizes.num_v_heads, CHECKPOINT_INTERVAL))
    cumulative_log_decays = qkvz.new_empty((num_tokens, sizes.num_v_heads), dtype=torch.float32)
    _convolve_chunks[(num_chunks, 2 * sizes.num_k_heads + sizes.num_v_heads)](
        qkvz,
        weights.conv,
        conv_states,
        batch.slots,
        batch.seq_lens,
        batch.query_start_loc,
        convolved,
        num_reqs,
        qkvz.stride(0),
        GROUP_SIZE=sizes.group_size,
        K_DIM=sizes.k_dim,
        V_DIM=sizes.v_dim,
        PADDED=max(padded_k, padded_v),
        NUM_CHANNELS=sizes.num_channels,
        NUM_TAPS=sizes.num_taps,
        RING_ROWS=sizes.ring_rows,
        RING_WIDTH=sizes.ring_width,
        num_warps=8,
    )
    _save_conv_inputs[(num_reqs, triton.cdiv(sizes.num_channels, CHANNEL_BLOCK))](
        qkvz,
        conv_states,
        batch.slots,
        batch.checkpoints,
        batch.seq_lens,
        batch.query_start_loc,
        qkvz.stride(0),
        batch.checkpoints.shape[1],
        CHANNELS_PER_KEY_HEAD=2 * sizes.k_dim + sizes.group_size * sizes.v_dim,
        Z_COLUMNS_PER_KEY_HEAD=sizes.group_size * sizes.v_dim,  # columns of z
        NUM_CHANNELS=sizes.num_channels,
        NUM_TAPS=sizes.num_taps,
        RING_ROWS=sizes.ring_rows,
        RING_WIDTH=sizes.ring_width,
        CHANNEL_BLOCK=CHANNEL_BLOCK,
        num_warps=4,
    )
    _solve_chunks[(num_chunks, sizes.num_v_heads)](
        convolved,
        ba,
        weights.decay_rate,
        weights.dt_bias,
        batch.seq_lens,
        batch.query_start_loc,
        wy_keys,
        wy_values,
        scores,
        cumulative_log_decays,
        num_reqs,
        ba.stride(0),
        HEADS=sizes.num_v_heads,
        GROUP_SIZE=sizes.group_size,
        K_DIM=sizes.k_dim,
        V_DIM=sizes.v_dim,
        PADDED_K=padded_k,
        PADDED_V=padded_v,
        NUM_CHANNELS=sizes.num_channels,
        num_warps=4,
    )
    return ChunkTensors(convolved, wy_keys, wy_values, scores, cumulative_log_decays)


@triton.jit
def find_chunk(query_start_loc_ptr, seq_lens_ptr, num_reqs, chunk_number):
    """Find the chunk with number `chunk_number`.

    The first chunk of request r has the number query_start_loc[r] // CHUNK + 2 r. Adding 2 r reserves numbers for
    incomplete first and last chunks. A binary search finds the last r whose first chunk's number is <= `chunk_number`.

    Returns: request, index of its first token in the step, position of this token, sequence length (0 if no
        chunk has this number), position at which the chunk begins.
    """
    low = 0
    high = num_reqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        first_number = tl.load(query_start_loc_ptr + middle) // CHUNK + 2 * middle
        low = tl.where(first_number <= chunk_number, middle, low)
        high = tl.where(first_number <= chunk_number, high, middle - 1)
    first_token = tl.load(query_start_loc_ptr + low)
    num_new_tokens = tl.load(query_start_loc_ptr + low + 1) - first_token
    seq_len = tl.load(seq_lens_ptr + low)
    first_position = seq_len - num_new_tokens
    chunk_position = (first_position // CHUNK + chunk_number - (first_token // CHUNK + 2 * low)) * CHUNK
    seq_len = tl.where((num_new_tokens > 1) & (chunk_position < seq_len), seq_len, 0)
    return low, first_token, first_position, seq_len, chunk_position


@triton.jit(
    do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=["slots_ptr", "seq_lens_ptr", "query_start_loc_ptr"]
)
def _convolve_chunks(
    qkvz_ptr,
    weight_ptr,
    conv_ptr,
    slots_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    convolved_ptr,
    num_reqs,
    qkvz_stride,
    GROUP_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    RING_ROWS: tl.constexpr,
    RING_WIDTH: tl.constexpr,
):
    """Apply convolution and SiLU to a head's queries, keys or values in a chunk. Normalize q and k, and scale q."""
    request, first_token, first_position, seq_len, chunk_position = find_chunk(
        query_start_loc_ptr, seq_lens_ptr, num_reqs, tl.program_id(0)
    )
    if seq_len == 0:
        return
    k_head = tl.program_id(1) // (2 + GROUP_SIZE)
    head_part = tl.program_id(1) % (2 + GROUP_SIZE)  # 0: query head, 1: key head, 2 and on: value heads
    part_offset = tl.where(head_part < 2, head_part * K_DIM, 2 * K_DIM + (head_part - 2) * V_DIM)
    head_dim = tl.where(head_part < 2, K_DIM, V_DIM)
    columns = tl.arange(0, PADDED)
    channels = k_head * (2 * K_DIM + GROUP_SIZE * V_DIM) + part_offset + columns
    source_columns = k_head * (2 * K_DIM + 2 * GROUP_SIZE * V_DIM) + part_offset + columns
    column_mask = columns < head_dim
    positions = chunk_position + tl.arange(0, CHUNK)
    row_mask = (positions >= first_position) & (positions < seq_len)
    slot_ptr = conv_ptr + tl.load(slots_ptr + request).to(tl.int64) * (RING_ROWS * RING_WIDTH)
    tokens = (first_token + positions - first_position).to(tl.int64)
    total = tl.zeros([CHUNK, PADDED], dtype=tl.float32)
    for lag in tl.static_range(NUM_TAPS):
        input_positions = positions - lag
        mask = (row_mask & (input_positions >= first_position))[:, None] & column_mask[None, :]
        x = tl.load(qkvz_ptr + (tokens - lag)[:, None] * qkvz_stride + source_columns[None, :], mask=mask, other=0.0)
        x = x.to(conv_ptr.dtype.element_ty)
        if chunk_position < first_position + lag:
            is_stored = row_mask & (input_positions < first_position) & (input_positions >= 0)
            mask = is_stored[:, None] & column_mask[None, :]
            offsets = (input_positions + RING_ROWS) % RING_ROWS * RING_WIDTH
            x += tl.load(slot_ptr + offsets[:, None] + channels[None, :], mask=mask, other=0.0)
        weight = tl.load(weight_ptr + (NUM_TAPS - 1 - lag) * NUM_CHANNELS + channels, mask=column_mask, other=0.0)
        total += x.to(tl.float32) * weight[None, :]
    total = silu(total)
    if head_part < 2:
        scale = tl.where(head_part == 0, K_DIM**-0.5, 1.0)
        total *= (tl.rsqrt(tl.sum(total * total, 1) + L2_EPS) * scale)[:, None]
    mask = row_mask[:, None] & column_mask[None, :]
    convolved_ptrs = convolved_ptr + tokens[:, None] * NUM_CHANNELS + channels[None, :]
    tl.store(convolved_ptrs, total.to(convolved_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_checkpoints"],
    do_not_specialize_on_alignment=["slots_ptr", "checkpoints_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _save_conv_inputs(
    qkvz_ptr,
    conv_ptr,
    slots_ptr,
    checkpoints_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    qkvz_stride,
    num_checkpoints,
    CHANNELS_PER_KEY_HEAD: tl.constexpr,
    Z_COLUMNS_PER_KEY_HEAD: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    RING_ROWS: tl.constexpr,
    RING_WIDTH: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
):
    """Store one request's last inputs in its slot, and the inputs before each checkpoint in the checkpoint's slot."""
    request = tl.program_id(0)
    first_token = tl.load(query_start_loc_ptr + request)
    num_new_tokens = tl.load(query_start_loc_ptr + request + 1) - first_token
    if num_new_tokens < 2:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    first_position = seq_len - num_new_tokens
    channels = tl.program_id(1) * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    mask = channels < NUM_CHANNELS
    source_columns = channels + channels // CHANNELS_PER_KEY_HEAD * Z_COLUMNS_PER_KEY_HEAD
    # row_ptr + position * qkvz_stride is the address of the token at `position`.
    row_ptr = qkvz_ptr + (first_token - first_position).to(tl.int64) * qkvz_stride + source_columns
    slot_ptr = conv_ptr + tl.load(slots_ptr + request).to(tl.int64) * (RING_ROWS * RING_WIDTH) + channels
    for checkpoint_index in range(num_checkpoints):
        checkpoint_ptr = checkpoints_ptr + (request * num_checkpoints + checkpoint_index) * 2
        checkpoint_position = tl.load(checkpoint_ptr)
        if (checkpoint_position > first_position) & (checkpoint_position <= seq_len):
            checkpoint_slot = tl.load(checkpoint_ptr + 1).to(tl.int64)
            checkpoint_slot_ptr = conv_ptr + checkpoint_slot * (RING_ROWS * RING_WIDTH) + channels
            for lag in tl.static_range(1, NUM_TAPS):
                input_position = checkpoint_position - lag
                offset = input_position % RING_ROWS * RING_WIDTH
                if input_position >= first_position:
                    x = tl.load(row_ptr + input_position.to(tl.int64) * qkvz_stride, mask=mask, other=0.0)
                    tl.store(checkpoint_slot_ptr + offset, x.to(conv_ptr.dtype.element_ty), mask=mask)
                else:
                    tl.store(checkpoint_slot_ptr + offset, tl.load(slot_ptr + offset, mask=mask, other=0.0), mask=mask)
    # The loads from the slot must precede the stores to the slot below.
    tl.debug_barrier()
    for lag in tl.static_range(1, NUM_TAPS):
        if lag <= num_new_tokens:
            x = tl.load(row_ptr + (seq_len - lag).to(tl.int64) * qkvz_stride, mask=mask, other=0.0)
            tl.store(slot_ptr + (seq_len - lag) % RING_ROWS * RING_WIDTH, x.to(conv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _invert_unit_lower(a):
    """Return (1 + a)^-1 for float32 a [CHUNK, CHUNK] that is 0 on and above its diagonal.

    All diagonal blocks of 1 + a are inverted in parallel, row by row. D is block-diagonal and holds these inverses. L
    holds the blocks of `a` below the diagonal. n = D L satisfies n^4 = 0, because there are four blocks. The result is
    therefore (1 + n)^-1 D = (1 - n) (1 + n^2) D.
    """
    num_blocks: tl.constexpr = CHUNK // BLOCK
    tl.static_assert(num_blocks == 4)
    rows = tl.arange(0, CHUNK)
    is_diagonal_block = (rows // BLOCK)[:, None] == (rows // BLOCK)[None, :]
    inverses = tl.sum(tl.reshape(tl.where(is_diagonal_block, -a, 0.0), [CHUNK, num_blocks, BLOCK]), 1)
    inverses = tl.reshape(inverses, [num_blocks, BLOCK, BLOCK])
    block_rows = tl.arange(0, BLOCK)
    for block_row in range(1, BLOCK):
        is_current_row = (block_rows == block_row)[None, :, None]
        row = tl.sum(tl.where(is_current_row, inverses, 0.0), 1)
        row += tl.sum(row[:, :, None] * inverses, 1)
        inverses = tl.where(is_current_row, row[:, None, :], inverses)
    repeated = tl.broadcast_to(tl.reshape(inverses, [CHUNK, 1, BLOCK]), [CHUNK, num_blocks, BLOCK])
    eye = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    diagonal = tl.where(is_diagonal_block, tl.reshape(repeated, [CHUNK, CHUNK]), 0.0) + eye
    n = tl.dot(diagonal, tl.where(is_diagonal_block, 0.0, a), input_precision="tf32x3")
    series = eye - n
    series = tl.dot(series, tl.dot(n, n, input_precision="tf32x3"), series, input_precision="tf32x3")
    return tl.dot(series, diagonal, input_precision="tf32x3")


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_loc_ptr"])
def _solve_chunks(
    convolved_ptr,
    ba_ptr,
    decay_rate_ptr,
    dt_bias_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    wy_keys_ptr,
    wy_values_ptr,
    scores_ptr,
    cumulative_log_decays_ptr,
    num_reqs,
    ba_stride,
    HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
):
    """Compute one value head's scores, WY keys and WY values in one chunk. Formulas: see `ChunkTensors`."""
    _, first_token, first_position, seq_len, chunk_position = find_chunk(
        query_start_loc_ptr, seq_lens_ptr, num_reqs, tl.program_id(0)
    )
    if seq_len == 0:
        return
    head = tl.program_id(1)
    k_head = head // GROUP_SIZE
    head_in_group = head % GROUP_SIZE
    rows = tl.arange(0, CHUNK)
    positions = chunk_position + rows
    row_mask = (positions >= first_position) & (positions < seq_len)
    tokens = (first_token + positions - first_position).to(tl.int64)
    ba_ptrs = ba_ptr + tokens * ba_stride + k_head * (2 * GROUP_SIZE) + head_in_group
    beta = tl.sigmoid(tl.load(ba_ptrs, mask=row_mask, other=0.0).to(tl.float32))
    a = tl.load(ba_ptrs + GROUP_SIZE, mask=row_mask, other=0.0).to(tl.float32)
    decay_rate, dt_bias = tl.load(decay_rate_ptr + head), tl.load(dt_bias_ptr + head)
    token_log_decays = tl.where(row_mask, log_decay(a, decay_rate, dt_bias), 0.0)
    cumulative = tl.cumsum(token_log_decays, 0)
    tl.store(cumulative_log_decays_ptr + tokens * HEADS + head, cumulative, mask=row_mask)

    k_dims = tl.arange(0, PADDED_K)
    k_mask = row_mask[:, None] & (k_dims < K_DIM)[None, :]
    head_ptrs = convolved_ptr + tokens[:, None] * NUM_CHANNELS + k_head * (2 * K_DIM + GROUP_SIZE * V_DIM)
    q = tl.load(head_ptrs + k_dims[None, :], mask=k_mask, other=0.0)
    k = tl.load(head_ptrs + K_DIM + k_dims[None, :], mask=k_mask, other=0.0)
    causal = rows[:, None] >= rows[None, :]
    pair_decay = tl.where(causal, tl.exp(tl.where(causal, cumulative[:, None] - cumulative[None, :], 0.0)), 0.0)
    scores = tl.dot(q, k.T, input_precision="tf32x3") * pair_decay
    scores_ptrs = scores_ptr + (tokens * HEADS + head)[:, None] * CHUNK + rows[None, :]
    tl.store(scores_ptrs, scores.to(scores_ptr.dtype.element_ty), mask=row_mask[:, None])
    system = tl.dot(k, k.T, input_precision="tf32x3") * pair_decay * beta[:, None]
    inverse = _invert_unit_lower(tl.where(rows[:, None] > rows[None, :], system, 0.0)).to(k.dtype)

    right_sides = (k.to(tl.float32) * (beta * tl.exp(cumulative))[:, None]).to(k.dtype)
    wy_keys = tl.dot(inverse, right_sides, input_precision="tf32x3")
    wy_keys_ptrs = wy_keys_ptr + (tokens * HEADS + head)[:, None] * K_DIM + k_dims[None, :]
    tl.store(wy_keys_ptrs, wy_keys.to(wy_keys_ptr.dtype.element_ty), mask=k_mask)
    v_dims = tl.arange(0, PADDED_V)
    v_mask = row_mask[:, None] & (v_dims < V_DIM)[None, :]
    v = tl.load(head_ptrs + 2 * K_DIM + head_in_group * V_DIM + v_dims[None, :], mask=v_mask, other=0.0)
    wy_values = tl.dot(inverse, (v.to(tl.float32) * beta[:, None]).to(v.dtype), input_precision="tf32x3")
    wy_values_ptrs = wy_values_ptr + (tokens * HEADS + head)[:, None] * V_DIM + v_dims[None, :]
    tl.store(wy_values_ptrs, wy_values.to(wy_values_ptr.dtype.element_ty), mask=v_mask)
