"""Computes decodes of Gated DeltaNet with caches for drafts, on CUDA.

A program updates the state of one value head of one request. It applies the pending tokens (accepted drafts of the
previous step) and the step's first token, stores the state, and then applies the step's drafts. Pending tokens, first
tokens and drafts use the same arithmetic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.linear_attention.layer_inputs import DeltaWeights, StateBatch, layer_sizes
from nanovllm_kernels.linear_attention.triton_decode import choose_launch
from nanovllm_kernels.linear_attention.triton_gates import L2_EPS, log_decay, silu
from nanovllm_kernels.platform import can_overlap_launches


def decode(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, states: Tensor, conv_states: Tensor, batch: StateBatch, out: Tensor
) -> None:
    """Compute the package's `gated_delta_net` for decodes, and write their rows of `out`."""
    sizes = layer_sizes(weights, states, conv_states)
    num_reqs = len(batch.slots) if batch.has_drafts or batch.num_decodes is None else batch.num_decodes
    max_tokens = batch.max_query_len if batch.has_drafts else 1
    tiles, num_warps = choose_launch(sizes, num_reqs, states)
    raw_out = qkvz.new_empty((num_reqs, max_tokens, sizes.num_v_heads, sizes.v_dim), dtype=torch.float32)
    overlap = can_overlap_launches(qkvz.device)
    _decode_requests[(sizes.num_v_heads, num_reqs)](
        qkvz,
        ba,
        *weights,
        states,
        conv_states,
        batch.slots,
        batch.checkpoints,
        batch.seq_lens,
        batch.query_start_loc,
        batch.num_pending,
        raw_out,
        out,
        qkvz.stride(0),
        ba.stride(0),
        batch.checkpoints.shape[1],
        max_tokens,
        HEADS=sizes.num_v_heads,
        GROUP_SIZE=sizes.group_size,
        K_DIM=sizes.k_dim,
        V_DIM=sizes.v_dim,
        **tiles,
        NUM_CHANNELS=sizes.num_channels,
        NUM_TAPS=sizes.num_taps,
        RING_ROWS=sizes.ring_rows,
        RING_WIDTH=sizes.ring_width,
        OVERLAP=overlap,
        num_warps=num_warps,
        launch_pdl=overlap,
    )


@triton.jit
def _convolve(
    step_ptrs,
    ring_ptrs,
    weight_ptrs,
    mask,
    position,
    first_position,
    step_stride,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    RING_ROWS: tl.constexpr,
    RING_WIDTH: tl.constexpr,
):
    """Apply convolution and SiLU to one token's inputs.

    step_ptrs: inputs of the step's first token, at `first_position`.
    ring_ptrs: row 0 of the ring, from which inputs at earlier positions are read.
    """
    total = tl.zeros(mask.shape, dtype=tl.float32)
    # Add inputs in the order of `triton_decode`: first the newest input, then the other inputs, oldest first.
    for index in tl.static_range(NUM_TAPS):
        lag = (NUM_TAPS - index) % NUM_TAPS
        input_position = position - lag
        in_step = input_position >= first_position
        in_ring = (input_position < first_position) & (input_position >= 0)
        new_input = tl.load(step_ptrs + (input_position - first_position) * step_stride, mask=mask & in_step, other=0.0)
        row_offset = (input_position + RING_ROWS) % RING_ROWS * RING_WIDTH
        old_input = tl.load(ring_ptrs + row_offset, mask=mask & in_ring, other=0.0)
        x = tl.where(in_step, new_input.to(ring_ptrs.dtype.element_ty), old_input).to(tl.float32)
        total += x * tl.load(weight_ptrs + (NUM_TAPS - 1 - lag) * NUM_CHANNELS, mask=mask, other=0.0)
    return silu(total)


