"""Exchanges tensors between GPUs: in one kernel, a rank sends to each peer, and sums or concatenates all parts."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.collective.gluon_peer_memory import find_chunk, find_region, put, take, take_sum
from nanovllm_kernels.collective.peer_memory import PeerMemory
from nanovllm_kernels.collective.policy import SLOT_BYTES, ExchangeLaunch
from nanovllm_kernels.platform import can_overlap_launches


def sum_all(peers: PeerMemory, x: Tensor, out: Tensor, launch: ExchangeLaunch, *, sends_parts: bool) -> None:
    """Write the sum of all ranks' `x` to `out`, computed in float32 and in rank order.

    x: contiguous; float32, bfloat16 or float16.
    sends_parts: True sums this rank's part of each `x` [size, ...]. False sums whole tensors; `out` may then be `x`.
    """
    part_size = out.numel()
    _launch(peers, x, out, part_size, part_size, launch, sends_parts=sends_parts, sums=True, is_exact=False)


def concatenate(
    peers: PeerMemory,
    x: Tensor,
    out: Tensor,
    row_size: int,
    launch: ExchangeLaunch,
    *,
    sends_parts: bool,
    is_exact: bool,
) -> None:
    """Join row i of all ranks' `x`, or of this rank's part of each `x`, into row i of `out`, in rank order.

    x: int32 [row, column], or [size, row, column] if `sends_parts` is set; contiguous.
    out: int32 [row, size, column], contiguous.
    row_size: number of columns.
    is_exact: whether all bits must arrive unchanged. If False, `x` holds floating-point values, and a NaN may arrive as
        another NaN.
    """
    part_size = out.numel() // peers.size
    _launch(peers, x, out, part_size, row_size, launch, sends_parts=sends_parts, sums=False, is_exact=is_exact)


def _launch(
    peers: PeerMemory,
    x: Tensor,
    out: Tensor,
    part_size: int,
    row_size: int,
    launch: ExchangeLaunch,
    *,
    sends_parts: bool,
    sums: bool,
    is_exact: bool,
) -> None:
    num_warps = launch.chunk_units // 32
    overlap = can_overlap_launches(x.device)  # programmatic dependent launch
    _exchange[(launch.num_programs,)](
        x,
        out,
        peers.addresses,
        peers.phases,
        part_size,
        row_size,
        RANK=peers.rank,
        SIZE=peers.size,
        REGION_BYTES=peers.region_bytes,
        CHUNK_UNITS=launch.chunk_units,
        PER_UNIT=2 if is_exact else SLOT_BYTES // x.element_size(),
        WARPS=num_warps,
        SENDS_PARTS=sends_parts,
        SUMS=sums,
        OVERLAP=overlap,
        num_warps=num_warps,
        launch_pdl=overlap,
    )


@gluon.jit
def _exchange(
    x_ptr,
    out_ptr,
    addresses_ptr,
    phases_ptr,
    part_size,  # number of elements that a rank sends to another rank
    row_size,
    RANK: gl.constexpr,
    SIZE: gl.constexpr,
    REGION_BYTES: gl.constexpr,
    CHUNK_UNITS: gl.constexpr,
    PER_UNIT: gl.constexpr,  # elements per unit
    WARPS: gl.constexpr,
    SENDS_PARTS: gl.constexpr,
    SUMS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Send every num_programs-th chunk (CHUNK_UNITS units) of each part, and receive the other ranks' chunks.

    Before a program receives a chunk, it sends the next one. Results are thus written while the next chunk travels.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, PER_UNIT], [32, 1], [WARPS, 1], [1, 0])  # a unit per thread
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    units = gl.arange(0, CHUNK_UNITS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    unit_elements = gl.arange(0, PER_UNIT, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    part_stride = part_size if SENDS_PARTS else 0
    num_chunks = gl.cdiv(part_size, CHUNK_UNITS * PER_UNIT)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    phase = gl.load(phases_ptr + program)
    for chunk in range(program - num_programs, num_chunks, num_programs):
        sent_chunk = chunk + num_programs
        if sent_chunk < num_chunks:
            elements, mask, slots = find_chunk(sent_chunk, units, unit_elements, 0, part_size, part_size)
            for step in gl.static_range(1, SIZE):
                # Each rank starts with a different receiver, so that the ranks share the links evenly.
                receiver = (RANK + step) % SIZE
                part = gl.load(x_ptr + receiver * part_stride + elements, mask, 0)
                put(part, find_region(addresses_ptr, receiver, RANK, phase, SIZE, REGION_BYTES), slots)
        if chunk >= 0:
            elements, mask, slots = find_chunk(chunk, units, unit_elements, 0, part_size, part_size)
            own_part = gl.load(x_ptr + RANK * part_stride + elements, mask, 0)
            if SUMS:
                sums = take_sum(own_part, addresses_ptr, slots, phase, RANK, SIZE, REGION_BYTES)
                gl.store(out_ptr + elements, sums.to(out_ptr.dtype.element_ty), mask)
            else:
                out_elements = elements // row_size * (SIZE * row_size) + elements % row_size
                for sender in gl.static_range(SIZE):
                    part = own_part
                    if sender != RANK:
                        region = find_region(addresses_ptr, RANK, sender, phase, SIZE, REGION_BYTES)
                        part = take(own_part, region, slots)
                    gl.store(out_ptr + sender * row_size + out_elements, part, mask)
    # All threads must have read the phase before it changes.
    gl.thread_barrier()
    gl.store(phases_ptr + program, 1 - phase)
