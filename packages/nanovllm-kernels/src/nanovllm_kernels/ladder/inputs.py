"""Random numbers, and the heads of an 8B model: what works of several families take.

This room must not know an operator, nor how a work is timed.
"""

import torch

DTYPE = torch.bfloat16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128


def random(*shape: int) -> torch.Tensor:
    """Normal numbers in bf16 on the GPU."""
    return torch.randn(shape, device="cuda", dtype=DTYPE)
