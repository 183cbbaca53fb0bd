"""A ring delivers each message once and undamaged, or not at all."""

import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest
from exchange_peer import make_payload, write_until_killed
from hypothesis import given
from hypothesis import strategies as st

from nanovllm_server.processes.rings import RingMemory, RingReader

CAPACITY = 1 << 10
SPAWN_CONTEXT = multiprocessing.get_context("spawn")


def make_ring_and_reader(capacity=CAPACITY):
    (ring,) = RingMemory(1, capacity).rings()
    return ring, RingReader(ring)


@given(st.lists(st.binary(max_size=300) | st.none(), max_size=60))
def test_a_slow_reader_gets_the_newest_messages_once(actions):
    """An action is a message to write; None makes the reader read."""
    ring, reader = make_ring_and_reader()
    unread: list[bytes] = []
    for payload in [*actions, None]:
        if payload is not None:
            ring.write(payload)
            unread.append(payload)
            continue
        kept, num_bytes = [], 0
        for message in reversed(unread):
            num_bytes += len(message) + 16
            if num_bytes > CAPACITY:
                break
            kept.append(message)
        assert reader.read() == kept[::-1]
        unread.clear()


def test_a_message_may_fill_the_ring_but_not_exceed_it():
    ring, reader = make_ring_and_reader()
    ring.write(b"first")
    with pytest.raises(ValueError, match="does not fit"):
        ring.write(bytes(CAPACITY - 15))
    assert reader.read() == [b"first"]
    ring.write(b"x" * (CAPACITY - 16))
    assert reader.read() == [b"x" * (CAPACITY - 16)]


@pytest.mark.parametrize("place", range(20))
def test_a_damaged_message_is_ignored(place):
    ring, reader = make_ring_and_reader()
    ring.write(b"first" * 4)
    ring.write(b"second" * 4)
    ring._data[place : place + 8] = b"\xfe" * 8
    ring.write(b"third" * 4)
    read = reader.read()
    # The first eight bytes are the length. The reader needs the length to find the next message.
    assert read == ([] if place < 8 else [b"second" * 4, b"third" * 4])
    ring.write(b"fourth")
    assert reader.read() == [b"fourth"]


@pytest.mark.parametrize("positions", [(0, 1 << 40), (1 << 40, 0), (1 << 63, (1 << 64) - 1), (17, 40)])
def test_damaged_positions_give_no_message_and_raise_nothing(positions):
    ring, reader = make_ring_and_reader()
    ring.write(b"first")
    ring._positions[0], ring._positions[1] = positions
    assert reader.read() == []


def test_a_writer_continues_after_its_ring_was_damaged():
    ring, reader = make_ring_and_reader()
    ring.write(b"first")
    ring._data[:8] = b"\xff" * 8
    for number in range(100):
        ring.write(make_payload(number)[:200])
    assert reader.read()[-1] == make_payload(99)[:200]


def test_messages_of_another_process_arrive_undamaged_and_in_order():
    memory = RingMemory(2, 1 << 14)
    reader = RingReader(memory.rings()[1])
    writer = SPAWN_CONTEXT.Process(target=write_until_killed, args=(memory, 1), daemon=True)
    writer.start()
    last, num_read, num_nonempty_reads = -1, 0, 0
    deadline = time.monotonic() + 60
    while num_read < 3000:
        assert time.monotonic() < deadline
        messages = reader.read()
        numbers = [int.from_bytes(message[:8], "little") for message in messages]
        assert messages == [make_payload(number) for number in numbers]
        assert sorted({last, *numbers}) == [last, *numbers]
        if numbers:
            last, num_read, num_nonempty_reads = numbers[-1], num_read + len(numbers), num_nonempty_reads + 1
    assert num_nonempty_reads > 10
    # The killed writer may stop in the middle of a message.
    writer.kill()
    writer.join()
    reader.read()
    memory.rings()[1].write(b"replacement")
    assert reader.read() == [b"replacement"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_ring_memory_has_no_directory_entry_and_is_freed():
    memory = RingMemory(2, CAPACITY)
    descriptor = memory._descriptor
    assert str(Path(f"/proc/self/fd/{descriptor}").readlink()).endswith("(deleted)")
    rings = memory.rings()
    maps = Path("/proc/self/maps")
    assert "nanovllm-rings" in maps.read_text()
    del memory, rings
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert "nanovllm-rings" not in maps.read_text()
