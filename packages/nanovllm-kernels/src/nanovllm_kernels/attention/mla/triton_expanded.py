"""Computes latent attention of whole prompts on CUDA, over expanded keys and values.

A whole prompt has several tokens, and this step computes all of them. A key has K unrotated and R rotated elements, and
a value has V elements.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.attention.plan import tile_configs
from nanovllm_kernels.attention.plan.attention_batch import PagedRequests
from nanovllm_kernels.attention.triton_softmax import LOG2_E, power_of_2_from_biased, weigh_scores


def gather_latents(requests: PagedRequests, latent_dim: int, out: Tensor) -> None:
    """Copy and dequantise each token (latent [L], rotated key [R]) of whole prompts to its row of `out` [T, L + R].

    Elements of latents that are not finite become 0. latent_dim: L.
    """
    kv_cache, kv_scales, block_tables, seq_lens, query_start_loc = requests
    num_tokens, width = out.shape
    _gather_latents[(num_tokens,)](
        kv_cache,
        kv_cache if kv_scales is None else kv_scales,
        block_tables,
        seq_lens,
        query_start_loc,
        out,
        seq_lens.shape[0],
        block_tables.stride(0),
        LATENT_DIM=latent_dim,
        WIDTH=width,
        PADDED_WIDTH=tile_configs.next_power_of_2(width),
        PAGE_SIZE=kv_cache.shape[1],
        QUANTIZED=kv_scales is not None,
        num_warps=2,
    )


def copy_k_rope_to_heads(k_rope: Tensor, keys: Tensor) -> None:
    """Copy `k_rope` [T, R] (stride 1 in R) to the last R elements of each head of contiguous `keys` [T, H, K + R]."""
    num_tokens, num_heads, head_dim = keys.shape
    _copy_k_rope_to_heads[(num_tokens,)](
        k_rope,
        keys,
        k_rope.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        ROPE_DIM=k_rope.shape[1],
        PADDED_HEADS=tile_configs.next_power_of_2(num_heads),
        PADDED_ROPE_DIM=tile_configs.next_power_of_2(k_rope.shape[1]),
        num_warps=4,
    )


def attend_whole_prompts(
    q: Tensor, kv: Tensor, k_rope: Tensor, seq_lens: Tensor, query_start_loc: Tensor, scale: float, out: Tensor
) -> None:
    """Compute attention of whole prompts, and write their rows of `out` [T, H, V].

    q: contiguous [T, H, K + R]. kv: contiguous [T, H, K + V]. k_rope: [T, R], stride 1 in R, any stride in T.
    """
    num_tokens, num_heads, head_dim = q.shape
    rope_dim, value_dim, num_reqs = k_rope.shape[1], out.shape[2], seq_lens.shape[0]
    key_dim = head_dim - rope_dim
    config = tile_configs.EXPANDED_TILES[q.element_size()]
    # The last tile of each request may be partial, which adds less than one tile per request.
    num_tiles = num_tokens // config.block_m + num_reqs
    _attend_whole_prompts[(num_heads, num_tiles)](
        q,
        kv,
        k_rope,
        seq_lens,
        query_start_loc,
        out,
        scale * LOG2_E,
        num_reqs,
        k_rope.stride(0),
        NUM_HEADS=num_heads,
        TOKEN_STRIDE=num_heads * kv.shape[2],
        KEY_DIM=key_dim,
        PADDED_KEY_DIM=max(16, tile_configs.next_power_of_2(key_dim)),
        ROPE_DIM=rope_dim,
        PADDED_ROPE_DIM=max(16, tile_configs.next_power_of_2(rope_dim)),
        VALUE_DIM=value_dim,
        PADDED_VALUE_DIM=max(16, tile_configs.next_power_of_2(value_dim)),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit(
    do_not_specialize=["num_reqs", "table_stride"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _gather_latents(
    kv_ptr,
    scales_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    out_ptr,
    num_reqs,
    table_stride,
    LATENT_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Copy the row of one token, if the token is in a whole prompt."""
    token = tl.program_id(0)
    request = _find_request(query_start_loc_ptr, num_reqs, token, 1, 0)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    position = token - query_start
    if (position >= query_len) | (query_len == 1) | (query_len != tl.load(seq_lens_ptr + request)):
        return
    page = tl.load(block_tables_ptr + request.to(tl.int64) * table_stride + position // PAGE_SIZE).to(tl.int64)
    slot = page * PAGE_SIZE + position % PAGE_SIZE
    dims = tl.arange(0, PADDED_WIDTH)
    row = tl.load(kv_ptr + slot * WIDTH + dims, mask=dims < WIDTH, other=0.0)
    if QUANTIZED:
        row = row.to(tl.float32) * power_of_2_from_biased(tl.load(scales_ptr + slot).to(tl.int32))
    row = row.to(out_ptr.dtype.element_ty)
    row = tl.where((dims >= LATENT_DIM) | (tl.abs(row.to(tl.float32)) < float("inf")), row, 0.0)
    tl.store(out_ptr + token.to(tl.int64) * WIDTH + dims, row, mask=dims < WIDTH)


@triton.jit
def _find_request(query_start_loc_ptr, num_reqs, tile, BLOCK_Q: tl.constexpr, EXTRA_TILES: tl.constexpr):
    """Return the request of a tile. Request r's tiles begin at (r's first token) // BLOCK_Q + r * EXTRA_TILES."""
    low = 0
    high = num_reqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        first_tile = tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle * EXTRA_TILES
        low = tl.where(first_tile <= tile, middle, low)
        high = tl.where(first_tile <= tile, high, middle - 1)
    return low


@triton.jit
def _copy_k_rope_to_heads(
    k_rope_ptr,
    keys_ptr,
    rope_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_ROPE_DIM: tl.constexpr,
):
    """Copy one token's rotated key part to all heads."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED_ROPE_DIM)[None, :]
    heads = tl.arange(0, PADDED_HEADS)[:, None]
    key_part = tl.load(k_rope_ptr + token * rope_stride + dims, mask=dims < ROPE_DIM, other=0.0)
    key_part = tl.broadcast_to(key_part, (PADDED_HEADS, PADDED_ROPE_DIM))
    key_ptrs = keys_ptr + (token * NUM_HEADS + heads) * HEAD_DIM + HEAD_DIM - ROPE_DIM + dims
    tl.store(key_ptrs, key_part, mask=(heads < NUM_HEADS) & (dims < ROPE_DIM))


# Triton does not specialise on arguments that change between steps, because a step must never cause a compilation.
@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_loc_ptr"])
def _attend_whole_prompts(
    q_ptr,
    kv_ptr,
    k_rope_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    out_ptr,
    scale_log2,
    num_reqs,
    rope_stride_token,
    NUM_HEADS: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PADDED_ROPE_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute one tile of queries of one head, if the tile's request is a whole prompt."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    request = _find_request(query_start_loc_ptr, num_reqs, tile, BLOCK_M, 1)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    first_query = (tile - (query_start // BLOCK_M + request)) * BLOCK_M
    if (first_query >= query_len) | (query_len == 1) | (query_len != tl.load(seq_lens_ptr + request)):
        return
    queries = first_query + tl.arange(0, BLOCK_M)
    row_mask = queries < query_len
    prompt_start = query_start.to(tl.int64)
    rows = (prompt_start + queries) * NUM_HEADS + head
    key_dims = tl.arange(0, PADDED_KEY_DIM)
    rope_dims = tl.arange(0, PADDED_ROPE_DIM)
    value_dims = tl.arange(0, PADDED_VALUE_DIM)
    q_ptrs = q_ptr + rows[:, None] * (KEY_DIM + ROPE_DIM)
    q = tl.load(q_ptrs + key_dims[None, :], mask=row_mask[:, None] & (key_dims < KEY_DIM)[None, :], other=0.0)
    q_rope = tl.load(
        q_ptrs + KEY_DIM + rope_dims[None, :], mask=row_mask[:, None] & (rope_dims < ROPE_DIM)[None, :], other=0.0
    )
    kv_ptr += prompt_start * TOKEN_STRIDE + head * (KEY_DIM + VALUE_DIM)
    k_rope_ptr += prompt_start * rope_stride_token
    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_VALUE_DIM], dtype=tl.float32)
    end = tl.minimum(first_query + BLOCK_M, query_len)
    # Blocks that every query sees completely need no mask.
    unmasked_end = (first_query + 1) // BLOCK_N * BLOCK_N
    for masked in tl.static_range(2):
        for start in tl.range(unmasked_end if masked else 0, end if masked else unmasked_end, BLOCK_N):
            key_positions = start + tl.arange(0, BLOCK_N)
            key_mask = key_positions < end
            k_mask = (key_dims < KEY_DIM)[:, None]
            rope_mask = (rope_dims < ROPE_DIM)[:, None]
            v_mask = (value_dims < VALUE_DIM)[None, :]
            if masked:
                k_mask = k_mask & key_mask[None, :]
                rope_mask = rope_mask & key_mask[None, :]
                v_mask = v_mask & key_mask[:, None]
            key_rows = key_positions.to(tl.int64)
            k = tl.load(kv_ptr + key_rows[None, :] * TOKEN_STRIDE + key_dims[:, None], mask=k_mask, other=0.0)
            k_rope = tl.load(
                k_rope_ptr + key_rows[None, :] * rope_stride_token + rope_dims[:, None], mask=rope_mask, other=0.0
            )
            scores = tl.dot(q, k, input_precision="ieee")
            scores = tl.dot(q_rope, k_rope, scores, input_precision="ieee") * scale_log2
            if masked:
                scores = tl.where(key_positions[None, :] <= queries[:, None], scores, float("-inf"))
            v = tl.load(
                kv_ptr + KEY_DIM + key_rows[:, None] * TOKEN_STRIDE + value_dims[None, :], mask=v_mask, other=0.0
            )
            # Every row sees the prompt's first key, so the first block gives every row a finite maximum.
            weights, rescale, running_max, running_sum = weigh_scores(
                scores, running_max, running_sum, ROWS_MAY_BE_MASKED=False
            )
            acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    acc = acc / running_sum[:, None]
    out_ptrs = out_ptr + rows[:, None] * VALUE_DIM + value_dims[None, :]
    mask = row_mask[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
