"""Random inputs, and the dtype and head sizes of an 8B model."""

import torch

DTYPE = torch.bfloat16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128


def random(*shape: int) -> torch.Tensor:
    """Return normally distributed bf16 values on the GPU."""
    return torch.randn(shape, device="cuda", dtype=DTYPE)
