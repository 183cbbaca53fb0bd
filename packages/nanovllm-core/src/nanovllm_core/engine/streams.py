"""Hands each request's outputs to whoever reads them, and lets nobody wait for an engine that is gone.

Outputs that came while a reader was busy are joined into one. This room must not know how requests reach the engine.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec

from nanovllm_core.engine.status import EngineDeadError
from nanovllm_core.request import RequestOutput, TokenLogprobs


class Sink(Protocol):
    """Where the outputs of one request go, as they come, on the event loop's thread. Neither may raise."""

    def put(self, output: RequestOutput) -> None:
        """Take an output; the one with a finish reason is the last."""
        ...

    def fail(self, reason: str) -> None:
        """Learn that the engine died and nothing more will come."""
        ...


class Backlog:
    """Outputs of one request that nobody has taken yet, as one: their tokens and log-probabilities, no more."""

    def __init__(self) -> None:
        self._last: RequestOutput | None = None
        # Of outputs before the last one; mostly there are none.
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def add(self, output: RequestOutput) -> None:
        """Add an output to what is there."""
        if self._last is not None:
            self._tokens += self._last.new_token_ids
            self._logprobs += self._last.logprobs or ()
        self._last = output

    def take(self) -> RequestOutput | None:
        """Everything since the last call; None when that is nothing."""
        output, self._last = self._last, None
        if output is None or not self._tokens:
            return output
        tokens = (*self._tokens, *output.new_token_ids)
        logprobs = None if output.logprobs is None else (*self._logprobs, *output.logprobs)
        self._tokens, self._logprobs = [], []
        return msgspec.structs.replace(output, new_token_ids=tokens, logprobs=logprobs)


class OutputStream:
    """One request's outputs for one reader, who sleeps while there are none."""

    def __init__(self) -> None:
        self._backlog = Backlog()
        self._dead: str | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output; joined to those not yet taken."""
        self._backlog.add(output)
        self._ready.set()

    def fail(self, reason: str) -> None:
        """Let the reader, now or later, get an EngineDeadError."""
        self._dead = reason
        self._ready.set()

    async def get(self) -> RequestOutput:
        """Everything since the last call; waits for something to come. Raises EngineDeadError."""
        await self._ready.wait()
        output = self._backlog.take()
        if output is None:
            raise EngineDeadError(self._dead or "the engine stopped")
        if self._dead is None:
            self._ready.clear()
        return output


class RequestStreams:
    """The sinks of all requests of one client."""

    def __init__(self) -> None:
        self._sinks: dict[str, Sink] = {}

    def open(self, key: str, sink: Sink) -> None:
        """Send the outputs of a new request to `sink`."""
        self._sinks[key] = sink

    def close(self, key: str) -> bool:
        """Forget a request, and drop what still comes for it. Returns whether its last output had not come yet."""
        return self._sinks.pop(key, None) is not None

    def dispatch(self, outputs: Sequence[RequestOutput]) -> None:
        """Give each output to its sink, if somebody still listens."""
        for output in outputs:
            sink = self._sinks.get(output.id)
            if sink is not None:
                if output.finish_reason is not None:
                    del self._sinks[output.id]
                sink.put(output)

    def fail_all(self, reason: str) -> None:
        """Tell every open sink that nothing more will come."""
        for sink in tuple(self._sinks.values()):
            sink.fail(reason)
