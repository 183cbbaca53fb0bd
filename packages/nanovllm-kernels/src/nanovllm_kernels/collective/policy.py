"""Chooses the kernels of the collectives by numbers of bytes.

Choices depend only on shapes and dtypes, so that all ranks choose alike. In a one-shot kernel, each rank sends its
tensor once. In a two-shot kernel, each rank sums one part, and then sends the sums. A unit is SLOT_BYTES bytes.
The limits follow from measurements by `python -m nanovllm_kernels.benchmarks.collectives`.
"""

import sys
from dataclasses import dataclass

MAX_PROGRAMS = 128  # maximum number of programs of a kernel
NUM_PHASES = 2
SLOT_BYTES = 16
EMPTY_BYTE = 0xFF  # value of each byte of an empty slot
# With more than two ranks, one-shot kernels send at most this number of bytes to all peers together.
ONE_SHOT_MAX_SENT_BYTES = 1 << 20
# Two-shot kernels sum tensors of at most this number of bytes. NCCL sums larger tensors.
TWO_SHOT_MAX_BYTES = 8 << 20
# Number of units that a program sends at once, one per thread. Programs of large tensors have more threads.
CHUNK_UNITS, LARGE_CHUNK_UNITS = 256, 512
# Maximum number of warps of a program that norms a row.
MAX_NORM_WARPS = 32
# A region (a program's slots for one phase and one sender) holds at least a row of 8,192 float32. With two ranks, it
# holds more rows, because large tensors also use one-shot kernels.
MIN_REGION_BYTES, MIN_PAIR_REGION_BYTES = 32 << 10, 256 << 10


@dataclass(frozen=True)
class ExchangeLaunch:
    """Grid of a kernel that exchanges parts, and the number of units that a program sends at once."""

    num_programs: int
    chunk_units: int


@dataclass(frozen=True)
class TwoShotLaunch:
    """Grid of a two-shot kernel, number of units that a program sends at once, and number of elements that a rank sums.

    The last rank may sum fewer elements, but at least one.
    """

    num_programs: int
    chunk_units: int
    part_size: int


@dataclass(frozen=True)
class LaunchPolicy:
    """Chooses the kernels' launches. max_programs, region_bytes: see `PeerMemory`."""

    size: int  # number of ranks
    max_programs: int
    region_bytes: int
    one_shot_max_sent_bytes: int
    two_shot_max_bytes: int = TWO_SHOT_MAX_BYTES

    def choose_exchange(self, part_bytes: int) -> ExchangeLaunch | None:
        """Choose the launch that sends `part_bytes` to each peer. None: use a two-shot kernel or NCCL."""
        if part_bytes * (self.size - 1) > self.one_shot_max_sent_bytes:
            return None
        return self._choose_launch(part_bytes, self.region_bytes)

    def choose_two_shot(self, num_elements: int, element_bytes: int) -> TwoShotLaunch | None:
        """Choose the launch that sums tensors of `num_elements` in two shots. None: use NCCL."""
        # Round up to a multiple of 16 elements. A unit has at most 8 elements, so each part begins with a whole unit.
        part_size = -(-num_elements // (16 * self.size)) * 16
        # Each rank must send units to every other rank (see `PeerMemory`). Two empty parts would break this rule.
        is_last_part_empty = part_size * (self.size - 1) >= num_elements
        if num_elements * element_bytes > self.two_shot_max_bytes or is_last_part_empty:
            return None
        # Half of a region receives the terms of sums, and the other half receives sums.
        launch = self._choose_launch(part_size * element_bytes, self.region_bytes // 2)
        return None if launch is None else TwoShotLaunch(launch.num_programs, launch.chunk_units, part_size)

    def choose_norm_rows(self, num_rows: int, row_bytes: int) -> int | None:
        """Choose how many of `num_rows` rows a launch sums and norms at most. None: norm in a second kernel."""
        row_slots_bytes = -(-row_bytes // SLOT_BYTES) * SLOT_BYTES
        max_rows = self.max_programs * (self.region_bytes // row_slots_bytes)
        if max_rows == 0 or num_rows * row_bytes * (self.size - 1) > self.one_shot_max_sent_bytes:
            return None
        num_launches = -(-num_rows // max_rows)
        rows_per_program = -(-num_rows // (num_launches * self.max_programs))
        return min(num_rows, rows_per_program * self.max_programs)

    def _choose_launch(self, part_bytes: int, slots_bytes: int) -> ExchangeLaunch | None:
        is_small = part_bytes <= self.max_programs * CHUNK_UNITS * SLOT_BYTES
        chunk_units = CHUNK_UNITS if is_small else LARGE_CHUNK_UNITS
        num_chunks = -(-part_bytes // (chunk_units * SLOT_BYTES))
        if -(-num_chunks // self.max_programs) * chunk_units * SLOT_BYTES > slots_bytes:
            return None
        return ExchangeLaunch(min(num_chunks, self.max_programs), chunk_units)


def choose_one_shot_limit(size: int) -> int:
    """Return the maximum number of bytes that one-shot kernels send to all peers together, for `size` ranks.

    With two ranks there is no limit, because a two-shot kernel would send as many bytes as a one-shot kernel.
    """
    return sys.maxsize if size == 2 else ONE_SHOT_MAX_SENT_BYTES


def choose_region_bytes(size: int) -> int:
    """Return how many bytes of slots a program needs per phase and sender, for `size` ranks."""
    chunk_bytes = LARGE_CHUNK_UNITS * SLOT_BYTES
    num_chunks = -(-TWO_SHOT_MAX_BYTES // (size * MAX_PROGRAMS * chunk_bytes))
    # A two-shot kernel has half of a region for the terms of sums, and half for sums.
    min_bytes = MIN_PAIR_REGION_BYTES if size == 2 else MIN_REGION_BYTES
    return max(min_bytes, 2 * num_chunks * chunk_bytes)
