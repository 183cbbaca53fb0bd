"""Sends hostile inputs to a server, and streams answers beside them."""

import asyncio
import itertools
import struct
import time
from urllib.parse import urlsplit

from hostile_cases import Case, chat_request

# Longest time of one case, in seconds; the machine may be busy.
PATIENCE_S = 60


async def send_case(url: str, case: Case) -> str | None:
    """Send `case`; returns what is wrong with the answer, or None."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await _check_response(case, reader, writer)
    except TimeoutError:
        return f"nothing within {PATIENCE_S} s"
    finally:
        writer.transport.abort()


async def _check_response(case: Case, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
    if case.leave == "reset":
        writer.get_extra_info("socket").setsockopt(1, 13, struct.pack("ii", 1, 0))
    writing = asyncio.create_task(_write(case.data, writer))
    if case.leave is not None:
        await writing
        if case.leave == "half":
            writer.write_eof()
            await reader.read()
        await asyncio.sleep(0.05)
        return None
    try:
        line = await reader.readline()
    except ConnectionError:
        line = b""
    writing.cancel()
    if not line:
        return None if case.closed else "closed without an answer"
    status = int(line.split()[1])
    return None if status in case.statuses else f"status {status}"


async def _write(data: bytes, writer: asyncio.StreamWriter) -> None:
    try:
        for start in range(0, len(data), 1 << 18):
            writer.write(data[start : start + (1 << 18)])
            await writer.drain()
    except ConnectionError:
        pass


async def stream_until(url: str, stop: asyncio.Event, arrivals: list[float]) -> None:
    """Streams answers until `stop` is set. Appends the time of each chunk to `arrivals`."""
    parts = urlsplit(url)
    while not stop.is_set():
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(chat_request(max_tokens=400, ignore_eos=True, stream=True))
        assert (await reader.readline()).split()[1] == b"200"
        is_done = False
        while line := await reader.readline():
            if line.startswith(b"data"):
                arrivals.append(time.monotonic())
            is_done |= b"[DONE]" in line
        writer.close()
        assert is_done, "the stream ended early"


def longest_gap(arrivals: list[float], begin: float) -> float:
    """The longest time between two chunks of which the later one arrived after `begin`."""
    return max((late - early for early, late in itertools.pairwise(arrivals) if late > begin), default=0)


async def measure_gap(url: str, case: Case, arrivals: list[float], stream: asyncio.Task[None]) -> float:
    """Send `case` beside `stream`. Returns the longest time between two chunks, to the first chunk after the answer.

    arrivals: times of the stream's chunks, from `stream_until`.
    """
    begin = time.monotonic()
    assert await send_case(url, case) is None, case.name
    # The next chunk shows a stall that outlasts the answer.
    num_arrivals = len(arrivals)
    async with asyncio.timeout(PATIENCE_S):
        while len(arrivals) == num_arrivals and not stream.done():
            await asyncio.sleep(0.001)
    return longest_gap(arrivals[-5000:], begin)
