"""Computes grouped-query attention over a paged bf16 cache on a CPU, in float32. Reads the cache in place.

Each tile (the queries of consecutive tokens) visits blocks of keys in order, with an online softmax (Milakov and
Gimelshein 2018, https://arxiv.org/abs/1805.02867). A query's result does not depend on the other queries. A row of a
tile is the query of one token and one head. The rows are cut into row tiles of up to TILE_ROWS rows. A group is
GROUP_WIDTH keys, or GROUP_WIDTH columns of the values. Kernels multiply a row tile by a group. Names that end in `_ptr`
are addresses as integers.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from nanovllm_kernels.numba_jit import (
    OPENMP_FUNCTIONS_PTR,
    compile_region,  # Compiles a function that all OpenMP threads run.
    exp,
    fetch_and_increment,
    from_bf16,
    keep_alive,  # Keeps Numba from freeing an array before this call.
    kernel,
    kernel_without_reordering,  # Like `kernel`, but sums keep their order.
    pointer,
    run_region,
)
from nanovllm_kernels.numba_tiles import (
    GROUP_WIDTH,
    LINE_BYTES,  # Bytes of a cache line.
    PANEL_WIDTH,  # Outputs are stored in panels of PANEL_WIDTH elements, a multiple of GROUP_WIDTH.
    TILE_ROWS,
    TRANSPOSED_SIZE,  # Number of keys that `transpose_keys` transposes at once.
    UNROLL,  # A kernel's inner loop runs over a multiple of UNROLL elements.
    convert_group,
    exp_and_sum,
    find_max,
    # Makes an intrinsic that multiplies rows by columns. The arguments of the intrinsic: addresses of rows and columns,
    # depth, address of the sums, whether to add to the sums, and two numbers for prefetching (unused here).
    make_multiplier,
    transpose_keys,
)

# Keys per block. For heads of 128, a row tile and a block's float32 keys fit in a first-level cache of 48 KiB.
BLOCK_KEYS = 64
# Maximum rows of a tile with several tokens. Each token has one row per query head that shares the key-value head.
MAX_QUERY_TILE_ROWS = 96

_ZERO, _MASKED_SCORE = np.float32(0.0), np.float32(-3e38)  # _MASKED_SCORE: score of a key that a query does not see.

# Indices into the int64 array that holds the arguments of `_attend_items`. _SCALE_PTR is the address of a float64.
_OPENMP_FUNCTIONS_PTR, _Q_PTR, _Q_STRIDE, _CACHE_PTR, _TABLES_PTR, _TABLE_STRIDE, _SEQ_LENS_PTR, _QUERY_STARTS_PTR = (
    range(8)
)
_OUT_PTR, _SCALE_PTR, _NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _PAGE_SIZE, _TILES_PTR, _NUM_TILES = range(8, 16)
_TOKENS_PER_TILE, _NEXT_ITEM, _NUM_ARGS = range(16, 19)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Attend for float32 `q` over a bf16 cache. Write the results into `out`, contiguous float32 [T, Hq, D]."""
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[2] // 2
    _attend(
        OPENMP_FUNCTIONS_PTR,
        _ATTEND_REGION,
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
        num_kv_heads,
        head_dim,
        page_size,
        scale,
        torch.get_num_threads(),
    )


