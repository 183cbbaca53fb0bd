"""Device functions of the attention kernels: a tile of queries against blocks of paged keys and values.

The softmax is computed online (Milakov and Gimelshein 2018; Dao et al. 2022), in base 2.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def attend_blocks(
    acc,
    running_max,
    running_sum,
    q,
    k_ptr,
    table_ptr,
    positions,
    dims,
    dim_mask,
    begin,
    end,
    limit,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Accumulate keys and values of [begin, end), BLOCK_N at a time, into the online softmax; read none past `limit`.

    k_ptr: the key head in the cache's first slot.
    """
    for start in tl.range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        if MASKED:
            pages = tl.load(table_ptr + columns // PAGE_SIZE, mask=columns < limit, other=0).to(tl.int64)
        else:
            pages = tl.load(table_ptr + columns // PAGE_SIZE).to(tl.int64)
        slots = (pages * PAGE_SIZE + columns % PAGE_SIZE) * (2 * NUM_KV_HEADS * HEAD_DIM)
        k_ptrs = k_ptr + slots[None, :] + dims[:, None]
        v_ptrs = k_ptr + NUM_KV_HEADS * HEAD_DIM + slots[:, None] + dims[None, :]
        if MASKED:
            inside = columns < limit
            k = tl.load(k_ptrs, mask=inside[None, :] & dim_mask[:, None], other=0.0)
        elif HEAD_DIM == PADDED_DIM:
            k = tl.load(k_ptrs)
        else:
            k = tl.load(k_ptrs, mask=dim_mask[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        if MASKED:
            # No query sees a token after its own, so none sees a token from `limit` on.
            scores = tl.where(columns[None, :] <= positions[:, None], scores, float("-inf"))
            v = tl.load(v_ptrs, mask=inside[:, None] & dim_mask[None, :], other=0.0)
        elif HEAD_DIM == PADDED_DIM:
            v = tl.load(v_ptrs)
        else:
            v = tl.load(v_ptrs, mask=dim_mask[None, :], other=0.0)
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        # Avoid infinity minus infinity in rows that have seen no key yet.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(running_max - shift)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        running_max = new_max
    return acc, running_max, running_sum


@triton.jit
def attend_range(
    q,
    k_ptr,
    table_ptr,
    positions,
    dims,
    dim_mask,
    begin,
    full_end,
    end,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FULL_BLOCKS: tl.constexpr,
):
    """Return (sums of weighted values, maximum, sum of weights) over the keys of [begin, end).

    full_end: with FULL_BLOCKS, every query sees all keys before it, so that these need no mask.
    """
    acc = tl.zeros([BLOCK_M, PADDED_DIM], dtype=tl.float32)
    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    if FULL_BLOCKS:
        acc, running_max, running_sum = attend_blocks(
            acc,
            running_max,
            running_sum,
            q,
            k_ptr,
            table_ptr,
            positions,
            dims,
            dim_mask,
            begin,
            full_end,
            end,
            scale_log2,
            NUM_KV_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            PAGE_SIZE,
            BLOCK_N,
            False,
        )
        begin = tl.maximum(begin, full_end)
    return attend_blocks(
        acc,
        running_max,
        running_sum,
        q,
        k_ptr,
        table_ptr,
        positions,
        dims,
        dim_mask,
        begin,
        end,
        end,
        scale_log2,
        NUM_KV_HEADS,
        HEAD_DIM,
        PADDED_DIM,
        PAGE_SIZE,
        BLOCK_N,
        True,
    )
