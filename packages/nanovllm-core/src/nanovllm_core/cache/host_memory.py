"""Host memory for cache entries of all ranks, and the copies between this memory and the caches.

An entry is a block of keys and values, or a checkpoint of recurrent states, in all layers of the model.
"""

import itertools
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_core.anonymous_memory import AnonymousMemory
from nanovllm_core.cache.memory import STATE_MEMORY_SHARE, CacheLayout
from nanovllm_core.config import GIB, ResolvedConfig
from nanovllm_core.errors import ConfigError

# Slots begin at multiples of this size, so that they can be pinned.
PAGE_BYTES = 4096
# The memory is pinned in pieces of about this size, because each pinning call blocks other calls of the driver.
_PIECE_BYTES = 1 << 28
# Bytes of the counters of one rank: a cache line, so that ranks do not slow each other down.
_COUNTER_BYTES = 64
MARKER_BYTES = 16
# Bytes of the device buffer for the copies of one `Direction`. The buffer is larger if one entry needs more.
STAGING_BYTES = 32 << 20


class EntryKind(IntEnum):
    """The kinds of entries. Values are indices in tuples with one item per kind."""

    BLOCK = 0
    CHECKPOINT = 1


class Direction(IntEnum):
    """STORE: from the caches to host memory. LOAD: from host memory to the caches."""

    STORE = 0
    LOAD = 1


class EntryCopies(NamedTuple):
    """Copies of entries of one kind. group: index of the request group whose cache has the entries.

    entries: indices of blocks or state slots in the caches. slots: indices of slots in the host memory, from 1.
    """

    group: int
    kind: EntryKind
    entries: list[int]
    slots: list[int]


class CopyBatch(NamedTuple):
    """Copies for all ranks. A rank calls `count_done` when a batch ends. Batches of a direction end in order."""

    direction: Direction
    copies: list[EntryCopies]


