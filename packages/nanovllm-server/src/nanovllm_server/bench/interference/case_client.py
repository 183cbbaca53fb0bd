"""Sends requests to one server: single requests with a time limit, and streams that decode in the background."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nanovllm_server.bench.client import Endpoint, ExchangeError, TimedAnswer, chat_request, list_models, stream_chat
from nanovllm_server.bench.interference.prompt_texts import Message, PromptTokenCosts, measure_token_costs
from nanovllm_server.bench.report import BenchError

STREAM_ENDED_EARLY = "a decoding stream ended before the measurement did: raise --stream-len"


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """A server to measure. label: the server's name in tables. prompt_token_costs: from `measure_token_costs`."""

    label: str
    endpoint: Endpoint
    model: str
    prompt_token_costs: PromptTokenCosts


class CaseClient:
    """Sends the requests of one case to one server, and records the error of each request that fails."""

    def __init__(self, endpoint: Endpoint, model: str, temperature: float, timeout_s: float):
        self.timeout_s = timeout_s
        self.num_sent = 0
        self.errors: list[str] = []
        self._endpoint = endpoint
        self._model = model
        self._temperature = temperature

    async def send(
        self,
        messages: Sequence[Message],
        max_tokens: int,
        *,
        delay_s: float = 0.0,
        on_piece: Callable[[float], None] | None = None,
        has_timeout: bool = True,
    ) -> TimedAnswer | None:
        """Sends a request after `delay_s`. Returns None if the request failed.

        on_piece: called with the arrival time of each piece (a delta with content).
        has_timeout: whether the request fails after `timeout_s`.
        """
        await asyncio.sleep(delay_s)
        self.num_sent += 1
        body = chat_request(self._model, messages, max_tokens, self._temperature)
        try:
            async with asyncio.timeout(self.timeout_s if has_timeout else None):
                return await stream_chat(self._endpoint, body, on_piece)
        except ExchangeError as error:
            self.errors.append(str(error))
        except TimeoutError:
            self.errors.append(f"no whole answer within {self.timeout_s:g} s: raise --timeout")
        return None


async def connect(
    label: str, endpoint: Endpoint, model: str | None, temperature: float, timeout_s: float
) -> MeasuredServer:
    """Chooses the model, and measures a prompt's token costs. Raises BenchError if the server does not answer."""
    try:
        async with asyncio.timeout(timeout_s):
            model_name = model or (await list_models(endpoint))[0]

            async def count_tokens(messages: list[Message]) -> int:
                body = chat_request(model_name, messages, 4, temperature)
                return (await stream_chat(endpoint, body)).prompt_tokens

            return MeasuredServer(label, endpoint, model_name, await measure_token_costs(count_tokens))
    except (ExchangeError, TimeoutError, LookupError) as error:
        raise BenchError(f"{label}: the server doesn't answer: {error or type(error).__name__}") from error


class DecodeStreams:
    """Streams that decode in the background until the `async with` block ends. Times: `time.perf_counter`."""

    def __init__(self, client: CaseClient, prompts: Sequence[list[Message]], max_tokens: int):
        self._client = client
        self._piece_times_by_stream: list[list[float]] = [[] for _ in prompts]
        # A stream's event is set when the stream has two pieces or ends.
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

    async def wait_for_pieces_after(self, gap_time: float) -> None:
        """Waits until every running stream has a piece after `gap_time`, which ends the stream's gap at this time."""

        def has_stream_without_later_piece() -> bool:
            streams = zip(self._tasks, self._piece_times_by_stream, strict=True)
            return any(not task.done() and (not times or times[-1] <= gap_time) for task, times in streams)

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
