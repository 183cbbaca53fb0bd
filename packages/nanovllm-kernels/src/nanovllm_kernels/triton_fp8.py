"""FP8 rounding in Triton and Gluon kernels, bit-identical to `fp8` and `gemm.block_fp8_reference`."""

import triton
import triton.language as tl

from nanovllm_kernels import fp8

MAX_E4M3 = tl.constexpr(fp8.MAX_E4M3)
INVERSE_MAX_E4M3 = tl.constexpr(1.0 / fp8.MAX_E4M3)
MIN_GROUP_MAGNITUDE = tl.constexpr(fp8.MIN_GROUP_MAGNITUDE)
MAX_E4M3_EXPONENT = tl.constexpr(fp8.MAX_E4M3_EXPONENT)
CARRY_ABOVE_MAX_SIGNIFICAND = tl.constexpr(fp8.CARRY_ABOVE_MAX_SIGNIFICAND)
MIN_SCALE_EXPONENT = tl.constexpr(fp8.MIN_SCALE_EXPONENT)


@triton.jit
def quantize_groups(x, axis: tl.constexpr):
    """Round float32 `x` to e4m3, with one scale per vector along `axis`. Returns the values and the float32 scales."""
    magnitude = tl.maximum(tl.max(tl.abs(x), axis), MIN_GROUP_MAGNITUDE)
    factor = divide_max_e4m3_by(magnitude)
    return (x * tl.expand_dims(factor, axis)).to(tl.float8e4nv), magnitude * INVERSE_MAX_E4M3


@triton.jit
def divide_max_e4m3_by(magnitude):
    """Return 448 / magnitude, rounded like torch, for magnitudes below 2^126.

    `tl.div_rn` gives the same result but branches, which slows an MoE layer with one token by 15 %.
    Source: Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990.
    """
    # Triton's "/" is inexact on a GPU. The first two `fma` correct the inverse, and the last two the quotient.
    inverse = 1.0 / magnitude
    inverse = tl.fma(tl.fma(-inverse, magnitude, 1.0), inverse, inverse)
    quotient = inverse * MAX_E4M3
    return tl.fma(tl.fma(-quotient, magnitude, MAX_E4M3), inverse, quotient)


@triton.jit
def choose_scale_exponents(magnitude):
    """Return the biased exponents of the scales that `fp8.quantize` chooses. magnitude: max |x| of each vector."""
    exponents = ((magnitude.to(tl.int32, bitcast=True) + CARRY_ABOVE_MAX_SIGNIFICAND) >> 23) - MAX_E4M3_EXPONENT
    return tl.maximum(exponents, MIN_SCALE_EXPONENT)


@triton.jit
def inverse_scales(exponents):
    """Return the inverses of scales, given the biased exponents of the scales."""
    return ((254 - exponents) << 23).to(tl.float32, bitcast=True)
