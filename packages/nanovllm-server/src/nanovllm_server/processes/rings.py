"""Ring buffers in shared memory. A writer overwrites the oldest messages without waiting for slow readers."""

import mmap
import os
import struct
import tempfile
import weakref
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

# Bytes at the start of a ring that hold the positions `begin` and `end`, padded to one cache line.
_POSITIONS_BYTES = 64
# Header of a message: length of the payload in bytes, checksum.
_MESSAGE_HEADER = struct.Struct("<QQ")
_CHECKSUM_MASK = (1 << 64) - 1  # checksums have 64 bits


class RingMemory:
    """Shared memory of several rings. Can be passed to a new process as an argument."""

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
        # `DupFd` works only while multiprocessing starts a process.
        return DupFd(self._descriptor), self._num_rings, self._ring_bytes

    def __setstate__(self, state: tuple[Any, int, int]) -> None:
        descriptor, num_rings, ring_bytes = state
        self._set_state(descriptor.detach(), num_rings, ring_bytes)

    def rings(self) -> list["Ring"]:
        """Maps the memory into this process, and returns the rings."""
        stride = _POSITIONS_BYTES + self._ring_bytes
        # MAP_POPULATE allocates the pages now: the first messages would otherwise take several times as long.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        memory = memoryview(mmap.mmap(self._descriptor, self._num_rings * stride, flags))
        return [Ring(memory[index * stride : (index + 1) * stride]) for index in range(self._num_rings)]


class Ring:
    """A ring buffer. Only one thread may write at a time.

    A position is the number of bytes written to the ring before this point. Positions never wrap.
    """

    def __init__(self, memory: memoryview):
        # Processors load and store 64 bits at once: a reader never sees a partly written position.
        self._positions = memory[:_POSITIONS_BYTES].cast("Q")
        self._data = memory[_POSITIONS_BYTES:]
        self.capacity = len(self._data)

    @property
    def begin(self) -> int:
        """Position of the oldest message."""
        return self._positions[0]

    @property
    def end(self) -> int:
        """Position after the newest message."""
        return self._positions[1]

    def write(self, payload: bytes | bytearray) -> None:
        """Writes a message. A full ring loses its oldest messages. Raises ValueError if the message is too large."""
        begin, end = self.begin, self.end
        message_bytes = _MESSAGE_HEADER.size + len(payload)
        if message_bytes > self.capacity:
            raise ValueError(f"a message of {message_bytes} bytes does not fit into a ring of {self.capacity}")
        new_end = end + message_bytes
        while new_end - begin > self.capacity:
            length, _ = _MESSAGE_HEADER.unpack(self.copy(begin, begin + _MESSAGE_HEADER.size))
            begin += _MESSAGE_HEADER.size + length
        # Store `begin` before the payload: a reader that sees new bytes must also see the new `begin`.
        self._positions[0] = min(begin, end)
        self._store(end, _MESSAGE_HEADER.pack(len(payload), _checksum(payload, end)))
        self._store(end + _MESSAGE_HEADER.size, payload)
        self._positions[1] = new_end

    def copy(self, begin: int, end: int) -> bytes:
        """Copies the bytes between two positions."""
        offset = begin % self.capacity
        end_offset = offset + end - begin
        if end_offset <= self.capacity:
            return bytes(self._data[offset:end_offset])
        return bytes(self._data[offset:]) + bytes(self._data[: end_offset - self.capacity])

    def _store(self, position: int, payload: bytes | bytearray) -> None:
        data = memoryview(payload)
        offset = position % self.capacity
        bytes_before_wrap = min(len(data), self.capacity - offset)
        self._data[offset : offset + bytes_before_wrap] = data[:bytes_before_wrap]
        self._data[: len(data) - bytes_before_wrap] = data[bytes_before_wrap:]


class RingReader:
    """Reads each message of a ring once, the oldest message first. Only one thread at a time may read."""

    def __init__(self, ring: Ring):
        self._ring = ring
        self._position = 0

    def read(self) -> list[bytes]:
        """Returns the messages written since the last call. Skips overwritten and damaged messages."""
        ring = self._ring
        begin, end = max(self._position, ring.begin), ring.end
        self._position = end
        if not 0 < end - begin <= ring.capacity:
            return []
        data = ring.copy(begin, end)
        # Skip messages that the writer has overwritten during the copy.
        offset = max(ring.begin - begin, 0)
        payloads: list[bytes] = []
        while offset + _MESSAGE_HEADER.size <= len(data):
            length, checksum = _MESSAGE_HEADER.unpack_from(data, offset)
            payload = data[offset + _MESSAGE_HEADER.size : offset + _MESSAGE_HEADER.size + length]
            # Processors may reorder stores: if `end` becomes visible before the payload, the checksum is wrong.
            if len(payload) == length and checksum == _checksum(payload, begin + offset):
                payloads.append(payload)
            offset += _MESSAGE_HEADER.size + length
        return payloads


def _checksum(payload: bytes | bytearray, position: int) -> int:
    """Returns the sum of the payload's 64-bit words, its length, its position, and 1.

    The 1 makes the checksum wrong in new memory, which contains zeros. A CRC would take ten times as long.
    """
    num_words = len(payload) // 8
    word_sum = int(np.frombuffer(payload, np.uint64, num_words).sum())
    remainder = int.from_bytes(payload[8 * num_words :], "little")
    return (word_sum + remainder + len(payload) + position + 1) & _CHECKSUM_MASK


def _create_anonymous_file(size: int) -> int:
    """Returns the descriptor of a new file that has no name and contains zeros."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("nanovllm-rings")
    else:
        descriptor, path = tempfile.mkstemp(prefix="nanovllm-rings-")
        os.unlink(path)  # noqa: PTH108
    os.ftruncate(descriptor, size)
    return descriptor
