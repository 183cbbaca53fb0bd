"""Streams an answer as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import cast

import orjson

from nanovllm_core import EngineDeadError
from nanovllm_server.chat.generation import Generation
from nanovllm_server.observability.http_exchange import HttpExchange
from nanovllm_server.observability.logs import Logger
from nanovllm_server.protocol.bodies import ChatCompletionChunk, ChunkChoice, CompletionUsage, Error
from nanovllm_server.protocol.error import ApiError, internal_error, unavailable
from nanovllm_server.protocol.response import Delta, Envelope, make_chunk_choices

KEEP_ALIVE_COMMENT = b": keep-alive\n\n"
DONE_EVENT = b"data: [DONE]\n\n"
# Marks the choice's position in a serialised chunk. No JSON string contains this marker, because JSON escapes quotes.
CHOICE_PLACEHOLDER = cast(ChunkChoice, ["nanovllm"])


def serialize_event(body: ChatCompletionChunk | Error) -> bytes:
    """Serialises an event without a name."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def serialize_error_event(error: ApiError) -> bytes:
    """Serialises an event named `error`."""
    return b"event: error\n" + serialize_event(error.body())


class ChatStream:
    """The server-sent events of one answer. Each event has one chunk: new output of one choice, or the token counts.

    envelope: fields of the chunks, except choices and usage.
    include_usage: whether the last chunk has the token counts.
    has_continuous_usage: whether every chunk with a choice has the token counts up to this chunk.
    """

    def __init__(
        self, envelope: Envelope, generation: Generation, *, include_usage: bool, has_continuous_usage: bool = False
    ):
        self._envelope = envelope
        self._generation = generation
        self._include_usage = include_usage
        self._has_continuous_usage = has_continuous_usage
        self._started_choices: set[int] = set()
        # Chunks differ only in their choices: serialise the other fields once per stream.
        event_template = serialize_event(envelope.chunk([CHOICE_PLACEHOLDER], None, with_usage=include_usage))
        self._chunk_begin, self._chunk_end = event_template.split(orjson.dumps(CHOICE_PLACEHOLDER))
        self._delta_batches = generation.stream_deltas()
        self._first_deltas: list[Delta] = []
        self._must_send_prompt_token_ids = envelope.prompt_token_ids is not None
        self._num_unfinished_choices = generation.num_choices

    async def wait_for_first_deltas(self) -> None:
        """Waits for the first deltas (new output). A failure here becomes an error response: no status is sent yet."""
        self._first_deltas = await anext(self._delta_batches)

    async def events(self, exchange: HttpExchange, logger: Logger) -> AsyncIterator[bytes]:
        """Yields all events up to [DONE]. A failure becomes an error event."""
        try:
            async with aclosing(self._delta_batches) as delta_batches:
                yield self._serialize_batch(self._first_deltas)
                async for deltas in delta_batches:
                    yield self._serialize_batch(deltas)
            if self._include_usage:
                yield serialize_event(self._envelope.chunk([], self._generation.usage.body(), with_usage=True))
        except ApiError as error:
            logger.warning("stream failed", request_id=exchange.request_id, reason=error.message)
            yield serialize_error_event(error)
        except EngineDeadError as error:
            logger.error("stream failed", request_id=exchange.request_id, reason=str(error))
            yield serialize_error_event(unavailable(str(error), "engine_dead"))
        except Exception:
            logger.exception("stream failed", request_id=exchange.request_id)
            yield serialize_error_event(internal_error(exchange.request_id))
        yield DONE_EVENT

    def _serialize_batch(self, deltas: list[Delta]) -> bytes:
        if not deltas:
            return KEEP_ALIVE_COMMENT
        usage = self._generation.usage.body() if self._has_continuous_usage else None
        return b"".join([self._serialize_delta(delta, usage) for delta in deltas])

    def _serialize_delta(self, delta: Delta, usage: CompletionUsage | None) -> bytes:
        is_first = delta.index not in self._started_choices
        self._started_choices.add(delta.index)
        choices = make_chunk_choices(delta, is_first=is_first)
        return b"".join([self._serialize_choice(choice, usage) for choice in choices])

    def _serialize_choice(self, choice: ChunkChoice, usage: CompletionUsage | None) -> bytes:
        if choice["finish_reason"] is not None:
            self._num_unfinished_choices -= 1
        with_transfer = self._num_unfinished_choices == 0 and self._envelope.transfer_params is not None
        if self._must_send_prompt_token_ids or usage is not None or with_transfer:
            with_prompt, self._must_send_prompt_token_ids = self._must_send_prompt_token_ids, False
            return serialize_event(
                self._envelope.chunk(
                    [choice],
                    usage,
                    with_usage=self._include_usage,
                    with_prompt=with_prompt,
                    with_transfer=with_transfer,
                )
            )
        return self._chunk_begin + orjson.dumps(choice) + self._chunk_end
