"""Copies states between slots on CUDA, without additional memory."""

import triton
import triton.language as tl
from torch import Tensor

# State elements per program.
BLOCK = 4096


def copy_states(states: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the state in slot sources[i] to slot targets[i] in all layers, for each i in order."""
    if not states.is_contiguous():
        raise ValueError(f"the states must be contiguous, but have strides {states.stride()}: copy them first")
    num_layers, slot_size = states.shape[0], states.stride(1)
    _copy_states[(num_layers, triton.cdiv(slot_size, BLOCK))](
        states, sources, targets, states.stride(0), slot_size, len(sources), BLOCK=BLOCK, num_warps=8, num_stages=1
    )


@triton.jit(do_not_specialize=["num_copies"], do_not_specialize_on_alignment=["sources_ptr", "targets_ptr"])
def _copy_states(states_ptr, sources_ptr, targets_ptr, layer_stride, slot_stride, num_copies, BLOCK: tl.constexpr):
    """Copy up to BLOCK elements of one layer's state, for one pair (source slot, target slot) after another."""
    offsets = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_state = offsets < slot_stride
    states_ptr += tl.program_id(0).to(tl.int64) * layer_stride + offsets
    for copy_index in tl.range(0, num_copies, num_stages=1):
        source, target = tl.load(sources_ptr + copy_index), tl.load(targets_ptr + copy_index)
        block = tl.load(states_ptr + source * slot_stride, mask=in_state)
        tl.store(states_ptr + target * slot_stride, block, mask=in_state)
        # The next copy may read what this copy wrote.
        tl.debug_barrier()