@triton.jit
def _prepare_token(
    qkvz_ptr,
    ba_ptr,
    ring_ptr,
    conv_weight_ptr,
    decay_rate,
    dt_bias,
    position,
    first_position,
    k_head,
    head_in_group,
    qkvz_stride,
    ba_stride,
    GROUP_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    RING_ROWS: tl.constexpr,
    RING_WIDTH: tl.constexpr,
):
    """Return the delta rule's inputs at `position`: query, key, value, decay, beta, product of key and query.

    qkvz_ptr, ba_ptr: the row at `first_position`. ring_ptr: the request's slot of `conv_states`.
    """
    k_dims, v_dims = tl.arange(0, PADDED_K), tl.arange(0, PADDED_V)
    k_mask, v_mask = k_dims < K_DIM, v_dims < V_DIM
    columns_ptr = qkvz_ptr + k_head * (2 * K_DIM + 2 * GROUP_SIZE * V_DIM)
    q_channels = k_head * (2 * K_DIM + GROUP_SIZE * V_DIM) + k_dims
    v_offsets = 2 * K_DIM + head_in_group * V_DIM + v_dims
    v_channels = k_head * (2 * K_DIM + GROUP_SIZE * V_DIM) + v_offsets
    q = _convolve(
        columns_ptr + k_dims,
        ring_ptr + q_channels,
        conv_weight_ptr + q_channels,
        k_mask,
        position,
        first_position,
        qkvz_stride,
        NUM_CHANNELS,
        NUM_TAPS,
        RING_ROWS,
        RING_WIDTH,
    )
    k = _convolve(
        columns_ptr + K_DIM + k_dims,
        ring_ptr + K_DIM + q_channels,
        conv_weight_ptr + K_DIM + q_channels,
        k_mask,
        position,
        first_position,
        qkvz_stride,
        NUM_CHANNELS,
        NUM_TAPS,
        RING_ROWS,
        RING_WIDTH,
    )
    v = _convolve(
        columns_ptr + v_offsets,
        ring_ptr + v_channels,
        conv_weight_ptr + v_channels,
        v_mask,
        position,
        first_position,
        qkvz_stride,
        NUM_CHANNELS,
        NUM_TAPS,
        RING_ROWS,
        RING_WIDTH,
    )
    q *= tl.rsqrt(tl.sum(q * q, 0) + L2_EPS) * (K_DIM**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)
    gate_offset = k_head * (2 * GROUP_SIZE) + head_in_group
    in_step = position >= first_position
    new_ptr = ba_ptr + (position - first_position) * ba_stride + gate_offset
    old_ptr = ring_ptr + (position + RING_ROWS) % RING_ROWS * RING_WIDTH + NUM_CHANNELS + gate_offset
    dtype: tl.constexpr = ring_ptr.dtype.element_ty
    new_b, old_b = (
        tl.load(new_ptr, mask=in_step, other=0.0),
        tl.load(old_ptr, mask=position < first_position, other=0.0),
    )
    new_a = tl.load(new_ptr + GROUP_SIZE, mask=in_step, other=0.0)
    old_a = tl.load(old_ptr + GROUP_SIZE, mask=position < first_position, other=0.0)
    beta = tl.sigmoid(tl.where(in_step, new_b.to(dtype), old_b).to(tl.float32))
    a = tl.where(in_step, new_a.to(dtype), old_a).to(tl.float32)
    return q, k, v, tl.exp(log_decay(a, decay_rate, dt_bias)), beta, tl.sum(k * q, 0)


@triton.jit
def _apply_token(state, q, k, v_block, decay, beta, k_dot_q):
    """Apply the delta rule to a block of rows of the state. Returns the new rows and their results."""
    state = state * decay
    delta = (v_block - tl.sum(state * k[None, :], 1)) * beta
    return state + delta[:, None] * k[None, :], tl.sum(state * q[None, :], 1) + delta * k_dot_q


