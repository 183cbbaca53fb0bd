"""Device functions of the latent attention kernels: a tile of absorbed queries against blocks of paged latents.

A block is read once, as keys and as values. In an FP8 cache a latent and its key part share one scale; products are
then float16 and kept in range as in `triton_tile_fp8`. The softmax is online, in base 2.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.attention.triton_tile_fp8 import power_of_2
from nanovllm_kernels.platform import describe_device

# Query heads in a tile of `gluon_mla`.
LATENT_HEADS = 64


def specializes(q_latent: Tensor, q_rope: Tensor, kv_cache: Tensor) -> bool:
    """Whether `gluon_mla` supports absorbed queries [H, T, L], rotated parts [T, H, R] and a cache [N, P, 1, L + R]."""
    num_heads, _, latent_dim = q_latent.shape
    widths = (latent_dim, q_rope.shape[2], q_latent.element_size(), kv_cache.element_size())
    return (
        num_heads % LATENT_HEADS == 0
        and widths == (512, 64, 2, 2)
        and kv_cache.shape[1] in (16, 32, 64)
        and describe_device(q_latent.device).capability == (9, 0)
    )


@triton.jit
def load_queries(
    latent_ptr,
    rope_ptr,
    tokens,
    heads,
    mask,
    num_tokens,
    rope_stride_token,
    rope_stride_head,
    scale_log2,
    LATENT: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Return the queries' latent and rotated parts, one row per entry of `tokens` and `heads`, and their base-2 scale.

    latent_ptr: [H, T, L], contiguous. rope_ptr: [T, H, R], with the given strides.
    """
    dims = tl.arange(0, PADDED_LATENT)
    rope_dims = tl.arange(0, PADDED_ROPE)
    places = (heads.to(tl.int64) * num_tokens + tokens) * LATENT
    rope_places = tokens * rope_stride_token + heads * rope_stride_head
    latent = tl.load(
        latent_ptr + places[:, None] + dims[None, :], mask=mask[:, None] & (dims < LATENT)[None, :], other=0.0
    )
    rope = tl.load(
        rope_ptr + rope_places[:, None] + rope_dims[None, :],
        mask=mask[:, None] & (rope_dims < ROPE)[None, :],
        other=0.0,
    )
    if QUANTIZED and latent.dtype != tl.float32:
        # As in `triton_tile_fp8.narrow_queries`; both parts are divided by the same power of two.
        wide = latent.to(tl.float32)
        wide_rope = rope.to(tl.float32)
        top = tl.max(tl.maximum(tl.max(tl.abs(wide), 1), tl.max(tl.abs(wide_rope), 1)), 0)
        power = tl.maximum(top.to(tl.int32, bitcast=True) & 0x7F800000, 0x00800000).to(tl.float32, bitcast=True)
        latent = (wide / power).to(tl.float16)
        rope = (wide_rope / power).to(tl.float16)
        scale_log2 *= power
    return latent, rope, scale_log2


@triton.jit
def attend_latents(
    q_latent,
    q_rope,
    kv_ptr,
    scales_ptr,
    table_ptr,
    positions,
    begin,
    end,
    scale_log2,
    LATENT: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Return (sums of weighted latents, maximum, sum of weights) over the latents of [begin, end), BLOCK_N at a time.

    q_latent, q_rope, scale_log2: from `load_queries`. With QUANTIZED the maximum is only the weights' reference point;
    with the sum it still gives the softmax's normalizer. All blocks are masked, because a second loop without masks
    would need too many registers.
    """
    acc = tl.zeros([BLOCK_M, PADDED_LATENT], dtype=tl.float32)
    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    dims = tl.arange(0, PADDED_LATENT)
    rope_dims = tl.arange(0, PADDED_ROPE)
    for start in tl.range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = columns < end
        pages = tl.load(table_ptr + columns // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        slots = pages * PAGE_SIZE + columns % PAGE_SIZE
        rows = kv_ptr + slots[:, None] * (LATENT + ROPE)
        latent = tl.load(rows + dims[None, :], mask=inside[:, None] & (dims < LATENT)[None, :], other=0.0)
        rope_mask = inside[:, None] & (rope_dims < ROPE)[None, :]
        k_rope = tl.load(rows + LATENT + rope_dims[None, :], mask=rope_mask, other=0.0)
        latent = latent.to(q_latent.dtype)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(k_rope.to(q_rope.dtype)), scores, input_precision="ieee") * scale_log2
        if QUANTIZED:
            exponents = tl.load(scales_ptr + slots, mask=inside, other=0).to(tl.int32)
            scores = scores * power_of_2(exponents)[None, :] + (exponents - 127).to(tl.float32)[None, :]
        # No query sees a token after its own, so none sees a token from `end` on.
        scores = tl.where(columns[None, :] <= positions[:, None], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1) - (15 if QUANTIZED else 0))
        # Avoid infinity minus infinity in rows that have seen no key yet.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(running_max - shift)
        summed = tl.sum(weights * power_of_2(254 - exponents)[None, :], 1) if QUANTIZED else tl.sum(weights, 1)
        running_sum = running_sum * rescale + summed
        acc = tl.dot(weights.to(latent.dtype), latent, acc * rescale[:, None], input_precision="ieee")
        running_max = new_max
    return acc, running_max, running_sum
