"""Converts keys and values to FP8 and back, in plain torch.

A cache has N pages of P tokens, Hkv key heads and Hkv value heads of dimension D. The cache consists of e4m3 values
[N, P, 2 Hkv, D] and of scales [N, 2 Hkv, P]. A scale is a power of two, stored as its biased float32 exponent (uint8,
E8M0).
"""

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn  # dtype of quantised values
# Bytes per scale. A token has one scale per head.
SCALE_BYTES = 1
EXPONENT_BIAS = 127  # exponent bias of float32
E4M3_EXPONENT_BIAS = 7
# The largest e4m3 value is 1.75 * 2^8. Adding CARRY_ABOVE_MAX_SIGNIFICAND to a float32's bits increments the exponent
# if, and only if, the significand is above 1.75.
MAX_E4M3 = 448.0
MAX_E4M3_EXPONENT = 8
CARRY_ABOVE_MAX_SIGNIFICAND = (1 << 23) - 1 - 0x600000
# Biased exponent of the smallest scale. The smallest scale is 2^-40 instead of 0, because kernels divide by scales.
MIN_SCALE_EXPONENT = EXPONENT_BIAS - 40
# Minimum of a group's largest magnitude in block FP8 (`gemm.block_fp8`), so that no scale is 0.
MIN_GROUP_MAGNITUDE = 1e-10


def make_scales(kv_cache: Tensor) -> Tensor:
    """Return scales of 1, uint8 [N, 2 Hkv, P], for a cache [N, P, 2 Hkv, D]."""
    num_pages, page_size, num_heads, _ = kv_cache.shape
    return torch.full((num_pages, num_heads, page_size), EXPONENT_BIAS, dtype=torch.uint8, device=kv_cache.device)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round `x` [..., D] to e4m3 with the smallest scales that do not overflow. Returns (values, uint8 exponents)."""
    x = x.float()
    exponents = (x.abs().amax(-1).view(torch.int32) + CARRY_ABOVE_MAX_SIGNIFICAND) >> 23
    exponents = (exponents - MAX_E4M3_EXPONENT).clamp_(min=MIN_SCALE_EXPONENT)
    inverse_scales = (2 * EXPONENT_BIAS - exponents << 23).view(torch.float32)
    return (x * inverse_scales.unsqueeze(-1)).to(DTYPE), exponents.to(torch.uint8)


def dequantize(values: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Invert `quantize`. float32 and bfloat16 results are exact. An e4m3 NaN becomes a finite number."""
    # float16 cannot hold the smallest scales.
    product_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    scales = (exponents.int() << 23).view(torch.float32).to(product_dtype)
    return widen(values, product_dtype).mul_(scales.unsqueeze(-1)).to(dtype)


def widen(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert e4m3 to float32 or bfloat16. On a CPU, `Tensor.to` takes four times as long."""
    int_dtype, shift = (torch.int16, 4) if dtype == torch.bfloat16 else (torch.int32, 20)
    # The shift puts exponent and mantissa in place. The mask clears four bits that sign extension has set.
    bits = values.view(torch.int8).to(int_dtype).bitwise_left_shift_(shift).bitwise_and_(~(0x78 << (shift + 4)))
    return bits.view(dtype).mul_(2.0 ** (EXPONENT_BIAS - E4M3_EXPONENT_BIAS))
