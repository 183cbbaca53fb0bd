"""Requests to one server: single answers with a time limit, and streams that decode in the background."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

from nanovllm_server.bench.client import Answer, Endpoint, ExchangeError, chat_request, list_models, stream_chat
from nanovllm_server.bench.interference.prompts import Message, TokenCosts, measure_token_costs
from nanovllm_server.bench.report import BenchError

ENDED_EARLY = "a decoding stream ended before the measurement did: raise --stream-len"


@dataclass(frozen=True, slots=True)
class Target:
    """One server under measurement. label: its name in tables. model: the name that requests ask for."""

    label: str
    endpoint: Endpoint
    model: str
    costs: TokenCosts


class ChatClient:
    """Sends the requests of one case to one server and records the errors of those that fail."""

    def __init__(self, endpoint: Endpoint, model: str, temperature: float, timeout_s: float):
        self.timeout_s = timeout_s
        self.num_sent = 0
        self.errors: list[str] = []
        self._endpoint = endpoint
        self._model = model
        self._temperature = temperature

    async def ask(
        self,
        messages: Sequence[Message],
        max_tokens: int,
        *,
        delay_s: float = 0.0,
        on_piece: Callable[[float], None] | None = None,
        limited: bool = True,
    ) -> Answer | None:
        """The answer, or None if the request failed.

        delay_s: wait before sending. on_piece: called with the time of each piece when the piece arrives.
        limited: the request fails after `timeout_s`.
        """
        await asyncio.sleep(delay_s)
        self.num_sent += 1
        body = chat_request(self._model, messages, max_tokens, self._temperature)
        try:
            async with asyncio.timeout(self.timeout_s if limited else None):
                return await stream_chat(self._endpoint, body, on_piece)
        except ExchangeError as error:
            self.errors.append(str(error))
        except TimeoutError:
            self.errors.append(f"no whole answer within {self.timeout_s:g} s: raise --timeout")
        return None


async def connect(label: str, endpoint: Endpoint, model: str | None, temperature: float, timeout_s: float) -> Target:
    """Choose the model and measure token costs, which also warms the server up. Raises BenchError."""
    try:
        async with asyncio.timeout(timeout_s):
            name = model or (await list_models(endpoint))[0]

            async def count_tokens(messages: list[Message]) -> int:
                body = chat_request(name, messages, 4, temperature)
                return (await stream_chat(endpoint, body)).prompt_tokens

            return Target(label, endpoint, name, await measure_token_costs(count_tokens))
    except (ExchangeError, TimeoutError, LookupError) as error:
        raise BenchError(f"{label}: the server doesn't answer: {error or type(error).__name__}") from error


class DecodeStreams:
    """Streams that decode in the background, and the times of their pieces."""

    def __init__(self, client: ChatClient, prompts: Sequence[list[Message]], max_tokens: int):
        self._client = client
        self._piece_times: list[list[float]] = [[] for _ in prompts]
        self._decoding = [asyncio.Event() for _ in prompts]
        # Set when any stream produces a piece or ends.
        self._progress = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._run(index, messages, max_tokens)) for index, messages in enumerate(prompts)
        ]

    async def _run(self, index: int, messages: list[Message], max_tokens: int) -> None:
        times, decoding = self._piece_times[index], self._decoding[index]

        def record(now: float) -> None:
            times.append(now)
            self._progress.set()
            if len(times) == 2:
                decoding.set()

        try:
            if await self._client.ask(messages, max_tokens, on_piece=record, limited=False) is not None:
                self._client.errors.append(ENDED_EARLY)
        finally:
            decoding.set()
            self._progress.set()

    async def wait_until_decoding(self) -> float:
        """Wait until every stream has two pieces or has failed; returns the time."""
        try:
            async with asyncio.timeout(self._client.timeout_s):
                for event in self._decoding:
                    await event.wait()
        except TimeoutError:
            self._client.errors.append(f"a decoding stream has no tokens after {self._client.timeout_s:g} s")
        return time.perf_counter()

    async def wait_for_pieces_after(self, moment: float) -> None:
        """Wait until every running stream has a piece later than `moment`, so that no gap around it is lost."""

        def any_behind() -> bool:
            pairs = zip(self._tasks, self._piece_times, strict=True)
            return any(not task.done() and (not times or times[-1] <= moment) for task, times in pairs)

        try:
            async with asyncio.timeout(self._client.timeout_s):
                while any_behind():
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            self._client.errors.append(f"a decoding stream has no tokens for {self._client.timeout_s:g} s")

    def gaps_within(self, begin: float, end: float) -> list[float]:
        """Seconds between consecutive pieces of a stream, both from `begin` to `end`."""
        return [after - before for before, after in self._pairs() if begin <= before and after <= end]

    def gaps_touching(self, begin: float, end: float) -> list[float]:
        """Seconds between consecutive pieces of a stream, for each gap that shares time with `begin` to `end`."""
        return [after - before for before, after in self._pairs() if before < end and after > begin]

    def _pairs(self) -> list[tuple[float, float]]:
        return [pair for times in self._piece_times for pair in pairwise(times)]

    async def stop(self) -> None:
        """Close the connections of all streams."""
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


@asynccontextmanager
async def decoding(
    client: ChatClient, prompts: Sequence[list[Message]], max_tokens: int
) -> AsyncGenerator[DecodeStreams]:
    """Streams that decode until the block ends."""
    streams = DecodeStreams(client, prompts, max_tokens)
    try:
        yield streams
    finally:
        await streams.stop()
