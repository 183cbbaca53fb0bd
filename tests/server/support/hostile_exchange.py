"""Sends hostile inputs to a server, streams answers beside them, and measures both."""

import asyncio
import itertools
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from hostile_cases import Case, chat_request

PATIENCE_S = 60
STREAM_TOKENS = 400
NUM_CHUNKS_AFTER = 4


async def send_case(url: str, case: Case, data: bytes | None = None) -> str | None:
    """Returns what is wrong with the answer, or None."""
    data = case.make_data() if data is None else data
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await _send_and_check(case, data, reader, writer)
    except TimeoutError:
        return f"nothing within {PATIENCE_S} s"
    finally:
        writer.transport.abort()


async def _send_and_check(
    case: Case, data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> str | None:
    if case.leave == "reset":
        # SO_LINGER with a timeout of 0: closing the socket resets the connection.
        writer.get_extra_info("socket").setsockopt(1, 13, struct.pack("ii", 1, 0))
    writing = asyncio.create_task(_write(data, writer))
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
        return None if case.may_close else "closed without an answer"
    status = int(line.split()[1])
    return None if status in case.statuses else f"status {status}"


async def _write(data: bytes, writer: asyncio.StreamWriter) -> None:
    try:
        for start in range(0, len(data), 1 << 18):
            writer.write(data[start : start + (1 << 18)])
            await writer.drain()
    except ConnectionError:
        pass


async def measure_answer(url: str, case: Case, data: bytes | None = None) -> float:
    """Returns the time to the answer in seconds."""
    data = case.make_data() if data is None else data
    begin_s = time.monotonic()
    problem = await send_case(url, case, data)
    answer_s = time.monotonic() - begin_s
    assert problem is None, f"{case.name}: {problem}"
    return answer_s


class Streams:
    def __init__(self, url: str):
        self._url = url
        # One list per answer, because pauses between answers do not count.
        self._chunk_times: list[list[float]] = []
        self._num_chunks = 0

    async def run(self) -> None:
        parts = urlsplit(self._url)
        while True:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                writer.write(chat_request(max_tokens=STREAM_TOKENS, ignore_eos=True, stream=True))
                status_line = await reader.readline()
                assert status_line.split()[1] == b"200", status_line
                self._chunk_times.append(chunk_times := [])
                is_done = False
                while line := await reader.readline():
                    if line.startswith(b"data"):
                        chunk_times.append(time.monotonic())
                        self._num_chunks += 1
                    is_done |= b"[DONE]" in line
                assert is_done, "the stream ended early"
            finally:
                writer.transport.abort()

    async def wait_for_chunks(self, num_chunks: int) -> None:
        num_awaited = self._num_chunks + num_chunks
        async with asyncio.timeout(PATIENCE_S):
            while self._num_chunks < num_awaited:
                await asyncio.sleep(0.001)

    def longest_gap(self, begin_s: float) -> float:
        """Longest time between chunks of one answer, in seconds. Only gaps that end after `begin_s` count."""
        # Skip earlier answers: all their chunks would delay the reading of new chunks.
        recent = [times for times in self._chunk_times if times and times[-1] > begin_s]
        pairs = itertools.chain.from_iterable(map(itertools.pairwise, recent))
        return max((late_s - early_s for early_s, late_s in pairs if late_s > begin_s), default=0.0)

    async def measure_gap_alone(self, seconds: float) -> float:
        begin_s = time.monotonic()
        await asyncio.sleep(seconds)
        await self.wait_for_chunks(NUM_CHUNKS_AFTER)
        return self.longest_gap(begin_s)

    async def measure_answer_and_gap(self, case: Case) -> tuple[float, float]:
        data = case.make_data()
        # Making up to 100 MB of data blocks this event loop, which would look like a gap.
        await self.wait_for_chunks(NUM_CHUNKS_AFTER)
        begin_s = time.monotonic()
        answer_s = await measure_answer(self._url, case, data)
        # A stall may outlast the answer.
        await self.wait_for_chunks(NUM_CHUNKS_AFTER)
        return answer_s, self.longest_gap(begin_s)

    async def measure_gap(self, case: Case) -> float:
        return (await self.measure_answer_and_gap(case))[1]


@asynccontextmanager
async def run_streams(url: str) -> AsyncIterator[Streams]:
    """The second stream starts in the middle of the first, so that at any time one stream can show a stall."""
    streams = Streams(url)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(streams.run())]
        await streams.wait_for_chunks(STREAM_TOKENS // 2)
        running.append(tasks.create_task(streams.run()))
        await streams.wait_for_chunks(NUM_CHUNKS_AFTER)
        yield streams
        for task in running:
            task.cancel()
