"""What an FP8 key-value cache holds, in plain torch: e4m3 numbers, and for each head of each token a power of two.

The powers are bytes, biased exponents of float32 (E8M0), in a tensor of their own, [N, 2 Hkv, P] beside numbers of
[N, P, 2 Hkv, D]: a head's scales of one page lie next to each other. This room must not know attention.
"""

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
# Bytes a head of one token takes beside its numbers.
SCALE_BYTES = 1
EXPONENT_BIAS = 127
# e4m3's own.
NARROW_BIAS = 7
# The largest e4m3 is 1.75 * 2^8.
LARGEST_EXPONENT = 8
BEYOND_LARGEST = (1 << 23) - 1 - 0x600000
# 2^-40: a head that is all zeros gets a scale too, and kernels may divide by any.
LEAST_EXPONENT = EXPONENT_BIAS - 40


def make_scales(kv_cache: Tensor) -> Tensor:
    """Scales of 1 for a cache [N, P, 2 Hkv, D]: uint8 [N, 2 Hkv, P] on its device."""
    num_pages, page_size, num_cached, _ = kv_cache.shape
    return torch.full((num_pages, num_cached, page_size), EXPONENT_BIAS, dtype=torch.uint8, device=kv_cache.device)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """(numbers like `x`, uint8 exponents of all but its last dimension), the least scales that let the numbers fit.

    x: [..., D]. Scaling by a power of two is exact, so that each number is rounded once, to the nearest.
    """
    wide = x.float()
    exponents = (wide.abs().amax(-1).view(torch.int32) + BEYOND_LARGEST) >> 23
    exponents = (exponents - LARGEST_EXPONENT).clamp_(min=LEAST_EXPONENT)
    inverse = (2 * EXPONENT_BIAS - exponents << 23).view(torch.float32)
    return (wide * inverse.unsqueeze(-1)).to(DTYPE), exponents.to(torch.uint8)


def dequantize(numbers: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantize`, in `dtype`: exact in float32 and bfloat16. NaN comes out as a number."""
    # Scales of values may be below what float16 has.
    wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    scales = (exponents.int() << 23).view(torch.float32).to(wide)
    return widen(numbers, wide).mul_(scales.unsqueeze(-1)).to(dtype)


def widen(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 in float32 or bfloat16. torch's own conversion takes each by itself on a CPU, and four times as long."""
    whole, shift = (torch.int16, 4) if dtype == torch.bfloat16 else (torch.int32, 20)
    # Exponent and mantissa in the wider ones' places, the sign in its own and in four bits too many.
    bits = numbers.view(torch.int8).to(whole).bitwise_left_shift_(shift).bitwise_and_(~(0x78 << (shift + 4)))
    return bits.view(dtype).mul_(2.0 ** (EXPONENT_BIAS - NARROW_BIAS))
