"""Streams that decode in the background while a benchmark case sends other requests."""

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise

from nanovllm_server.bench.server_cases.case_client import CaseClient
from nanovllm_server.bench.server_cases.prompt_texts import Message

STREAM_ENDED_EARLY = "a decoding stream ended before the measurement did: raise --stream-len"


class DecodeStreams:
    """Streams that decode until the `async with` block ends. All times are values of `time.perf_counter`."""

    def __init__(self, client: CaseClient, prompts: Sequence[list[Message]], max_tokens: int):
        self._client = client
        self._piece_times_by_stream: list[list[float]] = [[] for _ in prompts]
        # A stream's event is set when the stream has two pieces (deltas with content) or ends.
        self._decoding_events = [asyncio.Event() for _ in prompts]
        # Set when any stream produces a piece or ends.
        self._progress_event = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._run(index, messages, max_tokens)) for index, messages in enumerate(prompts)
        ]

    async def _run(self, index: int, messages: list[Message], max_tokens: int) -> None:
        piece_times, decoding_event = self._piece_times_by_stream[index], self._decoding_events[index]

        def record_piece(now: float) -> None:
            piece_times.append(now)
            self._progress_event.set()
            if len(piece_times) == 2:
                decoding_event.set()

        try:
            if await self._client.send(messages, max_tokens, on_piece=record_piece, has_timeout=False) is not None:
                self._client.errors.append(STREAM_ENDED_EARLY)
        finally:
            decoding_event.set()
            self._progress_event.set()

    async def wait_until_decoding(self) -> float:
        """Waits until every stream has two pieces or has failed. Returns the current time."""
        try:
            async with asyncio.timeout(self._client.timeout_s):
                for event in self._decoding_events:
                    await event.wait()
        except TimeoutError:
            self._client.errors.append(f"a decoding stream has no tokens after {self._client.timeout_s:g} s")
        return time.perf_counter()

    async def wait_for_pieces_after(self, moment: float) -> None:
        """Waits until each running stream has a piece after `moment`. The stream's gap at `moment` then has an end."""

        def has_stream_without_later_piece() -> bool:
            streams = zip(self._tasks, self._piece_times_by_stream, strict=True)
            return any(not task.done() and (not times or times[-1] <= moment) for task, times in streams)

        try:
            async with asyncio.timeout(self._client.timeout_s):
                while has_stream_without_later_piece():
                    self._progress_event.clear()
                    await self._progress_event.wait()
        except TimeoutError:
            self._client.errors.append(f"a decoding stream has no tokens for {self._client.timeout_s:g} s")

    def list_gaps_within(self, start: float, end: float) -> list[float]:
        """Returns the gaps (seconds between consecutive pieces of a stream) that lie between `start` and `end`."""
        return [after - before for before, after in self._piece_time_pairs() if start <= before and after <= end]

    def list_gaps_overlapping(self, start: float, end: float) -> list[float]:
        """Returns the gaps, in seconds, that overlap the time from `start` to `end`."""
        return [after - before for before, after in self._piece_time_pairs() if before < end and after > start]

    def _piece_time_pairs(self) -> list[tuple[float, float]]:
        return [pair for times in self._piece_times_by_stream for pair in pairwise(times)]

    async def __aenter__(self) -> "DecodeStreams":
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