@triton.jit
def _store_result(out, norm, z_ptrs, out_ptrs, mask, eps, V_DIM: tl.constexpr):
    """Apply the gated norm to one token's results of a head, and store them."""
    z = tl.load(z_ptrs, mask=mask, other=0.0)
    out *= tl.rsqrt(tl.sum(tl.sum(out * out, 1), 0) / V_DIM + eps) * norm * silu(z.to(tl.float32))
    tl.store(out_ptrs, out.to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _store_inputs(
    qkvz_ptr,
    ba_ptr,
    ring_ptr,
    first_position,
    num_tokens,
    k_head,
    head_in_group,
    qkvz_stride,
    ba_stride,
    GROUP_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    RING_ROWS: tl.constexpr,
    RING_WIDTH: tl.constexpr,
):
    """Store the inputs of the step's tokens in the ring. The program of a key head's first value head stores q and k.

    `conv_state_shape` explains why these stores overwrite no inputs that other programs still read.
    """
    k_dims, v_dims = tl.arange(0, 2 * PADDED_K), tl.arange(0, PADDED_V)
    writes_qk = (k_dims < 2 * K_DIM) & (head_in_group == 0)
    v_offsets = 2 * K_DIM + head_in_group * V_DIM + v_dims
    gate_offset = k_head * (2 * GROUP_SIZE) + head_in_group
    columns_ptr = qkvz_ptr + k_head * (2 * K_DIM + 2 * GROUP_SIZE * V_DIM)
    dtype: tl.constexpr = ring_ptr.dtype.element_ty
    for index in range(num_tokens):
        row_ptr = ring_ptr + (first_position + index) % RING_ROWS * RING_WIDTH
        channels_ptr = row_ptr + k_head * (2 * K_DIM + GROUP_SIZE * V_DIM)
        token_ptr = columns_ptr + index * qkvz_stride
        qk = tl.load(token_ptr + k_dims, mask=writes_qk, other=0.0)
        tl.store(channels_ptr + k_dims, qk.to(dtype), mask=writes_qk)
        v = tl.load(token_ptr + v_offsets, mask=v_dims < V_DIM, other=0.0)
        tl.store(channels_ptr + v_offsets, v.to(dtype), mask=v_dims < V_DIM)
        for gate in tl.static_range(2):
            gate_input = tl.load(ba_ptr + index * ba_stride + gate_offset + gate * GROUP_SIZE)
            tl.store(row_ptr + NUM_CHANNELS + gate_offset + gate * GROUP_SIZE, gate_input.to(dtype))


@triton.jit
def _save_checkpoints(
    checkpoints_ptr,
    recurrent_ptr,
    conv_ptr,
    state_ptr,
    ring_ptr,
    first_position,
    num_checkpoints,
    head,
    HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    RING_ROWS: tl.constexpr,
    RING_WIDTH: tl.constexpr,
):
    """For a checkpoint at `first_position` + 1, copy the head's state and the inputs that the next token needs.

    state_ptr, ring_ptr: the request's slot. checkpoints_ptr: the request's pairs (position, slot). The first
    value head of a key head also copies the inputs of the query and key.
    """
    k_dims, v_dims, rows = tl.arange(0, 2 * PADDED_K), tl.arange(0, PADDED_V), tl.arange(0, BLOCK_V)
    state_columns = tl.arange(0, PADDED_K)[None, :]
    state_offsets = head * (V_DIM * K_DIM) + rows[:, None] * K_DIM + state_columns
    writes_qk = (k_dims < 2 * K_DIM) & (head % GROUP_SIZE == 0)
    first_channel = head // GROUP_SIZE * (2 * K_DIM + GROUP_SIZE * V_DIM)
    v_channels = first_channel + 2 * K_DIM + head % GROUP_SIZE * V_DIM + v_dims
    for checkpoint_index in range(num_checkpoints):
        if tl.load(checkpoints_ptr + checkpoint_index * 2) == first_position + 1:
            slot = tl.load(checkpoints_ptr + checkpoint_index * 2 + 1).to(tl.int64)
            target_ptr = recurrent_ptr + slot * (HEADS * V_DIM * K_DIM)
            for first_row in range(0, V_DIM, BLOCK_V):
                mask = (first_row + rows < V_DIM)[:, None] & (state_columns < K_DIM)
                offsets = state_offsets + first_row * K_DIM
                tl.store(target_ptr + offsets, tl.load(state_ptr + offsets, mask=mask, other=0.0), mask=mask)
            target_ring_ptr = conv_ptr + slot * (RING_ROWS * RING_WIDTH)
            for lag in tl.static_range(NUM_TAPS - 1):
                row_offset = (first_position - lag + RING_ROWS) % RING_ROWS * RING_WIDTH
                qk_offsets = row_offset + first_channel + k_dims
                qk = tl.load(ring_ptr + qk_offsets, mask=writes_qk, other=0.0)
                tl.store(target_ring_ptr + qk_offsets, qk, mask=writes_qk)
                v = tl.load(ring_ptr + row_offset + v_channels, mask=v_dims < V_DIM, other=0.0)
                tl.store(target_ring_ptr + row_offset + v_channels, v, mask=v_dims < V_DIM)


@triton.jit(
    do_not_specialize=["num_checkpoints", "max_tokens"],
    do_not_specialize_on_alignment=[
        "slots_ptr",
        "checkpoints_ptr",
        "seq_lens_ptr",
        "query_start_loc_ptr",
        "num_pending_ptr",
    ],
)
def _decode_requests(
    qkvz_ptr,
    ba_ptr,
    conv_weight_ptr,
    decay_rate_ptr,
    dt_bias_ptr,
    norm_ptr,
    eps,
    recurrent_ptr,
    conv_ptr,
    slots_ptr,
    checkpoints_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    num_pending_ptr,
    raw_out_ptr,
    out_ptr,
    qkvz_stride,
    ba_stride,
    num_checkpoints,
    max_tokens,
    HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    RING_ROWS: tl.constexpr,
    RING_WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute one value head of one request. Arguments are like those of `triton_decode._decode_requests`.

    raw_out_ptr: float32 [requests, max_tokens, Hv, Dv], results before the norm.
    max_tokens: requests with more tokens are prompts, and are skipped.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    request = tl.program_id(1)
    token = tl.load(query_start_loc_ptr + request).to(tl.int64)
    num_tokens = (tl.load(query_start_loc_ptr + request + 1) - token).to(tl.int32)
    if (num_tokens == 0) | (num_tokens > max_tokens):
        return
    slot = tl.load(slots_ptr + request).to(tl.int64)
    first_position = tl.load(seq_lens_ptr + request) - num_tokens
    num_pending = tl.load(num_pending_ptr + request)
    k_head = head // GROUP_SIZE
    head_in_group = head % GROUP_SIZE
    decay_rate, dt_bias = tl.load(decay_rate_ptr + head), tl.load(dt_bias_ptr + head)
    qkvz_ptr += token * qkvz_stride
    ba_ptr += token * ba_stride
    out_ptr += token * (HEADS * V_DIM) + head * V_DIM
    raw_out_ptr += request.to(tl.int64) * max_tokens * (HEADS * V_DIM) + head * V_DIM
    ring_ptr = conv_ptr + slot * (RING_ROWS * RING_WIDTH)
    _store_inputs(
        qkvz_ptr,
        ba_ptr,
        ring_ptr,
        first_position,
        num_tokens,
        k_head,
        head_in_group,
        qkvz_stride,
        ba_stride,
        GROUP_SIZE,
        K_DIM,
        V_DIM,
        PADDED_K,
        PADDED_V,
        NUM_CHANNELS,
        RING_ROWS,
        RING_WIDTH,
    )

    k_dims, rows = tl.arange(0, PADDED_K), tl.arange(0, BLOCK_V)
    k_mask = (k_dims < K_DIM)[None, :]
    state_ptr = recurrent_ptr + slot * (HEADS * V_DIM * K_DIM)
    state_offsets = head * (V_DIM * K_DIM) + rows[:, None] * K_DIM + k_dims[None, :]
    # A request's first token uses a state of zeros.
    load_mask = k_mask & (first_position > num_pending)
    dims = tl.arange(0, NUM_BLOCKS)[:, None] * BLOCK_V + rows[None, :]
    dim_mask = dims < V_DIM
    norm = tl.load(norm_ptr + dims, mask=dim_mask, other=0.0)
    z_ptrs = qkvz_ptr + k_head * (2 * K_DIM + 2 * GROUP_SIZE * V_DIM) + 2 * K_DIM + dims
    z_ptrs += (GROUP_SIZE + head_in_group) * V_DIM
    if (num_pending == 0) & (num_tokens == 1):
        q, k, v, decay, beta, k_dot_q = _prepare_token(
            qkvz_ptr,
            ba_ptr,
            ring_ptr,
            conv_weight_ptr,
            decay_rate,
            dt_bias,
            first_position,
            first_position,
            k_head,
            head_in_group,
            qkvz_stride,
            ba_stride,
            GROUP_SIZE,
            K_DIM,
            V_DIM,
            PADDED_K,
            PADDED_V,
            NUM_CHANNELS,
            NUM_TAPS,
            RING_ROWS,
            RING_WIDTH,
        )
        # Load no other tensors in this loop: loads between the loads of states make the loop slower.
        for block in tl.range(0, NUM_BLOCKS, num_stages=STAGES):
            block_ptrs = state_ptr + state_offsets + block * (BLOCK_V * K_DIM)
            row_mask = (block * BLOCK_V + rows < V_DIM)[:, None]
            state = tl.load(block_ptrs, mask=row_mask & load_mask, other=0.0).to(tl.float32)
            v_block = v if NUM_BLOCKS == 1 else tl.gather(v, block * BLOCK_V + rows, 0)
            state, block_out = _apply_token(state, q, k, v_block, decay, beta, k_dot_q)
            tl.store(raw_out_ptr + block * BLOCK_V + rows, block_out, mask=block * BLOCK_V + rows < V_DIM)
            tl.store(block_ptrs, state.to(recurrent_ptr.dtype.element_ty), mask=row_mask & k_mask)
    else:
        for block in range(NUM_BLOCKS):
            block_ptrs = state_ptr + state_offsets + block * (BLOCK_V * K_DIM)
            row_mask = (block * BLOCK_V + rows < V_DIM)[:, None]
            state = tl.load(block_ptrs, mask=row_mask & load_mask, other=0.0).to(tl.float32)
            for position in range(first_position - num_pending, first_position + num_tokens):
                q, k, v, decay, beta, k_dot_q = _prepare_token(
                    qkvz_ptr,
                    ba_ptr,
                    ring_ptr,
                    conv_weight_ptr,
                    decay_rate,
                    dt_bias,
                    position,
                    first_position,
                    k_head,
                    head_in_group,
                    qkvz_stride,
                    ba_stride,
                    GROUP_SIZE,
                    K_DIM,
                    V_DIM,
                    PADDED_K,
                    PADDED_V,
                    NUM_CHANNELS,
                    NUM_TAPS,
                    RING_ROWS,
                    RING_WIDTH,
                )
                v_block = v if NUM_BLOCKS == 1 else tl.gather(v, block * BLOCK_V + rows, 0)
                state, block_out = _apply_token(state, q, k, v_block, decay, beta, k_dot_q)
                # The next token uses the state rounded to the stored dtype.
                rounded = state.to(recurrent_ptr.dtype.element_ty)
                tl.store(block_ptrs, rounded, mask=row_mask & k_mask & (position == first_position))
                raw_ptrs = raw_out_ptr + (position - first_position) * (HEADS * V_DIM) + block * BLOCK_V + rows
                is_row = (block * BLOCK_V + rows < V_DIM) & (position >= first_position)
                tl.store(raw_ptrs, block_out, mask=is_row)
                state = rounded.to(tl.float32)
    # The norm below reads results of other threads. The norm loads all results from memory, so that the order of its
    # sums does not depend on the branch above.
    tl.debug_barrier()
    for index in range(num_tokens):
        out = tl.load(raw_out_ptr + index * (HEADS * V_DIM) + dims, mask=dim_mask, other=0.0)
        out_ptrs = out_ptr + index * (HEADS * V_DIM) + dims
        _store_result(out, norm, z_ptrs + index * qkvz_stride, out_ptrs, dim_mask, eps, V_DIM)

    # The copies below read values that other threads of this program have stored in the states.
    tl.debug_barrier()
    _save_checkpoints(
        checkpoints_ptr + request * num_checkpoints * 2,
        recurrent_ptr,
        conv_ptr,
        state_ptr,
        ring_ptr,
        first_position,
        num_checkpoints,
        head,
        HEADS,
        GROUP_SIZE,
        K_DIM,
        V_DIM,
        PADDED_K,
        PADDED_V,
        BLOCK_V,
        NUM_TAPS,
        RING_ROWS,
        RING_WIDTH,
    )
