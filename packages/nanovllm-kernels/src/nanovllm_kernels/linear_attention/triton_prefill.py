"""Gated DeltaNet of requests with several tokens on CUDA: prompts, whole or in chunks.

`triton_chunks` computes what does not depend on states, for all chunks at once. Then one program per request, value
head and block of value dimensions goes from chunk to chunk with the state in registers. The device finds the requests.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.linear_attention import DeltaWeights, StateBatch
from nanovllm_kernels.linear_attention.triton_chunks import SIZE, count_tiles, find_chunk, padded, prepare
from nanovllm_kernels.linear_attention.triton_decode import silu, sizes_of

# Value dimensions per program: few, so that there are enough programs.
VALUES = 32


def prefill(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    recurrent: Tensor,
    conv: Tensor,
    batch: StateBatch,
    out: Tensor,
) -> None:
    """Implement the package's `gated_delta_net` for the rows of `out` of requests with several tokens."""
    sizes = sizes_of(recurrent, conv)
    num_reqs = len(batch.slots)
    padded_k, padded_v = padded(sizes.k_dim), padded(sizes.v_dim)
    heads = {"HEADS": sizes.num_v_heads, "GROUP": sizes.group, "K_DIM": sizes.k_dim, "V_DIM": sizes.v_dim}
    chunks = prepare(qkvz, ba, weights, conv, batch, sizes)
    values = min(VALUES, padded_v)
    _scan[(triton.cdiv(sizes.v_dim, values), sizes.num_v_heads, num_reqs)](
        chunks.mixed,
        chunks.readers,
        chunks.new_values,
        chunks.scores,
        chunks.totals,
        recurrent,
        batch.slots,
        batch.saves,
        batch.seq_lens,
        batch.query_start_loc,
        out,
        batch.saves.shape[1],
        **heads,
        PADDED_K=padded_k,
        VALUES=values,
        CHANNELS=sizes.channels,
        num_warps=4,
        num_stages=2,
    )
    _norm_and_gate[(count_tiles(len(qkvz), num_reqs), sizes.num_v_heads)](
        out,
        qkvz,
        weights.norm,
        weights.eps,
        batch.seq_lens,
        batch.query_start_loc,
        num_reqs,
        qkvz.stride(0),
        **heads,
        PADDED_V=padded_v,
        num_warps=8,
    )


@triton.jit(
    do_not_specialize=["num_saves"],
    do_not_specialize_on_alignment=["slots_ptr", "saves_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _scan(
    mixed_ptr,
    readers_ptr,
    new_values_ptr,
    scores_ptr,
    totals_ptr,
    recurrent_ptr,
    slots_ptr,
    saves_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    out_ptr,
    num_saves,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED_K: tl.constexpr,
    VALUES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Process one request's chunks in order, for some of the value dimensions of one head."""
    head = tl.program_id(1)
    request = tl.program_id(2)
    start = tl.load(query_start_loc_ptr + request)
    count = tl.load(query_start_loc_ptr + request + 1) - start
    if count < 2:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    first = seq_len - count
    rows = tl.arange(0, SIZE)
    k_dims = tl.arange(0, PADDED_K)
    v_dims = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    k_mask = (k_dims < K_DIM)[None, :]
    v_mask = (v_dims < V_DIM)[None, :]
    entries = head * (V_DIM * K_DIM) + v_dims[:, None] * K_DIM + k_dims[None, :]
    state_mask = (v_dims < V_DIM)[:, None] & k_mask
    slot_size = HEADS * V_DIM * K_DIM
    state_ptrs = recurrent_ptr + tl.load(slots_ptr + request).to(tl.int64) * slot_size + entries
    state = tl.load(state_ptrs, mask=state_mask & (first > 0), other=0.0).to(tl.float32)
    first_ptr = mixed_ptr + head // GROUP * (2 * K_DIM + GROUP * V_DIM)
    for begin in range(first // SIZE * SIZE, seq_len, SIZE):
        positions = begin + rows
        row_mask = (positions >= first) & (positions < seq_len)
        tokens = (start + positions - first).to(tl.int64)
        end = tl.minimum(begin + SIZE, seq_len)
        places = (tokens * HEADS + head)[:, None]
        chunk_mask = row_mask[:, None] & k_mask
        q_ptrs = first_ptr + tokens[:, None] * CHANNELS + k_dims[None, :]
        q = tl.load(q_ptrs, mask=chunk_mask, other=0.0)
        k = tl.load(q_ptrs + K_DIM, mask=chunk_mask, other=0.0)
        readers = tl.load(readers_ptr + places * K_DIM + k_dims[None, :], mask=chunk_mask, other=0.0)
        mask = row_mask[:, None] & v_mask
        new_values = tl.load(new_values_ptr + places * V_DIM + v_dims[None, :], mask=mask, other=0.0)
        scores = tl.load(scores_ptr + places * SIZE + rows[None, :], mask=row_mask[:, None], other=0.0)
        total = tl.load(totals_ptr + tokens * HEADS + head, mask=row_mask, other=0.0)
        whole = tl.load(totals_ptr + (start + end - 1 - first).to(tl.int64) * HEADS + head)

        before = state.to(q.dtype).T
        change = new_values.to(tl.float32) - tl.dot(readers, before, input_precision="tf32x3")
        change = change.to(q.dtype)
        out = tl.dot(q, before, input_precision="tf32x3") * tl.exp(total)[:, None]
        out = tl.dot(scores, change, out, input_precision="tf32x3")
        k = (k.to(tl.float32) * tl.exp(whole - total)[:, None]).to(q.dtype)
        state = tl.dot(change.T, k, state * tl.exp(whole), input_precision="tf32x3")
        out_ptrs = out_ptr + places * V_DIM + v_dims[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
        for index in range(num_saves):
            save_ptr = saves_ptr + (request * num_saves + index) * 2
            if (tl.load(save_ptr) == begin + SIZE) & (end == begin + SIZE):
                save_ptrs = recurrent_ptr + tl.load(save_ptr + 1).to(tl.int64) * slot_size + entries
                tl.store(save_ptrs, state.to(recurrent_ptr.dtype.element_ty), mask=state_mask)
    tl.store(state_ptrs, state.to(recurrent_ptr.dtype.element_ty), mask=state_mask)


@triton.jit(
    do_not_specialize=["num_reqs"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_loc_ptr"],
)
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
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED_V: tl.constexpr,
):
    """Apply the gated norm to a chunk's results of one head, in place."""
    _, start, first, seq_len, begin = find_chunk(query_start_loc_ptr, seq_lens_ptr, num_reqs, tl.program_id(0))
    if seq_len == 0:
        return
    head = tl.program_id(1)
    positions = begin + tl.arange(0, SIZE)
    tokens = (start + positions - first).to(tl.int64)[:, None]
    dims = tl.arange(0, PADDED_V)
    mask = ((positions >= first) & (positions < seq_len))[:, None] & (dims < V_DIM)[None, :]
    out_ptrs = out_ptr + (tokens * HEADS + head) * V_DIM + dims[None, :]
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    gates = head // GROUP * (2 * K_DIM + 2 * GROUP * V_DIM) + 2 * K_DIM + (GROUP + head % GROUP) * V_DIM
    z = tl.load(qkvz_ptr + tokens * qkvz_stride + gates + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + dims, mask=dims < V_DIM, other=0.0)
    out *= tl.rsqrt(tl.sum(out * out, 1) / V_DIM + eps)[:, None] * norm[None, :]
    tl.store(out_ptrs, (out * silu(z)).to(out_ptr.dtype.element_ty), mask=mask)
