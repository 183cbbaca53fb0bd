"""Computes Gated DeltaNet for requests with one token, on CUDA: convolution, recurrence and gated norm in one kernel.

A program updates the state of one value head of one request, and convolves the query and key of its key head. The
convolution state is a ring of NUM_TAPS rows, one per token. The program of a key head's first value head stores the new
query and key inputs. New inputs replace the oldest row, which the convolution no longer reads.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.linear_attention.layer_inputs import DeltaWeights, LayerSizes, StateBatch, layer_sizes
from nanovllm_kernels.linear_attention.triton_gates import L2_EPS, log_decay, silu
from nanovllm_kernels.platform import INTERPRETER_SMS, can_overlap_launches, describe_device

# State elements per warp, if a program loads its whole state at once.
ELEMENTS_PER_WARP = 4096
# Rows per block, by bytes per element. A launch with more than two programs per SM loads states in blocks of rows.
BLOCK_ROWS_BY_BYTES = {4: 8, 2: 16}
# State elements per warp, and pipeline stages, if programs load states in blocks.
BLOCKED_ELEMENTS_PER_WARP = 1024
BLOCKS_IN_FLIGHT = 4


def decode(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, states: Tensor, conv_states: Tensor, batch: StateBatch, out: Tensor
) -> None:
    """Compute the package's `gated_delta_net` for requests with one token, and write their rows of `out`."""
    sizes = layer_sizes(weights, states, conv_states)
    num_reqs = len(batch.slots) if batch.num_decodes is None else batch.num_decodes
    tiles, num_warps = choose_launch(sizes, num_reqs, states)
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
        out,
        qkvz.stride(0),
        ba.stride(0),
        batch.checkpoints.shape[1],
        HEADS=sizes.num_v_heads,
        GROUP_SIZE=sizes.group_size,
        K_DIM=sizes.k_dim,
        V_DIM=sizes.v_dim,
        **tiles,
        NUM_CHANNELS=sizes.num_channels,
        NUM_TAPS=sizes.num_taps,
        OVERLAP=overlap,
        num_warps=num_warps,
        launch_pdl=overlap,
    )


def choose_launch(sizes: LayerSizes, num_reqs: int, states: Tensor) -> tuple[dict[str, int], int]:
    """Return a program's tile constants and number of warps. A program computes one value head of one request."""
    padded_k, padded_v = triton.next_power_of_2(sizes.k_dim), triton.next_power_of_2(sizes.v_dim)
    is_large_launch = sizes.num_v_heads * num_reqs > 2 * (describe_device(states.device).num_sms or INTERPRETER_SMS)
    block_v = min(BLOCK_ROWS_BY_BYTES[states.element_size()], padded_v) if is_large_launch else padded_v
    num_warps = padded_k * block_v // (BLOCKED_ELEMENTS_PER_WARP if is_large_launch else ELEMENTS_PER_WARP)
    tiles = {
        "PADDED_K": padded_k,
        "PADDED_V": padded_v,
        "BLOCK_V": block_v,
        "NUM_BLOCKS": padded_v // block_v,
        "STAGES": BLOCKS_IN_FLIGHT if block_v < padded_v else 1,
    }
    return tiles, max(1, min(8, num_warps))


@triton.jit
def _convolve(
    new_input_ptrs,
    conv_state_ptr,
    weight_ptr,
    channels,
    mask,
    write_mask,
    position,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
):
    """Apply convolution and SiLU to one token's inputs. write_mask: channels whose inputs are stored."""
    new_input = tl.load(new_input_ptrs, mask=mask, other=0.0).to(conv_state_ptr.dtype.element_ty)
    weight = tl.load(weight_ptr + (NUM_TAPS - 1) * NUM_CHANNELS + channels, mask=mask, other=0.0)
    total = new_input.to(tl.float32) * weight
    for tap in tl.static_range(NUM_TAPS - 1):
        tap_position = position - (NUM_TAPS - 1) + tap
        old_input_ptrs = conv_state_ptr + (tap_position + NUM_TAPS) % NUM_TAPS * NUM_CHANNELS + channels
        old_input = tl.load(old_input_ptrs, mask=mask & (tap_position >= 0), other=0.0).to(tl.float32)
        total += old_input * tl.load(weight_ptr + tap * NUM_CHANNELS + channels, mask=mask, other=0.0)
    tl.store(conv_state_ptr + position % NUM_TAPS * NUM_CHANNELS + channels, new_input, mask=write_mask)
    return silu(total)


