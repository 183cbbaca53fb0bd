"""Streams an answer as server-sent events."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import cast

import orjson

from nanovllm_core import EngineDeadError
from nanovllm_server.chat.generation import Generation
from nanovllm_server.observability.exchange import Exchange
from nanovllm_server.observability.logs import Logger
from nanovllm_server.protocol.bodies import ChatCompletionChunk, ChunkChoice, Error
from nanovllm_server.protocol.error import ApiError, internal_error, unavailable
from nanovllm_server.protocol.response import Delta, Envelope, stream_choices

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
# Placeholder for the choice in the template of a chunk. No text equals it, because JSON would escape its quotes.
MARK = cast(ChunkChoice, ["nanovllm"])


def event(body: ChatCompletionChunk | Error) -> bytes:
    """One unnamed event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The event for an error after the stream has begun."""
    return b"event: error\n" + event(error.body())


class ChatStream:
    """The events of one answer."""

    def __init__(self, envelope: Envelope, generation: Generation, *, include_usage: bool):
        self._envelope = envelope
        self._generation = generation
        self._include_usage = include_usage
        self._started: set[int] = set()
        # All chunks but the last differ only in their choice: serialise the rest once instead of for every token.
        template = event(envelope.chunk([MARK], None, with_usage=include_usage))
        self._head, self._tail = template.split(orjson.dumps(MARK))
        self._batches = generation.deltas()
        self._first: list[Delta] = []
        self._send_prompt = envelope.prompt_token_ids is not None

    async def begin(self) -> None:
        """Waits for the first deltas, so that an earlier failure gets its own HTTP status. Raises like `deltas`."""
        self._first = await anext(self._batches)

    async def events(self, exchange: Exchange, logger: Logger) -> AsyncIterator[bytes]:
        """Yields all events up to [DONE], joined if they are ready together. A failure becomes an error event."""
        try:
            async with aclosing(self._batches) as batches:
                yield self._piece(self._first)
                async for deltas in batches:
                    yield self._piece(deltas)
            if self._include_usage:
                yield event(self._envelope.chunk([], self._generation.usage.body(), with_usage=True))
        except ApiError as error:
            logger.warning("stream failed", request_id=exchange.request_id, reason=error.message)
            yield error_event(error)
        except EngineDeadError as error:
            logger.error("stream failed", request_id=exchange.request_id, reason=str(error))
            yield error_event(unavailable(str(error), "engine_dead"))
        except Exception:
            logger.exception("stream failed", request_id=exchange.request_id)
            yield error_event(internal_error(exchange.request_id))
        yield DONE

    def _piece(self, deltas: list[Delta]) -> bytes:
        if not deltas:
            return KEEP_ALIVE
        return b"".join([self._events(delta) for delta in deltas])

    def _events(self, delta: Delta) -> bytes:
        first = delta.index not in self._started
        self._started.add(delta.index)
        return b"".join([self._event(choice) for choice in stream_choices(delta, first=first)])

    def _event(self, choice: ChunkChoice) -> bytes:
        if self._send_prompt:
            self._send_prompt = False
            return event(self._envelope.chunk([choice], None, with_usage=self._include_usage, with_prompt=True))
        return self._head + orjson.dumps(choice) + self._tail