@dataclass(frozen=True, slots=True)
class HostLayout:
    """The sizes of the host memory.

    num_ranks: number of ranks that execute copies.
    num_parts: number of ranks that share each entry, one part per rank; 1 if each rank has its own requests.
    entry_bytes: bytes of one rank's part of an entry, by kind.
    num_slots: number of slots by kind. A slot holds all parts of an entry.
    """

    num_ranks: int
    num_parts: int
    entry_bytes: tuple[int, ...]
    num_slots: tuple[int, ...]

    @classmethod
    def plan(cls, config: ResolvedConfig, layout: CacheLayout) -> "HostLayout":
        """Divide `config.kv_offload_gib`. Raises ConfigError if the memory has no space for one entry of each kind."""
        num_parts = 1 if config.dp_attention else config.tensor_parallel_size
        entry_bytes, shares = (layout.block_bytes,), (1.0,)
        if layout.state_specs:
            entry_bytes, shares = (layout.block_bytes, layout.slot_bytes), (1 - STATE_MEMORY_SHARE, STATE_MEMORY_SHARE)
        sizes = [_pad(num_parts * num_bytes) for num_bytes in entry_bytes]
        num_bytes = config.kv_offload_gib * GIB
        num_slots = tuple(int(share * num_bytes) // size for share, size in zip(shares, sizes, strict=True))
        if not all(num_slots):
            min_bytes = max(size / share for share, size in zip(shares, sizes, strict=True))
            raise ConfigError(
                f"kv_offload_gib is {config.kv_offload_gib}, but must be at least {min_bytes / GIB:.3g} for this "
                "model: raise it, or set it to 0"
            )
        return cls(config.tensor_parallel_size, num_parts, entry_bytes, num_slots)

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes of a slot by kind, a multiple of PAGE_BYTES."""
        return tuple(_pad(self.num_parts * num_bytes) for num_bytes in self.entry_bytes)

    @property
    def counters_bytes(self) -> int:
        """Bytes of the counters of all ranks, which precede the slots."""
        return _pad(self.num_ranks * _COUNTER_BYTES + MARKER_BYTES)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole memory."""
        slots = zip(self.num_slots, self.slot_bytes, strict=True)
        return self.counters_bytes + sum(num_slots * slot_bytes for num_slots, slot_bytes in slots)


# Indices of counters. A rank's first counters, one per `Direction`, count executed batches. Two more counters follow.
_FAILURES_INDEX, _READY_INDEX = len(Direction), len(Direction) + 1
# Index of a counter of rank 0 only.
_MAY_PIN_INDEX = len(Direction) + 2
_COUNTER_STRIDE = _COUNTER_BYTES // 8


class HostMemory:
    """A mapping of the host memory into this process. `memory` has at least `layout.num_bytes` bytes."""

    def __init__(self, memory: AnonymousMemory, layout: HostLayout):
        self.layout = layout
        self._memory = memory  # keeps the descriptor open
        self._view = memory.map(populates=False)
        self._counters = self._view[: layout.counters_bytes].cast("Q")
        self._slots: list[memoryview] = []
        start = layout.counters_bytes
        for num_slots, slot_bytes in zip(layout.num_slots, layout.slot_bytes, strict=True):
            end = start + num_slots * slot_bytes
            self._slots.append(self._view[start:end])
            start = end

    def slot(self, kind: EntryKind, index: int) -> memoryview:
        """The bytes of a slot: the parts of all ranks. index: from 1."""
        num_bytes = self.layout.slot_bytes[kind]
        return self._slots[kind][(index - 1) * num_bytes : index * num_bytes]

    @property
    def descriptor(self) -> int:
        """File descriptor of the memory in this process."""
        return self._memory.descriptor

    @property
    def view(self) -> memoryview:
        """The whole memory: the counters, then the slots of each kind."""
        return self._view

    @property
    def marker_offset(self) -> int:
        """Offset of the marker: MARKER_BYTES random bytes that identify this memory."""
        return self.layout.counters_bytes - MARKER_BYTES

    @property
    def offsets(self) -> list[int]:
        """By kind, the number of bytes before the first slot."""
        starts = itertools.accumulate(map(len, self._slots), initial=self.layout.counters_bytes)
        return list(starts)[: len(self._slots)]

    @property
    def address(self) -> int:
        """Address of `view` in this process."""
        return torch.frombuffer(self._view, dtype=torch.uint8).data_ptr()

    def slot_address(self, kind: EntryKind, index: int) -> int:
        """Address of a slot in this process."""
        return self.address + self.offsets[kind] + (index - 1) * self.layout.slot_bytes[kind]

    def part(self, kind: EntryKind, part: int) -> Tensor:
        """One rank's part of all slots, uint8 [num_slots, entry_bytes]."""
        num_bytes = self.layout.entry_bytes[kind]
        slots = torch.frombuffer(self._slots[kind], dtype=torch.uint8).view(self.layout.num_slots[kind], -1)
        return slots[:, part * num_bytes : (part + 1) * num_bytes]

    def pieces(self) -> list[Tensor]:
        """All slots, in pieces that are pinned one after another. A piece has whole slots: uint8 [number of bytes]."""
        pieces: list[Tensor] = []
        for slots, slot_bytes in zip(self._slots, self.layout.slot_bytes, strict=True):
            piece_bytes = max(_PIECE_BYTES // slot_bytes, 1) * slot_bytes
            pieces += torch.frombuffer(slots, dtype=torch.uint8).split(piece_bytes)
        return pieces

    @property
    def may_pin(self) -> bool:
        """Whether the ranks may pin the memory now."""
        return bool(self._counters[_MAY_PIN_INDEX])

    def allow_pinning(self) -> None:
        """Let all ranks pin the memory. Pinning slows steps down, so rank 0 first finishes the timing of steps."""
        self._counters[_MAY_PIN_INDEX] = 1

    @property
    def is_ready(self) -> bool:
        """Whether all ranks can execute copies."""
        return all(self._counters[rank * _COUNTER_STRIDE + _READY_INDEX] for rank in range(self.layout.num_ranks))

    def set_ready(self, rank: int) -> None:
        """Record that `rank` can execute copies."""
        self._counters[rank * _COUNTER_STRIDE + _READY_INDEX] = 1

    def count_done(self, rank: int, direction: Direction) -> None:
        """Count a batch that `rank` has executed. Only one thread per rank and direction may call this method."""
        self._counters[rank * _COUNTER_STRIDE + direction] += 1

    def num_done(self, direction: Direction) -> int:
        """The number of batches that all ranks have executed."""
        return min(self._counters[rank * _COUNTER_STRIDE + direction] for rank in range(self.layout.num_ranks))

    def count_failure(self, rank: int) -> None:
        """Record that a batch has failed on `rank`. The rank then also calls `count_done` for the batch."""
        self._counters[rank * _COUNTER_STRIDE + _FAILURES_INDEX] += 1

    @property
    def num_failures(self) -> int:
        """The number of failed batches of all ranks."""
        return sum(self._counters[rank * _COUNTER_STRIDE + _FAILURES_INDEX] for rank in range(self.layout.num_ranks))


def allocate_host_memory(config: ResolvedConfig) -> AnonymousMemory | None:
    """The memory of `HostMemory`, before the layout is known; None if `kv_offload_gib` is 0."""
    if not config.kv_offload_gib:
        return None
    return AnonymousMemory(
        int(config.kv_offload_gib * GIB) + _pad(config.tensor_parallel_size * _COUNTER_BYTES + MARKER_BYTES)
    )


def _pad(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
