"""Computes Gated DeltaNet for requests with several tokens on CUDA.

`triton_chunks` first computes everything that does not depend on the states. After that, each program processes one
request's chunks in order, for one value head and one block of value dimensions, with the state in registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.linear_attention.layer_inputs import DeltaWeights, StateBatch, layer_sizes
from nanovllm_kernels.linear_attention.triton_chunks import (
    CHUNK,
    compute_chunks,
    find_chunk,
    max_num_chunks,
    pad_to_tile,
)
from nanovllm_kernels.linear_attention.triton_gates import silu

# Value dimensions per program of `_scan_chunks`. A small number gives enough programs for all SMs.
BLOCK_V = 32


def prefill(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, states: Tensor, conv_states: Tensor, batch: StateBatch, out: Tensor
) -> None:
    """Compute the package's `gated_delta_net` for requests with several tokens, and write their rows of `out`."""
    sizes = layer_sizes(weights, states, conv_states)
    num_reqs = len(batch.slots)
    padded_k, padded_v = pad_to_tile(sizes.k_dim), pad_to_tile(sizes.v_dim)
    head_constants = {
        "HEADS": sizes.num_v_heads,
        "GROUP_SIZE": sizes.group_size,
        "K_DIM": sizes.k_dim,
        "V_DIM": sizes.v_dim,
    }
    chunk_tensors = compute_chunks(qkvz, ba, weights, conv_states, batch, sizes)
    block_v = min(BLOCK_V, padded_v)
    _scan_chunks[(triton.cdiv(sizes.v_dim, block_v), sizes.num_v_heads, num_reqs)](
        *chunk_tensors,
        states,
        batch.slots,
        batch.checkpoints,
        batch.seq_lens,
        batch.query_start_loc,
        out,
        batch.checkpoints.shape[1],
        **head_constants,
        PADDED_K=padded_k,
        BLOCK_V=block_v,
        NUM_CHANNELS=sizes.num_channels,
        num_warps=4,
        num_stages=2,
    )
    _norm_and_gate[(max_num_chunks(len(qkvz), num_reqs), sizes.num_v_heads)](
        out,
        qkvz,
        weights.norm,
        weights.eps,
        batch.seq_lens,
        batch.query_start_loc,
        num_reqs,
        qkvz.stride(0),
        **head_constants,
        PADDED_V=padded_v,
        num_warps=8,
    )


