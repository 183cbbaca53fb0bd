"""Byte messages between the workers of one server: each worker writes to its own ring in shared memory.

Writers and readers do not wait: a writer overwrites the oldest messages, and a slow reader misses them.
"""

import mmap
import os
import struct
import tempfile
import weakref
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

# The positions at the beginning of a ring have a cache line of their own.
_POSITIONS_BYTES = 64
# Precedes each message: length of the payload in bytes, and checksum.
_MESSAGE_HEADER = struct.Struct("<QQ")
_CHECKSUM_MASK = (1 << 64) - 1


class RingMemory:
    """The memory of several rings, which are empty at first. A `RingMemory` can be an argument of a new process.

    The memory has no name in any file system. The kernel frees the memory when the last process that maps it ends.
    """

    def __init__(self, num_rings: int, ring_bytes: int):
        """ring_bytes: capacity of each ring, a multiple of 64."""
        descriptor = _create_anonymous_file(num_rings * (_POSITIONS_BYTES + ring_bytes))
        self._set_state(descriptor, num_rings, ring_bytes)

    def _set_state(self, descriptor: int, num_rings: int, ring_bytes: int) -> None:
        self._descriptor = descriptor
        self._num_rings = num_rings
        self._ring_bytes = ring_bytes
        weakref.finalize(self, os.close, descriptor)

    def __getstate__(self) -> tuple[Any, int, int]:
        # Works only while multiprocessing starts a process with this object as an argument.
        return DupFd(self._descriptor), self._num_rings, self._ring_bytes

    def __setstate__(self, state: tuple[Any, int, int]) -> None:
        descriptor, num_rings, ring_bytes = state
        self._set_state(descriptor.detach(), num_rings, ring_bytes)

    def rings(self) -> list["Ring"]:
        """All rings, mapped into this process."""
        stride = _POSITIONS_BYTES + self._ring_bytes
        # Allocates the memory pages now. Otherwise the first messages would take several times as long.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        memory = memoryview(mmap.mmap(self._descriptor, self._num_rings * stride, flags))
        return [Ring(memory[index * stride : (index + 1) * stride]) for index in range(self._num_rings)]


class Ring:
    """One ring. A position is a number of bytes since the ring was empty; its byte has the index position % capacity.

    A ring has one writer thread at a time. A new writer continues where the last writer ended.
    """

    def __init__(self, memory: memoryview):
        # One instruction loads or stores a position, so other processes never see a partly written number.
        self._positions = memory[:_POSITIONS_BYTES].cast("Q")
        self._data = memory[_POSITIONS_BYTES:]
        self.capacity = len(self._data)

    @property
    def begin(self) -> int:
        """Position of the oldest message. Bytes before this position may be overwritten at any time."""
        return self._positions[0]

    @property
    def end(self) -> int:
        """Position behind the newest message."""
        return self._positions[1]

    def write(self, payload: bytes | bytearray) -> None:
        """Writes a message; overwrites the oldest messages if the ring is full.

        Raises ValueError if the message is larger than the ring.
        """
        begin, end = self.begin, self.end
        message_bytes = _MESSAGE_HEADER.size + len(payload)
        if message_bytes > self.capacity:
            raise ValueError(f"a message of {message_bytes} bytes does not fit into a ring of {self.capacity}")
        new_end = end + message_bytes
        while new_end - begin > self.capacity:
            length, _ = _MESSAGE_HEADER.unpack(self.copy(begin, begin + _MESSAGE_HEADER.size))
            begin += _MESSAGE_HEADER.size + length
        # `begin` is stored before the bytes: a reader that sees new bytes must also see that the old ones are gone.
        self._positions[0] = min(begin, end)
        self._store(end, _MESSAGE_HEADER.pack(len(payload), _checksum(payload, end)))
        self._store(end + _MESSAGE_HEADER.size, payload)
        self._positions[1] = new_end

    def copy(self, begin: int, end: int) -> bytes:
        """The bytes between two positions, as they are now."""
        first = begin % self.capacity
        stop = first + end - begin
        if stop <= self.capacity:
            return bytes(self._data[first:stop])
        return bytes(self._data[first:]) + bytes(self._data[: stop - self.capacity])

    def _store(self, position: int, payload: bytes | bytearray) -> None:
        data = memoryview(payload)
        first = position % self.capacity
        bytes_before_wrap = min(len(data), self.capacity - first)
        self._data[first : first + bytes_before_wrap] = data[:bytes_before_wrap]
        self._data[: len(data) - bytes_before_wrap] = data[bytes_before_wrap:]


class RingReader:
    """Reads each message of a ring once, beginning with the oldest message. For one thread at a time."""

    def __init__(self, ring: Ring):
        self._ring = ring
        self._position = 0

    def read(self) -> list[bytes]:
        """Returns the messages since the last call, except overwritten and damaged ones."""
        ring = self._ring
        begin, end = max(self._position, ring.begin), ring.end
        self._position = end
        if not 0 < end - begin <= ring.capacity:
            return []
        data = ring.copy(begin, end)
        # The writer may have overwritten the first messages while they were copied.
        offset = max(ring.begin - begin, 0)
        payloads: list[bytes] = []
        while offset + _MESSAGE_HEADER.size <= len(data):
            length, checksum = _MESSAGE_HEADER.unpack_from(data, offset)
            payload = data[offset + _MESSAGE_HEADER.size : offset + _MESSAGE_HEADER.size + length]
            # Processors may reorder stores, so the new position can be visible before the bytes.
            if len(payload) == length and checksum == _checksum(payload, begin + offset):
                payloads.append(payload)
            offset += _MESSAGE_HEADER.size + length
        return payloads


def _checksum(payload: bytes | bytearray, position: int) -> int:
    """The sum of a message's 64-bit words, its length and its position. Ten times faster than a CRC."""
    num_words = len(payload) // 8
    words = np.frombuffer(payload, np.uint64, num_words)
    last_bytes = int.from_bytes(payload[8 * num_words :], "little")
    return (int(words.sum()) + last_bytes + len(payload) + position + 1) & _CHECKSUM_MASK


def _create_anonymous_file(size: int) -> int:
    """Returns a descriptor of a file of zeros that has no name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("nanovllm-rings")
    else:
        descriptor, path = tempfile.mkstemp(prefix="nanovllm-rings-")
        os.unlink(path)  # noqa: PTH108
    os.ftruncate(descriptor, size)
    return descriptor
