"""Attention of few queries over a paged bf16 cache on a CPU, read where it lies.

One query head of one token at a time: scores, softmax, weighted sum, all in float32. This room must not know models.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from nanovllm_kernels.jit import (
    OPENMP,
    exp,
    from_bf16,
    keep,
    kernel,
    pointer,
    region,
    run_region,
    thread_count,
    thread_index,
)

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
# As many keys, or values, are read at once.
_AT_ONCE = 4


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    longest: int,
    scale: float,
    out: Tensor,
) -> None:
    """Write into `out`, contiguous float32 [T, Hq, D], what the package's `paged_attention` returns for float32 q and a
    bf16 cache. longest: of the lengths, or more.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, page_size, num_cached, _ = kv_cache.shape
    _attend(
        OPENMP,
        _HEADS_OF_THREAD,
        q.data_ptr(),
        q.stride(0),
        kv_cache.data_ptr(),
        block_tables.data_ptr(),
        block_tables.stride(0),
        seq_lens.data_ptr(),
        query_start_loc.data_ptr(),
        out.data_ptr(),
        num_tokens,
        num_heads,
        num_cached // 2,
        head_dim,
        page_size,
        longest,
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
    num_tokens,
    num_heads,
    num_kv_heads,
    head_dim,
    page_size,
    longest,
    scale,
    num_threads,
):
    args = np.empty(16, np.int64)
    args[0], args[1], args[2], args[3], args[4], args[5] = openmp, q_ptr, q_stride, cache_ptr, tables_ptr, table_stride
    args[6], args[7], args[8], args[9], args[10] = lens_ptr, starts_ptr, out_ptr, num_tokens, num_heads
    args[11], args[12], args[13], args[14] = num_kv_heads, head_dim, page_size, longest
    args.view(np.float64)[15] = scale
    run_region(region, np.int64(args.ctypes.data), num_threads)
    keep(args)


def _heads_of_thread(args_ptr):
    args = numba.carray(pointer(args_ptr), (16,), np.int64)
    scale = numba.carray(pointer(args_ptr), (16,), np.float64)[15]
    q_ptr, q_stride, cache_ptr, tables_ptr, table_stride = args[1], args[2], args[3], args[4], args[5]
    out_ptr, num_tokens, num_heads, num_kv_heads, head_dim = args[8], args[9], args[10], args[11], args[12]
    page_size, longest = args[13], args[14]
    lens = numba.carray(pointer(args[6]), (num_tokens,), np.int32)
    starts = numba.carray(pointer(args[7]), (num_tokens + 1,), np.int32)
    scratch = np.empty(longest + head_dim, np.float32)
    index, count, request = thread_index(args_ptr), thread_count(args_ptr), 0
    for item in range(index * num_tokens * num_heads // count, (index + 1) * num_tokens * num_heads // count):
        token, head = item // num_heads, item % num_heads
        while starts[request + 1] <= token:
            request += 1
        _attend_head(
            q_ptr + 4 * (token * q_stride + head * head_dim),
            cache_ptr + 2 * (head // (num_heads // num_kv_heads)) * head_dim,
            tables_ptr + 4 * request * table_stride,
            out_ptr + 4 * item * head_dim,
            lens[request] - starts[request + 1] + token + 1,
            num_kv_heads * head_dim,
            head_dim,
            page_size,
            np.float32(scale),
            scratch,
        )


@kernel
def _attend_head(q_ptr, keys_ptr, table_ptr, out_ptr, length, width, head_dim, page_size, scale, scratch):
    """width: numbers from a key to its value; the next token's are as far behind that."""
    q = numba.carray(pointer(q_ptr), (head_dim,), np.float32)
    table = numba.carray(pointer(table_ptr), (length,), np.int32)
    out = numba.carray(pointer(out_ptr), (head_dim,), np.float32)
    scores, sums = scratch[:length], scratch[scratch.shape[0] - head_dim :]
    step = 4 * width
    for begin in range(0, length, page_size):
        page_ptr = keys_ptr + table[begin // page_size] * page_size * step
        count = min(page_size, length - begin)
        i = 0
        while i + _AT_ONCE <= count:
            a, b, c, d = _dot4(q, page_ptr + i * step, step)
            scores[begin + i] = a * scale
            scores[begin + i + 1] = b * scale
            scores[begin + i + 2] = c * scale
            scores[begin + i + 3] = d * scale
            i += _AT_ONCE
        while i < count:
            scores[begin + i] = _dot(q, page_ptr + i * step) * scale
            i += 1
    total = _soften(scores)
    sums[:] = _ZERO
    for begin in range(0, length, page_size):
        page_ptr = keys_ptr + table[begin // page_size] * page_size * step + 2 * width
        count = min(page_size, length - begin)
        i = 0
        while i + _AT_ONCE <= count:
            _add4(sums, scores[begin + i : begin + i + _AT_ONCE], page_ptr + i * step, step)
            i += _AT_ONCE
        while i < count:
            _add(sums, scores[begin + i], page_ptr + i * step)
            i += 1
    for k in range(head_dim):
        out[k] = sums[k] / total


@kernel
def _soften(scores):
    """Softmax in place, but for the division by what is returned."""
    most = scores[0]
    for i in range(1, scores.shape[0]):
        most = max(most, scores[i])
    total = _ZERO
    for i in range(scores.shape[0]):
        weight = exp(scores[i] - most)
        scores[i] = weight
        total += weight
    return total


@kernel
def _dot(q, key_ptr):
    key = numba.carray(pointer(key_ptr), q.shape, np.uint16)
    total = _ZERO
    for k in range(q.shape[0]):
        total += q[k] * from_bf16(key[k])
    return total


@kernel
def _dot4(q, first_ptr, step):
    keys = numba.carray(pointer(first_ptr), (4, step // 2), np.uint16)
    a, b, c, d = _ZERO, _ZERO, _ZERO, _ZERO
    for k in range(q.shape[0]):
        a += q[k] * from_bf16(keys[0, k])
        b += q[k] * from_bf16(keys[1, k])
        c += q[k] * from_bf16(keys[2, k])
        d += q[k] * from_bf16(keys[3, k])
    return a, b, c, d


@kernel
def _add(sums, weight, value_ptr):
    value = numba.carray(pointer(value_ptr), sums.shape, np.uint16)
    for k in range(sums.shape[0]):
        sums[k] += weight * from_bf16(value[k])


@kernel
def _add4(sums, weights, first_ptr, step):
    values = numba.carray(pointer(first_ptr), (4, step // 2), np.uint16)
    a, b, c, d = weights[0], weights[1], weights[2], weights[3]
    for k in range(sums.shape[0]):
        sums[k] += (
            a * from_bf16(values[0, k])
            + b * from_bf16(values[1, k])
            + c * from_bf16(values[2, k])
            + d * from_bf16(values[3, k])
        )


_HEADS_OF_THREAD = region(_heads_of_thread)
