"""Byte messages between the workers of one server: each worker writes to a ring in shared memory, the others read it.

Nothing waits: a writer overwrites the oldest messages, and a reader that comes too late misses them.
"""

import mmap
import os
import struct
import tempfile
import weakref
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

# The positions at the beginning of a ring take a cache line, so that rings share none.
_POSITIONS_BYTES = 64
# Before each message: the length of its payload, and a checksum.
_MESSAGE_HEADER = struct.Struct("<QQ")
_CHECKSUM_MASK = (1 << 64) - 1


class RingMemory:
    """The memory of several empty rings. It can be an argument of a process that is started.

    The memory has no name in any file system. The kernel frees it when the last process that has it ends.
    """

    def __init__(self, num_rings: int, ring_bytes: int):
        """ring_bytes: capacity of each ring, a multiple of 64."""
        descriptor = _anonymous_file(num_rings * (_POSITIONS_BYTES + ring_bytes))
        self._adopt(descriptor, num_rings, ring_bytes)

    def _adopt(self, descriptor: int, num_rings: int, ring_bytes: int) -> None:
        self._descriptor = descriptor
        self._num_rings = num_rings
        self._ring_bytes = ring_bytes
        weakref.finalize(self, os.close, descriptor)

    def __getstate__(self) -> tuple[Any, int, int]:
        # Works only while a process is started with this object as an argument.
        return DupFd(self._descriptor), self._num_rings, self._ring_bytes

    def __setstate__(self, state: tuple[Any, int, int]) -> None:
        descriptor, num_rings, ring_bytes = state
        self._adopt(descriptor.detach(), num_rings, ring_bytes)

    def rings(self) -> list["Ring"]:
        """All rings, mapped into this process."""
        size = _POSITIONS_BYTES + self._ring_bytes
        # Allocates the pages now: the first messages would otherwise take several times as long.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        memory = memoryview(mmap.mmap(self._descriptor, self._num_rings * size, flags))
        return [Ring(memory[index * size : (index + 1) * size]) for index in range(self._num_rings)]


class Ring:
    """One ring. A position counts all bytes ever written; its byte lies at index position modulo capacity.

    A ring has one writer at a time, which is one thread. A writer that takes over continues where the last one ended.
    """

    def __init__(self, memory: memoryview):
        # One instruction stores or loads a position, so that another process never sees half of a number.
        self._positions = memory[:_POSITIONS_BYTES].cast("Q")
        self._data = memory[_POSITIONS_BYTES:]
        self.capacity = len(self._data)

    @property
    def oldest(self) -> int:
        """The position of the oldest complete message. Bytes before it may be overwritten at any time."""
        return self._positions[0]

    @property
    def written(self) -> int:
        """The position behind the newest message."""
        return self._positions[1]

    def write(self, payload: bytes | bytearray) -> None:
        """Writes a message; overwrites the oldest ones if the ring is full.

        Raises ValueError if the message is larger than the ring.
        """
        oldest, written = self.oldest, self.written
        size = _MESSAGE_HEADER.size + len(payload)
        if size > self.capacity:
            raise ValueError(f"a message of {size} bytes does not fit into a ring of {self.capacity}")
        end = written + size
        while end - oldest > self.capacity:
            length, _ = _MESSAGE_HEADER.unpack(self.copy(oldest, oldest + _MESSAGE_HEADER.size))
            oldest += _MESSAGE_HEADER.size + length
        # Order of stores: a reader that sees new bytes must also see that the old ones are gone.
        self._positions[0] = min(oldest, written)
        self._put(written, _MESSAGE_HEADER.pack(len(payload), _checksum(payload, written)))
        self._put(written + _MESSAGE_HEADER.size, payload)
        self._positions[1] = end

    def copy(self, begin: int, end: int) -> bytes:
        """The bytes between two positions, as they are now."""
        first = begin % self.capacity
        last = first + end - begin
        if last <= self.capacity:
            return bytes(self._data[first:last])
        return bytes(self._data[first:]) + bytes(self._data[: last - self.capacity])

    def _put(self, position: int, payload: bytes | bytearray) -> None:
        data = memoryview(payload)
        first = position % self.capacity
        num_at_end = min(len(data), self.capacity - first)
        self._data[first : first + num_at_end] = data[:num_at_end]
        self._data[: len(data) - num_at_end] = data[num_at_end:]


class RingReader:
    """Reads each message of a ring once, from the oldest one on. For one thread at a time."""

    def __init__(self, ring: Ring):
        self._ring = ring
        self._position = 0

    def read(self) -> list[bytes]:
        """Messages since the last call, except overwritten and damaged ones."""
        ring = self._ring
        begin, end = max(self._position, ring.oldest), ring.written
        self._position = end
        if not 0 < end - begin <= ring.capacity:
            return []
        data = ring.copy(begin, end)
        # The writer may have overwritten the first messages while they were copied.
        offset = max(ring.oldest - begin, 0)
        payloads: list[bytes] = []
        while offset + _MESSAGE_HEADER.size <= len(data):
            length, checksum = _MESSAGE_HEADER.unpack_from(data, offset)
            payload = data[offset + _MESSAGE_HEADER.size : offset + _MESSAGE_HEADER.size + length]
            # Processors may reorder stores, so the position can be visible before the bytes.
            if len(payload) == length and checksum == _checksum(payload, begin + offset):
                payloads.append(payload)
            offset += _MESSAGE_HEADER.size + length
        return payloads


def _checksum(payload: bytes | bytearray, position: int) -> int:
    """The sum of a message's 64-bit words, its length and its position. Ten times faster than a CRC."""
    num_words = len(payload) // 8
    words = np.frombuffer(payload, np.uint64, num_words)
    rest = int.from_bytes(payload[8 * num_words :], "little")
    return (int(words.sum()) + rest + len(payload) + position + 1) & _CHECKSUM_MASK


def _anonymous_file(size: int) -> int:
    """A descriptor of a file of zeros that has no name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("nanovllm-rings")
    else:
        descriptor, path = tempfile.mkstemp(prefix="nanovllm-rings-")
        os.unlink(path)  # noqa: PTH108
    os.ftruncate(descriptor, size)
    return descriptor
