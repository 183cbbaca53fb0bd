"""Hands each request's outputs to whoever iterates over them, and lets nobody wait for an engine that is gone.

Outputs that came while a reader was busy are joined into one. This room must not know how requests reach the engine.
"""

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from nanovllm_core.engine.status import EngineDeadError
from nanovllm_core.request import RequestOutput


class OutputStream:
    """One request's outputs, between the engine and one reader."""

    def __init__(self) -> None:
        self._pending: RequestOutput | None = None
        self._dead: str | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output; joined to one not yet taken."""
        self._pending = output if self._pending is None else _joined(self._pending, output)
        self._ready.set()

    def fail(self, reason: str) -> None:
        """Let the reader, now or later, get an EngineDeadError."""
        self._dead = reason
        self._ready.set()

    async def get(self) -> RequestOutput:
        """Everything since the last call; waits for something to come. Raises EngineDeadError."""
        await self._ready.wait()
        output, self._pending = self._pending, None
        if output is None:
            raise EngineDeadError(self._dead or "the engine stopped")
        if self._dead is None:
            self._ready.clear()
        return output


class RequestStreams:
    """The streams of all requests of one client."""

    def __init__(self) -> None:
        self._streams: dict[str, OutputStream] = {}

    def open(self, key: str) -> OutputStream:
        """A stream for a new request."""
        stream = self._streams[key] = OutputStream()
        return stream

    def close(self, key: str) -> None:
        """Forget a stream; what still comes for it is dropped."""
        del self._streams[key]

    def dispatch(self, outputs: Sequence[RequestOutput]) -> None:
        """Give each output to its stream, if somebody still listens."""
        for output in outputs:
            stream = self._streams.get(output.id)
            if stream is not None:
                stream.put(output)

    def fail_all(self, reason: str) -> None:
        """End every open stream with an EngineDeadError."""
        for stream in self._streams.values():
            stream.fail(reason)


def _joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    return replace(second, new_token_ids=first.new_token_ids + second.new_token_ids, logprobs=logprobs)
