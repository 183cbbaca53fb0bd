"""Attention over a paged bf16 cache on a CPU, in float32, for any number of queries. The cache is read in place.

Blocks of keys are visited in order with an online softmax (Milakov and Gimelshein 2018,
https://arxiv.org/abs/1805.02867). A query's result does not depend on the other queries.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from nanovllm_kernels.numba_jit import (
    OPENMP,
    exp,
    from_bf16,
    keep_alive,
    kernel,
    next_item,
    ordered_kernel,
    pointer,
    region,
    run_region,
)
from nanovllm_kernels.numba_tiles import (
    GROUP,
    LINE,
    PANEL,
    TILE_ROWS,
    TURNED,
    UNROLL,
    exp_and_sum,
    largest,
    make_tile,
    transpose_keys,
    widen_group,
)

# Keys per block: their float32 copies fit the first-level cache beside a tile of queries.
BLOCK_KEYS = 64
# Maximum number of rows in a tile: tokens times query heads per key-value head. A tile has at least one token.
MOST_ROWS = 96

_ZERO, _LEAST = np.float32(0.0), np.float32(-3e38)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Compute attention of float32 `q` over a bf16 cache into `out`, contiguous float32 [T, Hq, D]."""
    num_tokens, num_heads, head_dim = q.shape
    _, page_size, num_cached, _ = kv_cache.shape
    _attend(
        OPENMP,
        _ITEMS_OF_THREAD,
        q.data_ptr(),
        q.stride(0),
        kv_cache.data_ptr(),
        block_tables.data_ptr(),
        block_tables.stride(0),
        seq_lens.data_ptr(),
        query_start_loc.data_ptr(),
        out.data_ptr(),
        len(seq_lens),
        num_tokens,
        num_heads,
        num_cached // 2,
        head_dim,
        page_size,
        scale,
        torch.get_num_threads(),
    )