@triton.jit
def _copy_conv_inputs(source_ptr, target_ptr, channels, mask, NUM_CHANNELS: tl.constexpr, NUM_TAPS: tl.constexpr):
    for tap in tl.static_range(NUM_TAPS):
        offsets = tap * NUM_CHANNELS + channels
        tl.store(target_ptr + offsets, tl.load(source_ptr + offsets, mask=mask, other=0.0), mask=mask)


@triton.jit(
    do_not_specialize=["num_checkpoints"],
    do_not_specialize_on_alignment=["slots_ptr", "checkpoints_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
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
    out_ptr,
    qkvz_stride,
    ba_stride,
    num_checkpoints,
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
    OVERLAP: tl.constexpr,
):
    """Compute one value head of one request.

    recurrent_ptr: `states`. conv_ptr: `conv_states`.
    checkpoints_ptr: each request's pairs (sequence length at which the states are copied, slot that receives the copy).
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    request = tl.program_id(1)
    token = tl.load(query_start_loc_ptr + request).to(tl.int64)
    if tl.load(query_start_loc_ptr + request + 1) - token != 1:
        return
    slot = tl.load(slots_ptr + request).to(tl.int64)
    position = tl.load(seq_lens_ptr + request) - 1
    k_head = head // GROUP_SIZE
    head_in_group = head % GROUP_SIZE

    k_dims, v_dims = tl.arange(0, PADDED_K), tl.arange(0, PADDED_V)
    k_mask, v_mask = k_dims < K_DIM, v_dims < V_DIM
    rows = tl.arange(0, BLOCK_V)
    state_ptr = recurrent_ptr + slot * (HEADS * V_DIM * K_DIM)
    state_offsets = head * (V_DIM * K_DIM) + rows[:, None] * K_DIM + k_dims[None, :]
    # A request's first token uses a state of zeros.
    load_mask = k_mask[None, :] & (position > 0)

    qkvz_ptr += token * qkvz_stride + k_head * (2 * K_DIM + 2 * GROUP_SIZE * V_DIM)
    conv_state_ptr = conv_ptr + slot * (NUM_TAPS * NUM_CHANNELS)
    q_channels = k_head * (2 * K_DIM + GROUP_SIZE * V_DIM) + k_dims
    k_channels = q_channels + K_DIM
    v_offsets = 2 * K_DIM + head_in_group * V_DIM + v_dims
    v_channels = k_head * (2 * K_DIM + GROUP_SIZE * V_DIM) + v_offsets
    writes_qk = k_mask & (head_in_group == 0)
    q = _convolve(
        qkvz_ptr + k_dims,
        conv_state_ptr,
        conv_weight_ptr,
        q_channels,
        k_mask,
        writes_qk,
        position,
        NUM_CHANNELS,
        NUM_TAPS,
    )
    k_ptrs = qkvz_ptr + K_DIM + k_dims
    k = _convolve(
        k_ptrs, conv_state_ptr, conv_weight_ptr, k_channels, k_mask, writes_qk, position, NUM_CHANNELS, NUM_TAPS
    )
    v_ptrs = qkvz_ptr + v_offsets
    v = _convolve(v_ptrs, conv_state_ptr, conv_weight_ptr, v_channels, v_mask, v_mask, position, NUM_CHANNELS, NUM_TAPS)
    q *= tl.rsqrt(tl.sum(q * q, 0) + L2_EPS) * (K_DIM**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)

    ba_ptr += token * ba_stride + k_head * (2 * GROUP_SIZE) + head_in_group
    beta = tl.sigmoid(tl.load(ba_ptr).to(tl.float32))
    a = tl.load(ba_ptr + GROUP_SIZE).to(tl.float32)
    state_decay = tl.exp(log_decay(a, tl.load(decay_rate_ptr + head), tl.load(dt_bias_ptr + head)))
    k_dot_q = tl.sum(k * q, 0)
    out = tl.zeros([NUM_BLOCKS, BLOCK_V], dtype=tl.float32)
    # Load no other tensors in this loop: loads between the loads of states make the loop slower.
    for block in tl.range(0, NUM_BLOCKS, num_stages=STAGES):
        first_row = block * BLOCK_V
        row_mask = (first_row + rows < V_DIM)[:, None]
        state = tl.load(state_ptr + state_offsets + first_row * K_DIM, mask=row_mask & load_mask, other=0.0)
        state = state.to(tl.float32) * state_decay
        v_block = v if NUM_BLOCKS == 1 else tl.gather(v, first_row + rows, 0)
        delta = (v_block - tl.sum(state * k[None, :], 1)) * beta
        # `block_out` is the new state times q, without a second pass over the state.
        block_out = tl.sum(state * q[None, :], 1) + delta * k_dot_q
        out = tl.where((tl.arange(0, NUM_BLOCKS) == block)[:, None], block_out[None, :], out)
        new_state = (state + delta[:, None] * k[None, :]).to(recurrent_ptr.dtype.element_ty)
        tl.store(state_ptr + state_offsets + first_row * K_DIM, new_state, mask=row_mask & k_mask[None, :])

    dims = tl.arange(0, NUM_BLOCKS)[:, None] * BLOCK_V + rows[None, :]
    norm = tl.load(norm_ptr + dims, mask=dims < V_DIM, other=0.0)
    z = tl.load(qkvz_ptr + 2 * K_DIM + (GROUP_SIZE + head_in_group) * V_DIM + dims, mask=dims < V_DIM, other=0.0)
    out *= tl.rsqrt(tl.sum(tl.sum(out * out, 1), 0) / V_DIM + eps) * norm * silu(z.to(tl.float32))
    out_ptrs = out_ptr + token * (HEADS * V_DIM) + head * V_DIM + dims
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=dims < V_DIM)

    # The copies below read values that other threads of this program have stored in the states.
    tl.debug_barrier()
    for checkpoint_index in range(num_checkpoints):
        checkpoint_ptr = checkpoints_ptr + (request * num_checkpoints + checkpoint_index) * 2
        if tl.load(checkpoint_ptr) == position + 1:
            checkpoint_slot = tl.load(checkpoint_ptr + 1).to(tl.int64)
            checkpoint_state_ptr = recurrent_ptr + checkpoint_slot * (HEADS * V_DIM * K_DIM)
            for first_row in range(0, V_DIM, BLOCK_V):
                block_offsets = state_offsets + first_row * K_DIM
                mask = (first_row + rows < V_DIM)[:, None] & k_mask[None, :]
                block_state = tl.load(state_ptr + block_offsets, mask=mask, other=0.0)
                tl.store(checkpoint_state_ptr + block_offsets, block_state, mask=mask)
            checkpoint_conv_ptr = conv_ptr + checkpoint_slot * (NUM_TAPS * NUM_CHANNELS)
            _copy_conv_inputs(conv_state_ptr, checkpoint_conv_ptr, q_channels, writes_qk, NUM_CHANNELS, NUM_TAPS)
            _copy_conv_inputs(conv_state_ptr, checkpoint_conv_ptr, k_channels, writes_qk, NUM_CHANNELS, NUM_TAPS)
            _copy_conv_inputs(conv_state_ptr, checkpoint_conv_ptr, v_channels, v_mask, NUM_CHANNELS, NUM_TAPS)
