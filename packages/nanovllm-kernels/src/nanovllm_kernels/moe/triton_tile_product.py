"""Loads and multiplies tiles inside the kernels of `triton_unsorted` and `triton_grouped`."""

import triton
import triton.language as tl


@triton.jit
def load_weight(weight_ptr, weight_rows, ks, N: tl.constexpr, K: tl.constexpr):
    """Load elements [n, k] of a weight [N, K], at `weight_rows` [n] and `ks` [1, k]. Use 0 outside the weight."""
    mask = (weight_rows < N)[:, None] & (ks < K)
    return tl.load(weight_ptr + weight_rows[:, None].to(tl.int64) * K + ks, mask=mask, other=0.0)


@triton.jit
def add_product(sums, x, weight, scales, SCALED: tl.constexpr, SWAPPED: tl.constexpr):
    """Return `sums + x @ weight.T`. SCALED: multiply the product by `scales` [rows]. SWAPPED: `sums` are transposed."""
    if SWAPPED:
        left = weight
        right = x.T
    else:
        left = x
        right = weight.T
    if SCALED:
        sums += tl.dot(left, right) * tl.expand_dims(scales, 0 if SWAPPED else 1)
    else:
        sums = tl.dot(left, right, sums, input_precision="ieee")
    return sums