@kernel
def _attend(
    openmp_functions_ptr,
    region_address,
    q_ptr,
    q_stride,
    cache_ptr,
    tables_ptr,
    table_stride,
    seq_lens_ptr,
    query_starts_ptr,
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
    """Cut queries into tiles, and run `_attend_items` on all threads. region_address: address of `_attend_items`."""
    query_starts = numba.carray(pointer(query_starts_ptr), (num_requests + 1,), np.int32)
    tokens_per_tile = max(1, MAX_QUERY_TILE_ROWS // (num_heads // num_kv_heads))
    # Rows of `tiles` are (request, first token). A request's last tile comes first, because it sees the most keys.
    tiles = np.empty((num_tokens // tokens_per_tile + num_requests, 2), np.int64)
    num_tiles = 0
    for request in range(num_requests - 1, -1, -1):
        query_len = query_starts[request + 1] - query_starts[request]
        for tile in range(-(-query_len // tokens_per_tile) - 1, -1, -1):
            tiles[num_tiles, 0], tiles[num_tiles, 1] = request, query_starts[request] + tile * tokens_per_tile
            num_tiles += 1
    scales = np.empty(1, np.float64)
    scales[0] = scale
    args = np.empty(_NUM_ARGS, np.int64)
    args[_OPENMP_FUNCTIONS_PTR] = openmp_functions_ptr
    args[_Q_PTR], args[_Q_STRIDE] = q_ptr, q_stride
    args[_CACHE_PTR], args[_TABLES_PTR], args[_TABLE_STRIDE] = cache_ptr, tables_ptr, table_stride
    args[_SEQ_LENS_PTR], args[_QUERY_STARTS_PTR], args[_OUT_PTR] = seq_lens_ptr, query_starts_ptr, out_ptr
    args[_NUM_HEADS], args[_NUM_KV_HEADS], args[_HEAD_DIM] = num_heads, num_kv_heads, head_dim
    args[_PAGE_SIZE], args[_NUM_TILES], args[_TOKENS_PER_TILE] = page_size, num_tiles, tokens_per_tile
    args[_SCALE_PTR], args[_TILES_PTR] = np.int64(scales.ctypes.data), np.int64(tiles.ctypes.data)
    args[_NEXT_ITEM] = 0
    run_region(region_address, np.int64(args.ctypes.data), num_threads)
    keep_alive(args)
    keep_alive(tiles)
    keep_alive(scales)


def _attend_items(args_ptr):
    """Compute items until the threads have taken all items. An item is one tile of queries for one key-value head."""
    args = numba.carray(pointer(args_ptr), (_NUM_ARGS,), np.int64)
    scale = np.float32(numba.carray(pointer(args[_SCALE_PTR]), (1,), np.float64)[0])
    num_kv_heads, head_dim = args[_NUM_KV_HEADS], args[_HEAD_DIM]
    num_tiles, tokens_per_tile = args[_NUM_TILES], args[_TOKENS_PER_TILE]
    group_size = args[_NUM_HEADS] // num_kv_heads  # Query heads per key-value head.
    seq_lens = numba.carray(pointer(args[_SEQ_LENS_PTR]), (1 << 30,), np.int32)  # The array's size is unknown here.
    query_starts = numba.carray(pointer(args[_QUERY_STARTS_PTR]), (1 << 30,), np.int32)
    tiles = numba.carray(pointer(args[_TILES_PTR]), (num_tiles, 2), np.int64)
    # Head sizes of copied keys and values, rounded up to the multiples that the kernels need.
    key_dim, value_dim = -(-head_dim // UNROLL) * UNROLL, -(-head_dim // PANEL_WIDTH) * PANEL_WIDTH
    max_rows = tokens_per_tile * group_size
    # `scratch` holds queries, keys, values, scores, outputs, and each row's largest score and sum of weights.
    scratch_size = max_rows * key_dim + BLOCK_KEYS * (key_dim + value_dim) + max_rows * (BLOCK_KEYS + value_dim + 2)
    scratch = np.empty(scratch_size + LINE_BYTES // 4, np.float32)
    scratch_ptr = (np.int64(scratch.ctypes.data) + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES
    while True:
        item = fetch_and_increment(args_ptr + 8 * _NEXT_ITEM)
        if item >= num_tiles * num_kv_heads:
            break
        request, first_token = tiles[item // num_kv_heads, 0], tiles[item // num_kv_heads, 1]
        num_tokens = min(tokens_per_tile, query_starts[request + 1] - first_token)
        first_num_keys = seq_lens[request] - query_starts[request + 1] + first_token + 1
        kv_head, padded_dims = item % num_kv_heads, (key_dim, value_dim)
        _attend_tile(args, kv_head, request, first_token, num_tokens, first_num_keys, padded_dims, scale, scratch_ptr)
    keep_alive(scratch)


@kernel
def _attend_tile(args, kv_head, request, first_token, num_tokens, first_num_keys, padded_dims, scale, scratch_ptr):
    """Compute attention of one tile, for the query heads of `kv_head`.

    first_num_keys: number of keys that the first token sees.
    padded_dims: head sizes, rounded up to multiples of UNROLL and of PANEL_WIDTH.
    """
    num_heads, num_kv_heads = args[_NUM_HEADS], args[_NUM_KV_HEADS]
    head_dim, page_size = args[_HEAD_DIM], args[_PAGE_SIZE]
    key_dim, value_dim = padded_dims
    group_size = num_heads // num_kv_heads
    num_rows, max_num_keys = num_tokens * group_size, first_num_keys + num_tokens - 1
    table = numba.carray(pointer(args[_TABLES_PTR] + 4 * request * args[_TABLE_STRIDE]), (max_num_keys,), np.int32)
    queries_ptr = scratch_ptr
    keys_ptr = queries_ptr + 4 * num_rows * key_dim
    values_ptr = keys_ptr + 4 * BLOCK_KEYS * key_dim
    scores_ptr = values_ptr + 4 * BLOCK_KEYS * value_dim
    outputs_ptr = scores_ptr + 4 * num_rows * BLOCK_KEYS
    outputs = numba.carray(pointer(outputs_ptr), (value_dim // PANEL_WIDTH, num_rows, PANEL_WIDTH), np.float32)
    softmax_ptr = outputs_ptr + 4 * num_rows * value_dim
    softmax_state = numba.carray(pointer(softmax_ptr), (num_rows, 2), np.float32)
    q_ptr = args[_Q_PTR] + 4 * (first_token * args[_Q_STRIDE] + kv_head * group_size * head_dim)
    _pack_queries(q_ptr, args[_Q_STRIDE], group_size, head_dim, key_dim, num_rows, scale, queries_ptr)
    num_row_tiles = -(-num_rows // TILE_ROWS)
    for start in range(0, max_num_keys, BLOCK_KEYS):
        num_keys = min(BLOCK_KEYS, max_num_keys - start)
        _copy_keys_and_values(
            args[_CACHE_PTR], table, start, num_keys, page_size, num_kv_heads, kv_head, head_dim, keys_ptr, values_ptr
        )
        for row_tile in range(num_row_tiles):
            begin, end = row_tile * num_rows // num_row_tiles, (row_tile + 1) * num_rows // num_row_tiles
            # Skip rows that see no key of this block.
            if first_num_keys + (end - 1) // group_size <= start:
                continue
            for key in range(0, num_keys, GROUP_WIDTH):
                group_ptr, score_ptr = keys_ptr + 4 * key * key_dim, scores_ptr + 4 * (begin * BLOCK_KEYS + key)
                _compute_scores(end - begin, queries_ptr + 4 * begin * key_dim, group_ptr, key_dim, score_ptr)
            for row in range(begin, end):
                num_visible = min(max(first_num_keys + row // group_size - start, 0), num_keys)
                _compute_weights(
                    scores_ptr + 4 * row * BLOCK_KEYS,
                    num_visible,
                    softmax_ptr + 8 * row,
                    outputs_ptr + 4 * row * PANEL_WIDTH,
                    num_rows,
                    value_dim,
                    start == 0,
                )
            for column in range(0, value_dim, GROUP_WIDTH):
                _add_values(
                    end - begin,
                    scores_ptr + 4 * begin * BLOCK_KEYS,
                    values_ptr + 4 * column * BLOCK_KEYS,
                    -(-num_keys // UNROLL) * UNROLL,
                    outputs_ptr
                    + 4 * (column // PANEL_WIDTH * num_rows * PANEL_WIDTH + begin * PANEL_WIDTH + column % PANEL_WIDTH),
                )
    for row in range(num_rows):
        head = kv_head * group_size + row % group_size
        out_ptr = args[_OUT_PTR] + 4 * ((first_token + row // group_size) * num_heads + head) * head_dim
        _write_outputs(outputs, row, softmax_state[row, 1], numba.carray(pointer(out_ptr), (head_dim,), np.float32))


@kernel_without_reordering
def _pack_queries(q_ptr, q_stride, group_size, head_dim, key_dim, num_rows, scale, out_ptr):
    """Multiply queries by `scale`. Write each row tile to `out_ptr` as [key_dim, rows], padded with 0."""
    num_row_tiles = -(-num_rows // TILE_ROWS)
    for row_tile in range(num_row_tiles):
        begin, end = row_tile * num_rows // num_row_tiles, (row_tile + 1) * num_rows // num_row_tiles
        packed = numba.carray(pointer(out_ptr + 4 * begin * key_dim), (key_dim, end - begin), np.float32)
        packed[head_dim:] = _ZERO
        for row in range(begin, end):
            row_ptr = q_ptr + 4 * (row // group_size * q_stride + row % group_size * head_dim)
            q = numba.carray(pointer(row_ptr), (head_dim,), np.float32)
            for k in range(head_dim):
                packed[k, row - begin] = q[k] * scale


@kernel
def _copy_keys_and_values(
    cache_ptr, table, start, num_keys, page_size, num_kv_heads, kv_head, head_dim, keys_ptr, values_ptr
):
    """Copy a block of keys and values, and convert both to float32. `table` holds the request's page numbers.

    keys_ptr: copied keys [BLOCK_KEYS / GROUP_WIDTH, key_dim, GROUP_WIDTH], undefined past `num_keys`.
    values_ptr: copied values [value_dim / GROUP_WIDTH, BLOCK_KEYS, GROUP_WIDTH]. Values past `num_keys` are 0 up to a
        multiple of UNROLL keys, and then undefined.
    """
    key_dim = -(-head_dim // UNROLL) * UNROLL
    num_value_groups = -(-head_dim // PANEL_WIDTH) * PANEL_WIDTH // GROUP_WIDTH
    keys = numba.carray(pointer(keys_ptr), (BLOCK_KEYS // GROUP_WIDTH, key_dim, GROUP_WIDTH), np.float32)
    values = numba.carray(pointer(values_ptr), (num_value_groups, BLOCK_KEYS, GROUP_WIDTH), np.float32)
    # Distance in bytes between a token's key and the token's value.
    kv_bytes = 2 * num_kv_heads * head_dim
    i = 0
    while i < num_keys:
        slot = table[(start + i) // page_size] * page_size + (start + i) % page_size
        key_ptr = cache_ptr + slot * 2 * kv_bytes + 2 * kv_head * head_dim
        num_copied = 1
        if (
            head_dim % TRANSPOSED_SIZE == 0
            and i % TRANSPOSED_SIZE == 0
            and page_size % TRANSPOSED_SIZE == 0
            and i + TRANSPOSED_SIZE <= num_keys
        ):
            num_copied = TRANSPOSED_SIZE
            for k in range(0, head_dim, TRANSPOSED_SIZE):
                target_ptr = keys_ptr + 4 * ((i // GROUP_WIDTH * key_dim + k) * GROUP_WIDTH + i % GROUP_WIDTH)
                transpose_keys(key_ptr + 2 * k, 2 * kv_bytes, target_ptr)
        else:
            key = numba.carray(pointer(key_ptr), (head_dim,), np.uint16)
            for k in range(head_dim):
                keys[i // GROUP_WIDTH, k, i % GROUP_WIDTH] = from_bf16(key[k])
            for k in range(head_dim, key_dim):
                keys[i // GROUP_WIDTH, k, i % GROUP_WIDTH] = _ZERO
        for j in range(num_copied):
            _copy_value(values, i + j, key_ptr + j * 2 * kv_bytes + kv_bytes, head_dim)
        i += num_copied
    while i % UNROLL:
        values[:, i] = _ZERO
        i += 1


@kernel
def _copy_value(values, index, value_ptr, head_dim):
    """Convert one token's value to float32, and pad the value with zeros. Store the value in `values[:, index]`."""
    value = numba.carray(pointer(value_ptr), (head_dim,), np.uint16)
    num_full_groups = head_dim // GROUP_WIDTH
    values_ptr = np.int64(values.ctypes.data) + 4 * index * GROUP_WIDTH
    for group in range(num_full_groups):
        convert_group(value_ptr + 2 * group * GROUP_WIDTH, values_ptr + 4 * group * BLOCK_KEYS * GROUP_WIDTH)
    for group in range(num_full_groups, values.shape[0]):
        for k in range(GROUP_WIDTH):
            element = group * GROUP_WIDTH + k
            values[group, index, k] = from_bf16(value[element]) if element < head_dim else _ZERO


@kernel_without_reordering
def _compute_weights(scores_ptr, num_visible, softmax_ptr, outputs_ptr, num_rows, value_dim, is_first):
    """Turn one row's scores in one block into weights. If the largest score grows, rescale the row's outputs.

    num_visible: number of the block's keys that the row sees. Weights of the other keys become 0.
    softmax_ptr: address of two float32 numbers: the row's largest score, and the sum of the row's weights.
    is_first: whether this is the row's first block.
    """
    softmax_state = numba.carray(pointer(softmax_ptr), (2,), np.float32)
    if num_visible < BLOCK_KEYS:
        # Scores of keys that the row does not see are undefined.
        _fill(scores_ptr, num_visible, _MASKED_SCORE)
    max_score = find_max(scores_ptr, BLOCK_KEYS)
    if is_first:
        softmax_state[1] = _ZERO
        _rescale(outputs_ptr, num_rows, value_dim, _ZERO)
    elif max_score > softmax_state[0]:
        factor = exp(softmax_state[0] - max_score)
        softmax_state[1] *= factor
        _rescale(outputs_ptr, num_rows, value_dim, factor)
    else:
        max_score = softmax_state[0]
    softmax_state[0] = max_score
    # The largest score so far adds a weight of 1 to the sum. Masked scores add about 1e-38, which rounding removes.
    softmax_state[1] += exp_and_sum(scores_ptr, BLOCK_KEYS, max_score)
    if num_visible < BLOCK_KEYS:
        _fill(scores_ptr, num_visible, _ZERO)


@kernel_without_reordering
def _fill(scores_ptr, first_key, number):
    """Set a row's scores of key `first_key` and all later keys of the block to `number`."""
    scores = numba.carray(pointer(scores_ptr), (BLOCK_KEYS,), np.float32)
    for i in range(first_key, BLOCK_KEYS):
        scores[i] = number


@kernel_without_reordering
def _rescale(outputs_ptr, num_rows, value_dim, factor):
    """Multiply one row's outputs by `factor`. Each panel of PANEL_WIDTH outputs is contiguous."""
    for panel in range(value_dim // PANEL_WIDTH):
        outputs = numba.carray(pointer(outputs_ptr + 4 * panel * num_rows * PANEL_WIDTH), (PANEL_WIDTH,), np.float32)
        for k in range(PANEL_WIDTH):
            # With factor 0, outputs may be uninitialised. Do not multiply: 0 times NaN is NaN.
            outputs[k] = outputs[k] * factor if factor != _ZERO else _ZERO


@kernel_without_reordering
def _write_outputs(outputs, row, weight_sum, out):
    for k in range(out.shape[0]):
        out[k] = outputs[k // PANEL_WIDTH, row, k % PANEL_WIDTH] / weight_sum


_compute_scores_1 = make_multiplier(1, sums_stride=BLOCK_KEYS)
_compute_scores_2 = make_multiplier(2, sums_stride=BLOCK_KEYS)
_compute_scores_3 = make_multiplier(3, sums_stride=BLOCK_KEYS)
_compute_scores_4 = make_multiplier(4, sums_stride=BLOCK_KEYS)
_compute_scores_5 = make_multiplier(5, sums_stride=BLOCK_KEYS)
_compute_scores_6 = make_multiplier(6, sums_stride=BLOCK_KEYS)
_add_values_1 = make_multiplier(1, row_stride=BLOCK_KEYS)
_add_values_2 = make_multiplier(2, row_stride=BLOCK_KEYS)
_add_values_3 = make_multiplier(3, row_stride=BLOCK_KEYS)
_add_values_4 = make_multiplier(4, row_stride=BLOCK_KEYS)
_add_values_5 = make_multiplier(5, row_stride=BLOCK_KEYS)
_add_values_6 = make_multiplier(6, row_stride=BLOCK_KEYS)


@kernel
def _compute_scores(num_rows, queries_ptr, keys_ptr, key_dim, scores_ptr):
    """Compute the scores of `num_rows` rows, at most TILE_ROWS, for GROUP_WIDTH keys."""
    if num_rows == 6:
        _compute_scores_6(queries_ptr, keys_ptr, key_dim, scores_ptr, 0, 0, 0)
    elif num_rows == 5:
        _compute_scores_5(queries_ptr, keys_ptr, key_dim, scores_ptr, 0, 0, 0)
    elif num_rows == 4:
        _compute_scores_4(queries_ptr, keys_ptr, key_dim, scores_ptr, 0, 0, 0)
    elif num_rows == 3:
        _compute_scores_3(queries_ptr, keys_ptr, key_dim, scores_ptr, 0, 0, 0)
    elif num_rows == 2:
        _compute_scores_2(queries_ptr, keys_ptr, key_dim, scores_ptr, 0, 0, 0)
    else:
        _compute_scores_1(queries_ptr, keys_ptr, key_dim, scores_ptr, 0, 0, 0)


@kernel
def _add_values(num_rows, weights_ptr, values_ptr, num_keys, outputs_ptr):
    """Add weighted values to the outputs of `num_rows` rows, at most TILE_ROWS, for GROUP_WIDTH elements."""
    if num_rows == 6:
        _add_values_6(weights_ptr, values_ptr, num_keys, outputs_ptr, 1, 0, 0)
    elif num_rows == 5:
        _add_values_5(weights_ptr, values_ptr, num_keys, outputs_ptr, 1, 0, 0)
    elif num_rows == 4:
        _add_values_4(weights_ptr, values_ptr, num_keys, outputs_ptr, 1, 0, 0)
    elif num_rows == 3:
        _add_values_3(weights_ptr, values_ptr, num_keys, outputs_ptr, 1, 0, 0)
    elif num_rows == 2:
        _add_values_2(weights_ptr, values_ptr, num_keys, outputs_ptr, 1, 0, 0)
    else:
        _add_values_1(weights_ptr, values_ptr, num_keys, outputs_ptr, 1, 0, 0)


_ATTEND_REGION = compile_region(_attend_items)
