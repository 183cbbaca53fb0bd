"""Sums large tensors of GPUs in one kernel: each rank sums a part, and sends the sums to its peers (two-shot).

Programs send units of SLOT_BYTES bytes. A chunk is the units that a program sends at once, one per thread.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.collective.gluon_peer_memory import find_chunk, find_region, put, take, take_sum
from nanovllm_kernels.collective.peer_memory import PeerMemory
from nanovllm_kernels.collective.policy import SLOT_BYTES, TwoShotLaunch
from nanovllm_kernels.platform import can_overlap_launches


def all_reduce(peers: PeerMemory, x: Tensor, launch: TwoShotLaunch) -> None:
    """Overwrite contiguous float32, bfloat16 or float16 `x` with the ranks' sum, in float32 and in rank order."""
    num_warps = launch.chunk_units // 32
    overlap = can_overlap_launches(x.device)  # programmatic dependent launch
    _all_reduce[(launch.num_programs,)](
        x,
        peers.addresses,
        peers.phases,
        x.numel(),
        launch.part_size,
        RANK=peers.rank,
        SIZE=peers.size,
        REGION_BYTES=peers.region_bytes,
        CHUNK_UNITS=launch.chunk_units,
        PER_UNIT=SLOT_BYTES // x.element_size(),
        WARPS=num_warps,
        OVERLAP=overlap,
        num_warps=num_warps,
        launch_pdl=overlap,
    )


@gluon.jit
def _all_reduce(
    x_ptr,
    addresses_ptr,
    phases_ptr,
    num_elements,
    part_size,
    RANK: gl.constexpr,
    SIZE: gl.constexpr,
    REGION_BYTES: gl.constexpr,  # the first half receives terms of sums, the second half receives sums
    CHUNK_UNITS: gl.constexpr,
    PER_UNIT: gl.constexpr,  # elements per unit
    WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Process every num_programs-th chunk of each part. Rank r sums part r.

    First, send to each other rank this rank's terms of that rank's part. Then sum the chunks of this rank's part, and
    send the sums to all other ranks. Finally, receive the sums of the other ranks' parts.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, PER_UNIT], [32, 1], [WARPS, 1], [1, 0])  # a unit per thread
    SUM_OFFSET: gl.constexpr = REGION_BYTES // 2
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    units = gl.arange(0, CHUNK_UNITS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    unit_elements = gl.arange(0, PER_UNIT, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    num_chunks = gl.cdiv(part_size, CHUNK_UNITS * PER_UNIT)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    phase = gl.load(phases_ptr + program)
    for chunk in range(program, num_chunks, num_programs):
        for step in gl.static_range(1, SIZE):
            # Each rank starts with another receiver, so that the ranks share the links evenly.
            receiver = (RANK + step) % SIZE
            elements, mask, slots = find_chunk(chunk, units, unit_elements, receiver, num_elements, part_size)
            terms = gl.load(x_ptr + elements, mask, 0)
            put(terms, find_region(addresses_ptr, receiver, RANK, phase, SIZE, REGION_BYTES), slots)
    for chunk in range(program, num_chunks, num_programs):
        elements, mask, slots = find_chunk(chunk, units, unit_elements, RANK, num_elements, part_size)
        own_terms = gl.load(x_ptr + elements, mask, 0)
        sums = take_sum(own_terms, addresses_ptr, slots, phase, RANK, SIZE, REGION_BYTES).to(own_terms.dtype)
        gl.store(x_ptr + elements, sums, mask)
        for step in gl.static_range(1, SIZE):
            receiver = (RANK + step) % SIZE
            put(sums, find_region(addresses_ptr, receiver, RANK, phase, SIZE, REGION_BYTES) + SUM_OFFSET, slots)
    for chunk in range(program, num_chunks, num_programs):
        for step in gl.static_range(1, SIZE):
            sender = (RANK + SIZE - step) % SIZE
            elements, mask, slots = find_chunk(chunk, units, unit_elements, sender, num_elements, part_size)
            region = find_region(addresses_ptr, RANK, sender, phase, SIZE, REGION_BYTES) + SUM_OFFSET
            sums = take(elements.to(x_ptr.dtype.element_ty), region, slots)
            gl.store(x_ptr + elements, sums, mask)
    # Wait until all threads have read the phase.
    gl.thread_barrier()
    gl.store(phases_ptr + program, 1 - phase)