@kernel
def _attend(
    openmp,
    region,
    q_ptr,
    q_stride,
    cache_ptr,
    tables_ptr,
    table_stride,
    lens_ptr,
    starts_ptr,
    out_ptr,
    num_requests,
    num_tokens,
    num_heads,
    num_kv_heads,
    head_dim,
    page_size,
    scale,
    num_threads,
):
    starts = numba.carray(pointer(starts_ptr), (num_requests + 1,), np.int32)
    tile_tokens = max(1, MOST_ROWS // (num_heads // num_kv_heads))
    # Each tile of queries: request and first token. A request's last tile comes first, because it sees the most keys.
    tiles = np.empty((num_tokens // tile_tokens + num_requests, 2), np.int64)
    num_tiles = 0
    for request in range(num_requests - 1, -1, -1):
        count = starts[request + 1] - starts[request]
        for tile in range(-(-count // tile_tokens) - 1, -1, -1):
            tiles[num_tiles, 0], tiles[num_tiles, 1] = request, starts[request] + tile * tile_tokens
            num_tiles += 1
    args = np.empty(18, np.int64)
    args[0], args[1], args[2], args[3], args[4], args[5] = openmp, q_ptr, q_stride, cache_ptr, tables_ptr, table_stride
    args[6], args[7], args[8], args[9], args[10] = lens_ptr, starts_ptr, out_ptr, num_requests, num_heads
    args[11], args[12], args[13], args[15], args[16] = num_kv_heads, head_dim, page_size, num_tiles, tile_tokens
    args[14], args[17] = np.int64(tiles.ctypes.data), 0
    scales = np.empty(1, np.float64)
    scales[0] = scale
    args[9] = np.int64(scales.ctypes.data)
    run_region(region, np.int64(args.ctypes.data), num_threads)
    keep_alive(args)
    keep_alive(tiles)
    keep_alive(scales)


def _items_of_thread(args_ptr):
    args = numba.carray(pointer(args_ptr), (18,), np.int64)
    scale = np.float32(numba.carray(pointer(args[9]), (1,), np.float64)[0])
    num_heads, num_kv_heads, head_dim, num_tiles, tile_tokens = args[10], args[11], args[12], args[15], args[16]
    group = num_heads // num_kv_heads
    lens = numba.carray(pointer(args[6]), (1 << 30,), np.int32)
    starts = numba.carray(pointer(args[7]), (1 << 30,), np.int32)
    tiles = numba.carray(pointer(args[14]), (num_tiles, 2), np.int64)
    depth, width = -(-head_dim // UNROLL) * UNROLL, -(-head_dim // PANEL) * PANEL
    rows = tile_tokens * group
    # Scratch: queries, keys, values, scores, accumulated output, and per row the largest score and the sum of weights.
    sizes = rows * depth + BLOCK_KEYS * (depth + width) + rows * (BLOCK_KEYS + width + 2)
    scratch = np.empty(sizes + LINE // 4, np.float32)
    scratch_ptr = (np.int64(scratch.ctypes.data) + LINE - 1) // LINE * LINE
    while True:
        item = next_item(args_ptr + 8 * 17)
        if item >= num_tiles * num_kv_heads:
            break
        request, token = tiles[item // num_kv_heads, 0], tiles[item // num_kv_heads, 1]
        count = min(tile_tokens, starts[request + 1] - token)
        first_length = lens[request] - starts[request + 1] + token + 1
        _attend_tile(args, item % num_kv_heads, request, token, count, first_length, depth, width, scale, scratch_ptr)
    keep_alive(scratch)


@kernel
def _attend_tile(args, kv_head, request, token, count, first_length, depth, width, scale, scratch_ptr):
    """Attend for `count` tokens from `token` on, for the query heads of one key-value head.

    first_length: number of keys that the first token sees.
    """
    num_heads, num_kv_heads, head_dim, page_size = args[10], args[11], args[12], args[13]
    group = num_heads // num_kv_heads
    num_rows, last_length = count * group, first_length + count - 1
    table = numba.carray(pointer(args[4] + 4 * request * args[5]), (last_length,), np.int32)
    queries_ptr = scratch_ptr
    keys_ptr = queries_ptr + 4 * num_rows * depth
    values_ptr = keys_ptr + 4 * BLOCK_KEYS * depth
    scores_ptr = values_ptr + 4 * BLOCK_KEYS * width
    sums_ptr = scores_ptr + 4 * num_rows * BLOCK_KEYS
    sums = numba.carray(pointer(sums_ptr), (width // PANEL, num_rows, PANEL), np.float32)
    state_ptr = sums_ptr + 4 * num_rows * width
    state = numba.carray(pointer(state_ptr), (num_rows, 2), np.float32)
    q_ptr = args[1] + 4 * (token * args[2] + kv_head * group * head_dim)
    _pack_queries(q_ptr, args[2], group, head_dim, depth, num_rows, scale, queries_ptr)
    num_tiles = -(-num_rows // TILE_ROWS)
    for start in range(0, last_length, BLOCK_KEYS):
        num_keys = min(BLOCK_KEYS, last_length - start)
        _copy_block(args[3], table, start, num_keys, page_size, num_kv_heads, kv_head, head_dim, keys_ptr, values_ptr)
        for tile in range(num_tiles):
            begin, end = tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles
            # Skip rows that see no key of this block: their weights would all be 0.
            if first_length + (end - 1) // group <= start:
                continue
            for keys in range(0, num_keys, GROUP):
                panel_ptr, to = keys_ptr + 4 * keys * depth, scores_ptr + 4 * (begin * BLOCK_KEYS + keys)
                _score(end - begin, queries_ptr + 4 * begin * depth, panel_ptr, depth, to)
            for row in range(begin, end):
                seen = min(max(first_length + row // group - start, 0), num_keys)
                _weigh(
                    scores_ptr + 4 * row * BLOCK_KEYS,
                    seen,
                    state_ptr + 8 * row,
                    sums_ptr + 4 * row * PANEL,
                    num_rows,
                    width,
                    start == 0,
                )
            for part in range(0, width, GROUP):
                to = sums_ptr + 4 * (part // PANEL * num_rows * PANEL + begin * PANEL + part % PANEL)
                _add_values(
                    end - begin,
                    scores_ptr + 4 * begin * BLOCK_KEYS,
                    values_ptr + 4 * part * BLOCK_KEYS,
                    -(-num_keys // UNROLL) * UNROLL,
                    to,
                )
    for row in range(num_rows):
        place = args[8] + 4 * ((token + row // group) * num_heads + kv_head * group + row % group) * head_dim
        out = numba.carray(pointer(place), (head_dim,), np.float32)
        _divide(sums, row, state[row, 1], out)


@ordered_kernel
def _pack_queries(q_ptr, q_stride, group, head_dim, depth, num_rows, scale, out_ptr):
    """Write scaled queries. Each tile is [depth, rows], with zeros past head_dim."""
    num_tiles = -(-num_rows // TILE_ROWS)
    for tile in range(num_tiles):
        begin, end = tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles
        packed = numba.carray(pointer(out_ptr + 4 * begin * depth), (depth, end - begin), np.float32)
        packed[head_dim:] = _ZERO
        for row in range(begin, end):
            place = q_ptr + 4 * (row // group * q_stride + row % group * head_dim)
            q = numba.carray(pointer(place), (head_dim,), np.float32)
            for k in range(head_dim):
                packed[k, row - begin] = q[k] * scale


@kernel
def _copy_block(cache_ptr, table, start, num_keys, page_size, num_kv_heads, kv_head, head_dim, keys_ptr, values_ptr):
    """Copy keys as [BLOCK_KEYS / GROUP, depth, GROUP] and values as [width / GROUP, BLOCK_KEYS, GROUP], float32.

    Values past `num_keys` and elements past `head_dim` become 0. Keys past `num_keys` stay undefined.
    """
    depth, num_parts = -(-head_dim // UNROLL) * UNROLL, -(-head_dim // PANEL) * PANEL // GROUP
    keys = numba.carray(pointer(keys_ptr), (BLOCK_KEYS // GROUP, depth, GROUP), np.float32)
    values = numba.carray(pointer(values_ptr), (num_parts, BLOCK_KEYS, GROUP), np.float32)
    step = 4 * num_kv_heads * head_dim
    i = 0
    while i < num_keys:
        slot = table[(start + i) // page_size] * page_size + (start + i) % page_size
        key_ptr = cache_ptr + slot * step + 2 * kv_head * head_dim
        turned = 1
        if head_dim % TURNED == 0 and i % TURNED == 0 and page_size % TURNED == 0 and i + TURNED <= num_keys:
            turned = TURNED
            for k in range(0, head_dim, TURNED):
                to = keys_ptr + 4 * ((i // GROUP * depth + k) * GROUP + i % GROUP)
                transpose_keys(key_ptr + 2 * k, step, to)
        else:
            key = numba.carray(pointer(key_ptr), (head_dim,), np.uint16)
            for k in range(head_dim):
                keys[i // GROUP, k, i % GROUP] = from_bf16(key[k])
            for k in range(head_dim, depth):
                keys[i // GROUP, k, i % GROUP] = _ZERO
        for j in range(turned):
            _copy_value(values, i + j, key_ptr + j * step + 2 * num_kv_heads * head_dim, head_dim)
        i += turned
    while i % UNROLL:
        values[:, i] = _ZERO
        i += 1


@kernel
def _copy_value(values, index, value_ptr, head_dim):
    value = numba.carray(pointer(value_ptr), (head_dim,), np.uint16)
    whole = head_dim // GROUP
    values_ptr = np.int64(values.ctypes.data) + 4 * index * GROUP
    for part in range(whole):
        widen_group(value_ptr + 2 * part * GROUP, values_ptr + 4 * part * BLOCK_KEYS * GROUP)
    for part in range(whole, values.shape[0]):
        for k in range(GROUP):
            at = part * GROUP + k
            values[part, index, k] = from_bf16(value[at]) if at < head_dim else _ZERO


@ordered_kernel
def _weigh(scores_ptr, seen, state_ptr, sums_ptr, num_rows, width, is_first):
    """Turn a row's scores into weights, 0 past `seen`, and rescale its sums if its largest score has grown."""
    state = numba.carray(pointer(state_ptr), (2,), np.float32)
    if seen < BLOCK_KEYS:
        # Scores past `seen` are undefined.
        _fill(scores_ptr, seen, _LEAST)
    most = largest(scores_ptr, BLOCK_KEYS)
    if is_first:
        state[1] = _ZERO
        _scale(sums_ptr, num_rows, width, _ZERO)
    elif most > state[0]:
        factor = exp(state[0] - most)
        state[1] *= factor
        _scale(sums_ptr, num_rows, width, factor)
    else:
        most = state[0]
    state[0] = most
    # exp makes about 1e-38 of masked scores, which does not change a sum of at least 1.
    state[1] += exp_and_sum(scores_ptr, BLOCK_KEYS, most)
    if seen < BLOCK_KEYS:
        _fill(scores_ptr, seen, _ZERO)


@ordered_kernel
def _fill(scores_ptr, seen, number):
    scores = numba.carray(pointer(scores_ptr), (BLOCK_KEYS,), np.float32)
    for i in range(seen, BLOCK_KEYS):
        scores[i] = number


@ordered_kernel
def _scale(sums_ptr, num_rows, width, factor):
    for part in range(width // PANEL):
        sums = numba.carray(pointer(sums_ptr + 4 * part * num_rows * PANEL), (PANEL,), np.float32)
        for k in range(PANEL):
            # Before the first block, memory may hold NaN, which a factor of 0 would keep.
            sums[k] = sums[k] * factor if factor != _ZERO else _ZERO


@ordered_kernel
def _divide(sums, row, total, out):
    for k in range(out.shape[0]):
        out[k] = sums[k // PANEL, row, k % PANEL] / total


_score_1 = make_tile(1, sums_stride=BLOCK_KEYS)
_score_2 = make_tile(2, sums_stride=BLOCK_KEYS)
_score_3 = make_tile(3, sums_stride=BLOCK_KEYS)
_score_4 = make_tile(4, sums_stride=BLOCK_KEYS)
_score_5 = make_tile(5, sums_stride=BLOCK_KEYS)
_score_6 = make_tile(6, sums_stride=BLOCK_KEYS)
_add_1 = make_tile(1, row_stride=BLOCK_KEYS)
_add_2 = make_tile(2, row_stride=BLOCK_KEYS)
_add_3 = make_tile(3, row_stride=BLOCK_KEYS)
_add_4 = make_tile(4, row_stride=BLOCK_KEYS)
_add_5 = make_tile(5, row_stride=BLOCK_KEYS)
_add_6 = make_tile(6, row_stride=BLOCK_KEYS)


@kernel
def _score(num_rows, rows_ptr, panel_ptr, depth, sums_ptr):
    if num_rows == 6:
        _score_6(rows_ptr, panel_ptr, depth, sums_ptr, 0, 0, 0)
    elif num_rows == 5:
        _score_5(rows_ptr, panel_ptr, depth, sums_ptr, 0, 0, 0)
    elif num_rows == 4:
        _score_4(rows_ptr, panel_ptr, depth, sums_ptr, 0, 0, 0)
    elif num_rows == 3:
        _score_3(rows_ptr, panel_ptr, depth, sums_ptr, 0, 0, 0)
    elif num_rows == 2:
        _score_2(rows_ptr, panel_ptr, depth, sums_ptr, 0, 0, 0)
    else:
        _score_1(rows_ptr, panel_ptr, depth, sums_ptr, 0, 0, 0)


@kernel
def _add_values(num_rows, rows_ptr, panel_ptr, depth, sums_ptr):
    if num_rows == 6:
        _add_6(rows_ptr, panel_ptr, depth, sums_ptr, 1, 0, 0)
    elif num_rows == 5:
        _add_5(rows_ptr, panel_ptr, depth, sums_ptr, 1, 0, 0)
    elif num_rows == 4:
        _add_4(rows_ptr, panel_ptr, depth, sums_ptr, 1, 0, 0)
    elif num_rows == 3:
        _add_3(rows_ptr, panel_ptr, depth, sums_ptr, 1, 0, 0)
    elif num_rows == 2:
        _add_2(rows_ptr, panel_ptr, depth, sums_ptr, 1, 0, 0)
    else:
        _add_1(rows_ptr, panel_ptr, depth, sums_ptr, 1, 0, 0)


_ITEMS_OF_THREAD = region(_items_of_thread)
