"""Sums the partial sums of GPUs, adds the residual, and normalizes the rows (RMSNorm), in one kernel.

Ranks send units of 16 bytes. `gluon_peer_memory` describes units and slots, and `PeerMemory` describes phases.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.collective.gluon_peer_memory import find_region, put, take_sum
from nanovllm_kernels.collective.peer_memory import PeerMemory
from nanovllm_kernels.collective.policy import MAX_NORM_WARPS, SLOT_BYTES
from nanovllm_kernels.platform import can_overlap_launches


def all_reduce_norm(
    peers: PeerMemory,
    partial: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    normed: Tensor,
) -> None:
    """Sum `partial` over the ranks in float32 and in rank order, add `residual`, and write the normed rows to `normed`.

    partial: [T, H], contiguous. Overwritten with the new residual if `residual` is None.
    residual: [T, H], contiguous. Overwritten with the new residual.
    T is at most `LaunchPolicy.choose_norm_rows`.
    """
    num_programs = min(partial.shape[0], peers.max_programs)
    _launch(peers, partial, residual, norm_weight, eps, normed, num_programs, peers.rank, peers.size)


def add_norm(
    peers: PeerMemory, partial: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, normed: Tensor
) -> None:
    """Do what `all_reduce_norm` does, but without the sum: `partial` is already the sum over the ranks."""
    _launch(peers, partial, residual, norm_weight, eps, normed, partial.shape[0], 0, 1)


def _launch(
    peers: PeerMemory,
    partial: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    normed: Tensor,
    num_programs: int,
    rank: int,
    size: int,
) -> None:
    num_rows, row_size = partial.shape
    elements_per_unit = SLOT_BYTES // partial.element_size()
    row_units = max(32, triton.next_power_of_2(triton.cdiv(row_size, elements_per_unit)))
    num_warps = min(MAX_NORM_WARPS, row_units // 32)
    overlap = can_overlap_launches(partial.device)  # programmatic dependent launch
    _all_reduce_norm[(num_programs,)](
        partial,
        partial if residual is None else residual,
        norm_weight,
        normed,
        peers.addresses,
        peers.phases,
        num_rows,
        eps,
        RANK=rank,
        SIZE=size,
        REGION_BYTES=peers.region_bytes,
        ROW_SIZE=row_size,
        ROW_UNITS=row_units,
        PER_UNIT=elements_per_unit,
        WARPS=num_warps,
        RESIDUAL=residual is not None,
        OVERLAP=overlap,
        num_warps=num_warps,
        launch_pdl=overlap,
    )


@gluon.jit(do_not_specialize=["num_rows"])
def _all_reduce_norm(
    partial_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    addresses_ptr,
    phases_ptr,
    num_rows,
    eps,
    RANK: gl.constexpr,
    SIZE: gl.constexpr,  # 1: `partial` is already the sum
    REGION_BYTES: gl.constexpr,
    ROW_SIZE: gl.constexpr,
    ROW_UNITS: gl.constexpr,  # units of a row, padded to a power of two
    PER_UNIT: gl.constexpr,  # elements per unit
    WARPS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Send every num_programs-th row, and receive, sum and norm the same rows.

    Before a program receives a row, it sends the next one. Rows are thus normed while the next rows travel.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, PER_UNIT], [32, 1], [WARPS, 1], [1, 0])  # a unit per thread
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    units = gl.arange(0, ROW_UNITS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    columns = units * PER_UNIT + gl.arange(0, PER_UNIT, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    mask = columns < ROW_SIZE
    weight = gl.load(weight_ptr + columns, mask, 0).to(gl.float32)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    # Without a sum, there may be more programs than phases.
    phase = gl.load(phases_ptr + program) if SIZE > 1 else 0
    first_row = program - num_programs if SIZE > 1 else program
    for row in range(first_row, num_rows, num_programs):
        sent_row = row + num_programs
        if SIZE > 1:  # noqa: SIM102 (known at compile time, unlike the next condition)
            if sent_row < num_rows:
                terms, slots = _load_row(partial_ptr, sent_row, units, columns, ROW_SIZE)
                for step in gl.static_range(1, SIZE):
                    # Each rank starts with a different receiver, so that the ranks share the links evenly.
                    receiver = (RANK + step) % SIZE
                    put(terms, find_region(addresses_ptr, receiver, RANK, phase, SIZE, REGION_BYTES), slots)
        if row >= 0:
            own_terms, slots = _load_row(partial_ptr, row, units, columns, ROW_SIZE)
            elements = gl.cast(row, gl.int64) * ROW_SIZE + columns
            # Load the residual while the units travel.
            residual = gl.load(residual_ptr + elements, mask, 0)
            sums = take_sum(own_terms, addresses_ptr, slots, phase, RANK, SIZE, REGION_BYTES)
            if RESIDUAL:
                sums += residual.to(gl.float32)
            residual = sums.to(residual_ptr.dtype.element_ty)
            gl.store(residual_ptr + elements, residual, mask)
            # Norm the rounded residual, as a separate norm kernel would.
            x = residual.to(gl.float32)
            scale = gl.rsqrt(gl.sum(gl.sum(x * x, 1), 0) / ROW_SIZE + eps)
            gl.store(normed_ptr + elements, (x * scale * weight).to(normed_ptr.dtype.element_ty), mask)
    if SIZE > 1:
        # All threads must have read the phase before it changes.
        gl.thread_barrier()
        gl.store(phases_ptr + program, 1 - phase)


@gluon.jit
def _load_row(partial_ptr, row, units, columns, ROW_SIZE: gl.constexpr):
    """Return (elements of a row, slots of its units). Units after the end of the row have slot -1."""
    PER_UNIT: gl.constexpr = columns.shape[1]
    SLOTS_PER_ROW: gl.constexpr = (ROW_SIZE + PER_UNIT - 1) // PER_UNIT
    elements = gl.load(partial_ptr + gl.cast(row, gl.int64) * ROW_SIZE + columns, columns < ROW_SIZE, 0)
    slots = gl.where(units < SLOTS_PER_ROW, row // gl.num_programs(0) * SLOTS_PER_ROW + units, -1)
    return elements, slots