@triton.jit(
    do_not_specialize=["num_checkpoints"],
    do_not_specialize_on_alignment=["slots_ptr", "checkpoints_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _scan_chunks(
    convolved_ptr,
    wy_keys_ptr,
    wy_values_ptr,
    scores_ptr,
    cumulative_log_decays_ptr,
    recurrent_ptr,
    slots_ptr,
    checkpoints_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    out_ptr,
    num_checkpoints,
    HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
):
    """Process one request's chunks in order, for one block of value dimensions of one head."""
    head = tl.program_id(1)
    request = tl.program_id(2)
    first_token = tl.load(query_start_loc_ptr + request)  # index in the step
    num_new_tokens = tl.load(query_start_loc_ptr + request + 1) - first_token
    if num_new_tokens < 2:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    first_position = seq_len - num_new_tokens
    rows = tl.arange(0, CHUNK)
    k_dims = tl.arange(0, PADDED_K)
    v_dims = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask = (k_dims < K_DIM)[None, :]
    v_mask = (v_dims < V_DIM)[None, :]
    state_offsets = head * (V_DIM * K_DIM) + v_dims[:, None] * K_DIM + k_dims[None, :]
    state_mask = (v_dims < V_DIM)[:, None] & k_mask
    slot_size = HEADS * V_DIM * K_DIM
    state_ptrs = recurrent_ptr + tl.load(slots_ptr + request).to(tl.int64) * slot_size + state_offsets
    state = tl.load(state_ptrs, mask=state_mask & (first_position > 0), other=0.0).to(tl.float32)
    head_ptr = convolved_ptr + head // GROUP_SIZE * (2 * K_DIM + GROUP_SIZE * V_DIM)
    for chunk_position in range(first_position // CHUNK * CHUNK, seq_len, CHUNK):
        positions = chunk_position + rows
        row_mask = (positions >= first_position) & (positions < seq_len)
        tokens = (first_token + positions - first_position).to(tl.int64)
        chunk_end = tl.minimum(chunk_position + CHUNK, seq_len)
        token_heads = (tokens * HEADS + head)[:, None]
        chunk_mask = row_mask[:, None] & k_mask
        q_ptrs = head_ptr + tokens[:, None] * NUM_CHANNELS + k_dims[None, :]
        q = tl.load(q_ptrs, mask=chunk_mask, other=0.0)
        k = tl.load(q_ptrs + K_DIM, mask=chunk_mask, other=0.0)
        wy_keys = tl.load(wy_keys_ptr + token_heads * K_DIM + k_dims[None, :], mask=chunk_mask, other=0.0)
        mask = row_mask[:, None] & v_mask
        wy_values = tl.load(wy_values_ptr + token_heads * V_DIM + v_dims[None, :], mask=mask, other=0.0)
        scores = tl.load(scores_ptr + token_heads * CHUNK + rows[None, :], mask=row_mask[:, None], other=0.0)
        cumulative_log_decay = tl.load(cumulative_log_decays_ptr + tokens * HEADS + head, mask=row_mask, other=0.0)
        chunk_log_decay = tl.load(
            cumulative_log_decays_ptr + (first_token + chunk_end - 1 - first_position).to(tl.int64) * HEADS + head
        )

        state_t = state.to(q.dtype).T
        deltas = wy_values.to(tl.float32) - tl.dot(wy_keys, state_t, input_precision="tf32x3")
        deltas = deltas.to(q.dtype)
        out = tl.dot(q, state_t, input_precision="tf32x3") * tl.exp(cumulative_log_decay)[:, None]
        out = tl.dot(scores, deltas, out, input_precision="tf32x3")
        k = (k.to(tl.float32) * tl.exp(chunk_log_decay - cumulative_log_decay)[:, None]).to(q.dtype)
        state = tl.dot(deltas.T, k, state * tl.exp(chunk_log_decay), input_precision="tf32x3")
        out_ptrs = out_ptr + token_heads * V_DIM + v_dims[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
        for checkpoint_index in range(num_checkpoints):
            checkpoint_ptr = checkpoints_ptr + (request * num_checkpoints + checkpoint_index) * 2
            if (tl.load(checkpoint_ptr) == chunk_position + CHUNK) & (chunk_end == chunk_position + CHUNK):
                checkpoint_slot = tl.load(checkpoint_ptr + 1).to(tl.int64)
                checkpoint_state_ptrs = recurrent_ptr + checkpoint_slot * slot_size + state_offsets
                tl.store(checkpoint_state_ptrs, state.to(recurrent_ptr.dtype.element_ty), mask=state_mask)
    tl.store(state_ptrs, state.to(recurrent_ptr.dtype.element_ty), mask=state_mask)


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_loc_ptr"])
def _norm_and_gate(
    out_ptr,
    qkvz_ptr,
    norm_ptr,
    eps,
    seq_lens_ptr,
    query_start_loc_ptr,
    num_reqs,
    qkvz_stride,
    HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED_V: tl.constexpr,
):
    """Apply the gated norm to one chunk's results for one head, in place."""
    _, first_token, first_position, seq_len, chunk_position = find_chunk(
        query_start_loc_ptr, seq_lens_ptr, num_reqs, tl.program_id(0)
    )
    if seq_len == 0:
        return
    head = tl.program_id(1)
    positions = chunk_position + tl.arange(0, CHUNK)
    tokens = (first_token + positions - first_position).to(tl.int64)[:, None]
    dims = tl.arange(0, PADDED_V)
    mask = ((positions >= first_position) & (positions < seq_len))[:, None] & (dims < V_DIM)[None, :]
    out_ptrs = out_ptr + (tokens * HEADS + head) * V_DIM + dims[None, :]
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    k_head_width: tl.constexpr = 2 * K_DIM + 2 * GROUP_SIZE * V_DIM
    z_ptr = qkvz_ptr + head // GROUP_SIZE * k_head_width + 2 * K_DIM + (GROUP_SIZE + head % GROUP_SIZE) * V_DIM
    z = tl.load(z_ptr + tokens * qkvz_stride + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + dims, mask=dims < V_DIM, other=0.0)
    out *= tl.rsqrt(tl.sum(out * out, 1) / V_DIM + eps)[:, None] * norm[None, :]
    tl.store(out_ptrs, (out * silu(z)).to(out_ptr.dtype.element_ty), mask=mask)
