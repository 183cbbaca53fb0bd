"""The face of an engine, whether it runs in this process or in its own.

This room must not know how a request travels; the subclasses do.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from nanovllm_core.engine.status import NO_GRAMMARS, EngineDeadError, EngineInfo, EngineStats
from nanovllm_core.engine.streams import Backlog, Reader, RequestStreams, Sink
from nanovllm_core.request import GrammarSpec, Request, RequestError, RequestOutput


def check_request(request: Request, info: EngineInfo) -> None:
    """Refuse a request that the engine could never serve. Raises RequestError, which names the field."""
    if not request.num_prompt_tokens:
        raise RequestError("prompt", "the prompt is empty: it needs at least one token")
    if request.prompt_ids.min() < 0 or request.prompt_ids.max() >= info.vocab_size:
        raise RequestError("prompt", f"the prompt's token ids must be from 0 to {info.vocab_size - 1}")
    if request.num_prompt_tokens >= info.max_model_len:
        raise RequestError(
            "prompt",
            f"the prompt has {request.num_prompt_tokens} tokens, but the context holds {info.max_model_len}, of which "
            "at least one must be left for the answer",
        )
    sampling = request.sampling
    sampling.validate(info.vocab_size)
    if sampling.grammar is not None and not info.grammars:
        raise RequestError("grammar", NO_GRAMMARS)
    room = info.max_model_len - request.num_prompt_tokens
    if sampling.max_tokens is not None and sampling.max_tokens > room:
        raise RequestError(
            "max_tokens",
            f"max_tokens is {sampling.max_tokens}, but after a prompt of {request.num_prompt_tokens} tokens the "
            f"context of {info.max_model_len} has room for {room}",
        )


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request that is being served.

    take: everything made since the last call, as one output; None if that is nothing. Raises GrammarError when the
    request's grammar failed and nothing more will come. close: must be called at the end, early or not, and ends the
    request if it still runs; calling it again does nothing.
    """

    take: Callable[[], RequestOutput | None]
    close: Callable[[], None]


class Engine(ABC):
    """What every engine offers. One must be started by its class's own constructor coroutine.

    first_key: requests get keys from here on.
    """

    def __init__(self, info: EngineInfo, first_key: int = 0):
        self.info = info
        self.stats = EngineStats(num_blocks=info.num_blocks, num_free_blocks=info.num_blocks)
        self.dead: str | None = None
        self._streams = RequestStreams()
        self._live: set[str] = set()
        # Below this face a request has a key of its own, never used twice by any client of an engine: what is still on
        # its way for one that was aborted must not reach a later one of the same id.
        self._keys = itertools.count(first_key)

    def check(self, request: Request) -> None:
        """Refuse a request that this engine could never serve. Raises RequestError, which names the field."""
        check_request(request, self.info)

    def open(self, request: Request, sink: Sink) -> OpenRequest:
        """Serve one request: `sink` is woken whenever there is something to take.

        Raises RequestError, and EngineDeadError when the engine has died.
        """
        self.check(request)
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if request.id in self._live:
            raise RequestError("request_id", f"request id {request.id!r} is in use: choose another")
        ours = replace(request, token_ids=request.prompt_ids)
        ours.key = key = next(self._keys)

        def close() -> None:
            self._live.discard(request.id)
            if self._streams.close(key) and self.dead is None:
                self._abort(key)

        self._submit(ours)
        self._live.add(request.id)
        backlog = Backlog(request, sink)
        self._streams.open(key, backlog)
        return OpenRequest(backlog.take, close)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Serve one request and yield what is made, all there is at a time; the last output has a finish_reason.

        Closing the generator early aborts the request. Raises RequestError, GrammarError when its grammar can't be
        compiled or fails, and EngineDeadError when the engine has died or dies meanwhile.
        """
        reader = Reader()
        opened = self.open(request, reader)
        finished = False
        try:
            while not finished:
                output = opened.take()
                if output is None:
                    await reader.wait()
                    continue
                finished = output.finish_reason is not None
                yield output
        finally:
            opened.close()

    @abstractmethod
    async def compile(self, spec: GrammarSpec) -> None:
        """Have a grammar ready for requests that bring it; those that bring one that isn't wait for it.

        Raises GrammarError for one that can't be compiled, is too large or takes too long, and EngineDeadError when the
        engine has died or dies meanwhile.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End the engine; requests still running get an EngineDeadError."""

    @abstractmethod
    def _submit(self, request: Request) -> None:
        """Send a checked request, under its key, on its way."""

    @abstractmethod
    def _abort(self, key: int) -> None:
        """Have a request ended, if it still runs."""

    def _die(self, reason: str) -> None:
        """Refuse everything from now on, and fail what is waiting."""
        if self.dead is None:
            self.dead = reason
            self._streams.fail_all(reason)
