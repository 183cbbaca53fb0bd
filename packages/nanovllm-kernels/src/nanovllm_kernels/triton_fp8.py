"""FP8 rounding in Triton and Gluon kernels, bit-identical to `fp8` and `gemm.block_fp8_reference`."""

import triton
import triton.language as tl

from nanovllm_kernels import fp8

MAX_E4M3 = tl.constexpr(fp8.MAX_E4M3)
MIN_GROUP_MAGNITUDE = tl.constexpr(fp8.MIN_GROUP_MAGNITUDE)
MAX_E4M3_EXPONENT = tl.constexpr(fp8.MAX_E4M3_EXPONENT)
CARRY_ABOVE_MAX_SIGNIFICAND = tl.constexpr(fp8.CARRY_ABOVE_MAX_SIGNIFICAND)
MIN_SCALE_EXPONENT = tl.constexpr(fp8.MIN_SCALE_EXPONENT)


@triton.jit
def quantize_groups(x, axis: tl.constexpr):
    """Round each group of float32 `x` along `axis` to e4m3. Returns the values and the groups' float32 scales."""
    # `div_rn` rounds as the reference does. Triton's "/" is less exact on a GPU.
    magnitude = tl.maximum(tl.max(tl.abs(x), axis), MIN_GROUP_MAGNITUDE)
    factor = tl.div_rn(MAX_E4M3, magnitude)
    scale = tl.div_rn(magnitude, MAX_E4M3)
    return (x * tl.expand_dims(factor, axis)).to(tl.float8e4nv), scale


@triton.jit
def scale_exponents(magnitude):
    """Return the biased exponents of the scales that `fp8.quantize` chooses for heads with these largest magnitudes."""
    exponents = ((magnitude.to(tl.int32, bitcast=True) + CARRY_ABOVE_MAX_SIGNIFICAND) >> 23) - MAX_E4M3_EXPONENT
    return tl.maximum(exponents, MIN_SCALE_EXPONENT)


@triton.jit
def inverse_scales(exponents):
    """Return the inverses of scales, given the biased exponents of the scales."""
    return ((254 - exponents) << 23).to(tl.float32, bitcast=True)
