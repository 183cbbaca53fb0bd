"""Gated DeltaNet of requests with one token each, on CUDA: from the projections to the gated norm in one kernel.

A program reads and writes the state of one value head: all rows at once if there are few programs, else in pipelined
blocks. All programs of a key head convolve its query and key: no program reads the position to which one writes.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.attention.plan import tile_configs
from nanovllm_kernels.linear_attention import DeltaWeights, StateBatch
from nanovllm_kernels.linear_attention.reference import NORM_EPS
from nanovllm_kernels.platform import can_overlap_launches, describe

L2_EPS = tl.constexpr(NORM_EPS)
# With few programs: elements of a state per warp.
WARP_ELEMENTS = 4096
# With many programs, several per SM: rows of a state loaded at once, by element size in bytes; elements of these per
# warp; and blocks in flight. Chosen on an H200 for Qwen3-Next's layer, where other choices were up to 12% slower.
BLOCK_ROWS = {4: 8, 2: 16}
BLOCK_WARP_ELEMENTS = 1024
BLOCKS_ON_THEIR_WAY = 4


class Sizes(NamedTuple):
    """A layer's key heads, value heads, their dimensions, and the convolution's channels and taps."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    channels: int
    width: int

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.num_v_heads // self.num_k_heads


def sizes_of(recurrent: Tensor, conv: Tensor) -> Sizes:
    """Derive the sizes from the caches' shapes, see the package's `gated_delta_net`."""
    _, num_v_heads, v_dim, k_dim = recurrent.shape
    _, width, channels = conv.shape
    return Sizes((channels - num_v_heads * v_dim) // (2 * k_dim), num_v_heads, k_dim, v_dim, channels, width)


def step(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    recurrent: Tensor,
    conv: Tensor,
    batch: StateBatch,
    out: Tensor,
) -> None:
    """Implement the package's `gated_delta_net` for the rows of `out` of requests with one token."""
    sizes = sizes_of(recurrent, conv)
    num_reqs = len(batch.slots) if batch.num_decodes is None else batch.num_decodes
    padded_k, padded_v = triton.next_power_of_2(sizes.k_dim), triton.next_power_of_2(sizes.v_dim)
    overlap = can_overlap_launches(qkvz.device)
    many = sizes.num_v_heads * num_reqs > 2 * (describe(qkvz.device).num_sms or tile_configs.INTERPRETER_SMS)
    block_v = min(BLOCK_ROWS[recurrent.element_size()], padded_v) if many else padded_v
    num_warps = padded_k * block_v // (BLOCK_WARP_ELEMENTS if many else WARP_ELEMENTS)
    _step[(sizes.num_v_heads, num_reqs)](
        qkvz,
        ba,
        weights.conv,
        weights.decay,
        weights.dt_bias,
        weights.norm,
        weights.eps,
        recurrent,
        conv,
        batch.slots,
        batch.saves,
        batch.seq_lens,
        batch.query_start_loc,
        out,
        qkvz.stride(0),
        ba.stride(0),
        batch.saves.shape[1],
        HEADS=sizes.num_v_heads,
        GROUP=sizes.group,
        K_DIM=sizes.k_dim,
        V_DIM=sizes.v_dim,
        PADDED_K=padded_k,
        PADDED_V=padded_v,
        BLOCK_V=block_v,
        BLOCKS=padded_v // block_v,
        STAGES=BLOCKS_ON_THEIR_WAY if block_v < padded_v else 1,
        CHANNELS=sizes.channels,
        WIDTH=sizes.width,
        OVERLAP=overlap,
        num_warps=max(1, min(8, num_warps)),
        launch_pdl=overlap,
    )


@triton.jit
def log_decay(a, decay, dt_bias):
    """Return the logarithm of a state's decay, from its gate `a`."""
    x = a + dt_bias
    return -decay * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def silu(x):
    """Return x times its sigmoid."""
    return x * tl.sigmoid(x)


@triton.jit
def _convolve(
    new_ptrs,
    slot_ptr,
    weight_ptr,
    channels,
    mask,
    writes,
    position,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Apply convolution and SiLU to one token's inputs at `new_ptrs`; store the inputs in the slot where `writes`."""
    new = tl.load(new_ptrs, mask=mask, other=0.0).to(slot_ptr.dtype.element_ty)
    total = new.to(tl.float32) * tl.load(weight_ptr + (WIDTH - 1) * CHANNELS + channels, mask=mask, other=0.0)
    for tap in tl.static_range(WIDTH - 1):
        there = position - (WIDTH - 1) + tap
        old_ptrs = slot_ptr + (there + WIDTH) % WIDTH * CHANNELS + channels
        old = tl.load(old_ptrs, mask=mask & (there >= 0), other=0.0).to(tl.float32)
        total += old * tl.load(weight_ptr + tap * CHANNELS + channels, mask=mask, other=0.0)
    tl.store(slot_ptr + position % WIDTH * CHANNELS + channels, new, mask=writes)
    return silu(total)


@triton.jit
def _save_inputs(from_ptr, to_ptr, channels, mask, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """Copy the convolution's inputs from one slot to another."""
    for tap in tl.static_range(WIDTH):
        at = tap * CHANNELS + channels
        tl.store(to_ptr + at, tl.load(from_ptr + at, mask=mask, other=0.0), mask=mask)


@triton.jit(
    do_not_specialize=["num_saves"],
    do_not_specialize_on_alignment=["slots_ptr", "saves_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _step(
    qkvz_ptr,
    ba_ptr,
    conv_weight_ptr,
    decay_ptr,
    dt_bias_ptr,
    norm_ptr,
    eps,
    recurrent_ptr,
    conv_ptr,
    slots_ptr,
    saves_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    out_ptr,
    qkvz_stride,
    ba_stride,
    num_saves,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
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
    k_head = head // GROUP
    place = head % GROUP

    k_dims, v_dims = tl.arange(0, PADDED_K), tl.arange(0, PADDED_V)
    k_mask, v_mask = k_dims < K_DIM, v_dims < V_DIM
    rows = tl.arange(0, BLOCK_V)
    state_ptr = recurrent_ptr + slot * (HEADS * V_DIM * K_DIM)
    entries = head * (V_DIM * K_DIM) + rows[:, None] * K_DIM + k_dims[None, :]
    # A sequence starts from zeros, whatever the slot holds.
    held = k_mask[None, :] & (position > 0)

    qkvz_ptr += token * qkvz_stride + k_head * (2 * K_DIM + 2 * GROUP * V_DIM)
    slot_ptr = conv_ptr + slot * (WIDTH * CHANNELS)
    q_channels = k_head * (2 * K_DIM + GROUP * V_DIM) + k_dims
    k_channels = q_channels + K_DIM
    v_at = 2 * K_DIM + place * V_DIM + v_dims
    v_channels = k_head * (2 * K_DIM + GROUP * V_DIM) + v_at
    writes_key = k_mask & (place == 0)
    q = _convolve(
        qkvz_ptr + k_dims, slot_ptr, conv_weight_ptr, q_channels, k_mask, writes_key, position, CHANNELS, WIDTH
    )
    k = _convolve(
        qkvz_ptr + K_DIM + k_dims, slot_ptr, conv_weight_ptr, k_channels, k_mask, writes_key, position, CHANNELS, WIDTH
    )
    v = _convolve(qkvz_ptr + v_at, slot_ptr, conv_weight_ptr, v_channels, v_mask, v_mask, position, CHANNELS, WIDTH)
    q *= tl.rsqrt(tl.sum(q * q, 0) + L2_EPS) * (K_DIM**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)

    ba_ptr += token * ba_stride + k_head * (2 * GROUP) + place
    beta = tl.sigmoid(tl.load(ba_ptr).to(tl.float32))
    a = tl.load(ba_ptr + GROUP).to(tl.float32)
    left = tl.exp(log_decay(a, tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)))
    of_key = tl.sum(k * q, 0)
    out = tl.zeros([BLOCKS, BLOCK_V], dtype=tl.float32)
    # This loop loads only states: other loads between them made it slower.
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        first = block * BLOCK_V
        inside = (first + rows < V_DIM)[:, None]
        s = tl.load(state_ptr + entries + first * K_DIM, mask=inside & held, other=0.0).to(tl.float32) * left
        v_block = v if BLOCKS == 1 else tl.gather(v, first + rows, 0)
        change = (v_block - tl.sum(s * k[None, :], 1)) * beta
        # Uses the state before its change, so that one pass computes both sums.
        o = tl.sum(s * q[None, :], 1) + change * of_key
        out = tl.where((tl.arange(0, BLOCKS) == block)[:, None], o[None, :], out)
        kept = (s + change[:, None] * k[None, :]).to(recurrent_ptr.dtype.element_ty)
        tl.store(state_ptr + entries + first * K_DIM, kept, mask=inside & k_mask[None, :])

    dims = tl.arange(0, BLOCKS)[:, None] * BLOCK_V + rows[None, :]
    norm = tl.load(norm_ptr + dims, mask=dims < V_DIM, other=0.0)
    z = tl.load(qkvz_ptr + 2 * K_DIM + (GROUP + place) * V_DIM + dims, mask=dims < V_DIM, other=0.0).to(tl.float32)
    out *= tl.rsqrt(tl.sum(tl.sum(out * out, 1), 0) / V_DIM + eps) * norm * silu(z)
    out_ptrs = out_ptr + token * (HEADS * V_DIM) + head * V_DIM + dims
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=dims < V_DIM)

    # After this barrier all threads can read what this program wrote to its slot.
    tl.debug_barrier()
    for index in range(num_saves):
        save_ptr = saves_ptr + (request * num_saves + index) * 2
        if tl.load(save_ptr) == position + 1:
            there = tl.load(save_ptr + 1).to(tl.int64)
            for first in range(0, V_DIM, BLOCK_V):
                at = entries + first * K_DIM
                mask = (first + rows < V_DIM)[:, None] & k_mask[None, :]
                kept = tl.load(state_ptr + at, mask=mask, other=0.0)
                tl.store(recurrent_ptr + there * (HEADS * V_DIM * K_DIM) + at, kept, mask=mask)
            there_ptr = conv_ptr + there * (WIDTH * CHANNELS)
            _save_inputs(slot_ptr, there_ptr, q_channels, writes_key, CHANNELS, WIDTH)
            _save_inputs(slot_ptr, there_ptr, k_channels, writes_key, CHANNELS, WIDTH)
            _save_inputs(slot_ptr, there_ptr, v_channels, v_mask, CHANNELS, WIDTH)
