"""A device function that converts ids of experts to indices among this rank's experts."""

import triton
import triton.language as tl


@triton.jit
def to_local(ids, first_id, num_experts):
    """Return each expert's index among this rank's `num_experts` experts, or -1 for an expert of another rank."""
    experts = ids - first_id
    return tl.where((experts >= 0) & (experts < num_experts), experts, -1)
