"""Tests the ring through which rank 0 sends plans."""

import multiprocessing
import random
import threading
import time

import pytest
from ring_reader import digest, read_messages

from nanovllm_core.parallel.plan_ring import MAX_PIECE_BYTES, RING_BYTES, PlanReader, PlanRing, PlanWriter

SIZES = [0, 1, 7, 8, 1000, MAX_PIECE_BYTES - 1, MAX_PIECE_BYTES, MAX_PIECE_BYTES + 1, 3 * RING_BYTES]


def make_messages(count: int) -> list[bytes]:
    rng = random.Random(0)
    return [rng.randbytes(rng.choice(SIZES) if rng.random() < 0.2 else rng.randrange(300)) for _ in range(count)]


def test_every_reader_receives_every_message_in_order():
    messages, num_readers = make_messages(60), 2
    ring, context = PlanRing(num_readers), multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for index in range(num_readers):
        read_end, write_end = context.Pipe(duplex=False)
        # The last reader is slow, so that the writer waits for a full ring.
        arguments = ring, index, len(messages), 0.005 * (index == num_readers - 1), write_end
        processes.append(context.Process(target=read_messages, args=arguments))
        with write_end:
            processes[-1].start()
        pipes.append(read_end)
    writer = ring.open_writer(lambda: None)
    for message in messages:
        writer.write(message)
    for pipe, process in zip(pipes, processes, strict=True):
        assert pipe.recv() == [digest(message) for message in messages]
        process.join()


def test_writer_of_a_full_ring_stops_when_a_reader_has_ended():
    class ReaderEndedError(Exception):
        pass

    has_ended = threading.Event()

    def check_readers() -> None:
        if has_ended.is_set():
            raise ReaderEndedError

    ring = PlanRing(1)
    writer = ring.open_writer(check_readers)
    for _ in range(RING_BYTES // MAX_PIECE_BYTES - 1):
        writer.write(bytes(MAX_PIECE_BYTES))
    threading.Timer(0.05, has_ended.set).start()
    with pytest.raises(ReaderEndedError):
        writer.write(bytes(2 * MAX_PIECE_BYTES))


@pytest.mark.parametrize("late", [slice(0, 16), slice(4, 8), slice(8, 16), slice(20, 60)], ids=str)
def test_reader_waits_for_a_piece_whose_bytes_arrive_after_the_position(late):
    ring = PlanRing(1)
    writer, reader = ring.open_writer(lambda: None), ring.open_reader(0, spins=True)
    message = b"b" * (MAX_PIECE_BYTES + 1)
    writer.write(message)
    # Simulate reordered stores: a part of the first piece is not stored yet.
    check_reader_waits(writer, reader, message, late, bytes(late.stop - late.start))


def test_reader_waits_for_a_piece_that_replaces_an_earlier_piece():
    ring = PlanRing(1)
    writer, reader = ring.open_writer(lambda: None), ring.open_reader(0, spins=True)
    for _ in range(RING_BYTES // 1024):
        writer.write(b"a" * (1024 - 16))
        reader.read()
    piece = slice(0, 1024)
    old_bytes = bytes(writer._data[piece])
    message = b"b" * (1024 - 16)
    writer.write(message)
    check_reader_waits(writer, reader, message, piece, old_bytes)


def check_reader_waits(writer: PlanWriter, reader: PlanReader, message: bytes, late: slice, old_bytes: bytes) -> None:
    """Check that `reader` returns `message` only after the bytes `late` of the ring have replaced `old_bytes`."""
    stored_bytes = bytes(writer._data[late])
    writer._data[late] = old_bytes
    received = []
    thread = threading.Thread(target=lambda: received.append(reader.read()))
    thread.start()
    time.sleep(0.05)
    assert not received
    writer._data[late] = stored_bytes
    thread.join(60)
    assert received == [message]
