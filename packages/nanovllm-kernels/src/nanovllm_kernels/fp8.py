"""FP8 key-value cache in plain torch: e4m3 values, with a power of two as scale per token and head.

Scales are uint8 biased float32 exponents (E8M0), [N, 2 Hkv, P] for values [N, P, 2 Hkv, D]: a head's scales of one page
are contiguous.
"""

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
# Bytes per token and head beside the e4m3 values.
SCALE_BYTES = 1
EXPONENT_BIAS = 127
E4M3_EXPONENT_BIAS = 7
# The largest e4m3 value is 1.75 * 2^8. Adding CARRY_ABOVE_MAX_SIGNIFICAND to float32 bits carries into the exponent
# exactly if the significand is above 1.75.
MAX_E4M3 = 448.0
MAX_E4M3_EXPONENT = 8
CARRY_ABOVE_MAX_SIGNIFICAND = (1 << 23) - 1 - 0x600000
# The smallest scale is 2^-40, so that a head of zeros has a scale too, and kernels may divide by any scale.
MIN_SCALE_EXPONENT = EXPONENT_BIAS - 40
# Block FP8: the smallest magnitude that scales are derived from, so that a group of zeros has a scale too.
MIN_GROUP_MAGNITUDE = 1e-10


def make_scales(kv_cache: Tensor) -> Tensor:
    """Return scales of 1 for a cache [N, P, 2 Hkv, D]: uint8 [N, 2 Hkv, P] on its device."""
    num_pages, page_size, num_cached, _ = kv_cache.shape
    return torch.full((num_pages, num_cached, page_size), EXPONENT_BIAS, dtype=torch.uint8, device=kv_cache.device)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (e4m3 values like `x`, uint8 exponents [...]) with the least scales under which the values fit.

    x: [..., D]. Scaling by a power of two is exact, so each value is rounded once, to nearest.
    """
    wide = x.float()
    exponents = (wide.abs().amax(-1).view(torch.int32) + CARRY_ABOVE_MAX_SIGNIFICAND) >> 23
    exponents = (exponents - MAX_E4M3_EXPONENT).clamp_(min=MIN_SCALE_EXPONENT)
    inverse = (2 * EXPONENT_BIAS - exponents << 23).view(torch.float32)
    return (wide * inverse.unsqueeze(-1)).to(DTYPE), exponents.to(torch.uint8)


def dequantize(numbers: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Invert `quantize`, in `dtype`: exact in float32 and bfloat16. NaN becomes a number."""
    # Scales may be too small for float16.
    wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    scales = (exponents.int() << 23).view(torch.float32).to(wide)
    return widen(numbers, wide).mul_(scales.unsqueeze(-1)).to(dtype)


def widen(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert e4m3 to float32 or bfloat16. On a CPU torch's own conversion is scalar and four times as slow."""
    whole, shift = (torch.int16, 4) if dtype == torch.bfloat16 else (torch.int32, 20)
    # The shift puts exponent and mantissa in place; sign extension also sets four bits below the sign: clear them.
    bits = numbers.view(torch.int8).to(whole).bitwise_left_shift_(shift).bitwise_and_(~(0x78 << (shift + 4)))
    return bits.view(dtype).mul_(2.0 ** (EXPONENT_BIAS - E4M3_EXPONENT_BIAS))
