"""Caches of several shapes and dtypes, as a model with attention and recurrent layers has them."""

import torch
from torch import Tensor


def make_caches(device: str, num_blocks: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(dtype: torch.dtype, *shape: int) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)

    keys = [random(torch.bfloat16, num_blocks, 16, 4, 80) for _ in range(2)]
    scales = random(torch.uint8, num_blocks, 4, 16)
    values = random(torch.float8_e4m3fn, num_blocks, 16, 4, 72)
    states, inputs = random(torch.float32, 2, num_blocks, 3, 700), random(torch.bfloat16, 2, num_blocks, 4, 6)
    return [cache.to(device) for cache in (*keys, scales, values, states[1], inputs[0])]
