"""Sends messages from one process to several others through a ring buffer in shared memory, without locks."""

import struct
import time
import zlib
from collections.abc import Callable

from nanovllm_core.anonymous_memory import AnonymousMemory

# Bytes per position (see `PlanRing`). Each position has its own cache line, so that readers don't slow each other down.
_POSITION_BYTES = 64
# Header of a piece of a message: length in bytes, whether the message has more pieces, and the piece's checksum.
_PIECE_HEADER = struct.Struct("<IIQ")
RING_BYTES = 1 << 22
# A message is cut into pieces of at most this size, so that a message may be larger than the ring.
MAX_PIECE_BYTES = RING_BYTES // 4
# A waiting reader sleeps IDLE_POLL_S between polls. A spinning reader first polls for SPIN_S without sleeping.
SPIN_S = 0.2
IDLE_POLL_S = 0.0005
WRITER_POLL_S = 0.0001


class PlanRing:
    """The shared memory of a ring with one writer and `num_readers` readers. Can be an argument of a new process.

    Each reader receives every message. The writer's position is the number of bytes written so far, and a reader's
    position is the number of bytes read so far. Positions never wrap.
    """

    def __init__(self, num_readers: int):
        self._num_readers = num_readers
        self._memory = AnonymousMemory((1 + num_readers) * _POSITION_BYTES + RING_BYTES)

    def open_writer(self, check_readers: Callable[[], None]) -> "PlanWriter":
        """Map the memory for the writer. check_readers: see `PlanWriter`."""
        return PlanWriter(*self._map(), self._num_readers, check_readers)

    def open_reader(self, index: int, *, spins: bool) -> "PlanReader":
        """Map the memory for reader `index`, from 0. spins: see `PlanReader`."""
        return PlanReader(*self._map(), index, spins=spins)

    def _map(self) -> tuple[memoryview, memoryview]:
        """The positions as 64-bit integers, and the data."""
        memory, num_position_bytes = self._memory.map(), (1 + self._num_readers) * _POSITION_BYTES
        return memory[:num_position_bytes].cast("Q"), memory[num_position_bytes:]


# Index of the writer's position. The position of reader i is at index (i + 1) * _POSITION_STRIDE.
_WRITER_INDEX = 0
_POSITION_STRIDE = _POSITION_BYTES // 8


class PlanWriter:
    """Writes messages. Only one thread may write.

    check_readers: called while the ring is full; raises an exception if a reader has ended.
    """

    def __init__(self, positions: memoryview, data: memoryview, num_readers: int, check_readers: Callable[[], None]):
        self._positions = positions
        self._data = data
        self._reader_indices = [(index + 1) * _POSITION_STRIDE for index in range(num_readers)]
        self._check_readers = check_readers

    def write(self, message: bytes) -> None:
        """Write a message for all readers. Waits while the ring is full. Raises the exceptions of `check_readers`."""
        for start in range(0, max(len(message), 1), MAX_PIECE_BYTES):
            piece = message[start : start + MAX_PIECE_BYTES]
            self._write_piece(piece, has_more=start + len(piece) < len(message))

    def _write_piece(self, piece: bytes, *, has_more: bool) -> None:
        begin = self._positions[_WRITER_INDEX]
        end = begin + _PIECE_HEADER.size + len(piece)
        while end - min(self._positions[index] for index in self._reader_indices) > RING_BYTES:
            self._check_readers()
            time.sleep(WRITER_POLL_S)
        checksum = _checksum_piece(begin, piece, has_more=has_more)
        _copy_into(self._data, begin, _PIECE_HEADER.pack(len(piece), has_more, checksum))
        _copy_into(self._data, begin + _PIECE_HEADER.size, piece)
        # Processors load and store 64 bits at once, so readers never see a partly written position.
        self._positions[_WRITER_INDEX] = end


class PlanReader:
    """Reads each message once, in order. Only one thread may read.

    spins: whether `read` first polls for SPIN_S seconds without sleeping. A sleep delays a message by up to
        IDLE_POLL_S seconds, but a spinning thread occupies a core.
    """

    def __init__(self, positions: memoryview, data: memoryview, index: int, *, spins: bool):
        self._positions = positions
        self._data = data
        self._own_index = (index + 1) * _POSITION_STRIDE
        self._spin_s = SPIN_S if spins else 0.0

    def read(self) -> bytes:
        """Wait for the next message."""
        pieces: list[bytes] = []
        has_more = True
        while has_more:
            self._wait_for_piece()
            piece, has_more = self._read_piece()
            pieces.append(piece)
        return b"".join(pieces)

    def _wait_for_piece(self) -> None:
        positions, own_position = self._positions, self._positions[self._own_index]
        spin_until_s = time.perf_counter() + self._spin_s
        while positions[_WRITER_INDEX] == own_position:
            if time.perf_counter() >= spin_until_s:
                time.sleep(IDLE_POLL_S)

    def _read_piece(self) -> tuple[bytes, bool]:
        """Returns (next piece, whether the message has more pieces)."""
        begin = self._positions[self._own_index]
        payload_begin = begin + _PIECE_HEADER.size
        while True:
            length, has_more, checksum = _PIECE_HEADER.unpack(_copy_from(self._data, begin, _PIECE_HEADER.size))
            if length <= MAX_PIECE_BYTES:
                piece = _copy_from(self._data, payload_begin, length)
                # Some processors reorder stores: the writer's position may become visible before the piece.
                if _checksum_piece(begin, piece, has_more=bool(has_more)) == checksum:
                    break
        self._positions[self._own_index] = payload_begin + length
        return piece, bool(has_more)


def _checksum_piece(position: int, piece: bytes, *, has_more: bool) -> int:
    """CRC-32 of a piece and its header. With the position, the old bytes of an earlier piece have another checksum."""
    return zlib.crc32(piece, zlib.crc32(struct.pack("<QI?", position, len(piece), has_more)))


def _copy_into(data: memoryview, position: int, payload: bytes) -> None:
    offset = position % RING_BYTES
    num_bytes_before_wrap = min(len(payload), RING_BYTES - offset)
    data[offset : offset + num_bytes_before_wrap] = payload[:num_bytes_before_wrap]
    data[: len(payload) - num_bytes_before_wrap] = payload[num_bytes_before_wrap:]


def _copy_from(data: memoryview, position: int, length: int) -> bytes:
    offset = position % RING_BYTES
    if offset + length <= RING_BYTES:
        return bytes(data[offset : offset + length])
    return bytes(data[offset:]) + bytes(data[: offset + length - RING_BYTES])
