"""Finds this rank's experts among chosen experts, inside the kernels of experts."""

import triton
import triton.language as tl


@triton.jit
def to_local(ids, first_id, num_experts):
    """Return each expert's index among this rank's `num_experts` experts, or -1 for an expert of another rank."""
    experts = ids - first_id
    return tl.where((experts >= 0) & (experts < num_experts), experts, -1)
