"""The interface of an engine, whether it runs in this process (`AsyncEngine`) or in another one (`EngineClient`)."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from nanovllm_core.engine.status import NO_GRAMMARS, EngineDeadError, EngineInfo, EngineStats
from nanovllm_core.engine.streams import Backlog, Reader, RequestStreams, Sink
from nanovllm_core.request import GrammarSpec, ParameterTypes, Request, RequestError, RequestOutput


def check_request(request: Request, info: EngineInfo) -> None:
    """Check a request against the engine's limits. Raises RequestError, which names the invalid field."""
    if not request.num_prompt_tokens:
        raise RequestError("prompt", "the prompt is empty: it needs at least one token")
    if request.prompt_ids.min() < 0 or request.prompt_ids.max() >= info.vocab_size:
        raise RequestError("prompt", f"the prompt's token ids must be from 0 to {info.vocab_size - 1}")
    if request.num_prompt_tokens >= info.max_model_len:
        raise RequestError(
            "prompt",
            f"the prompt has {request.num_prompt_tokens} tokens, but must leave at least one of the context's "
            f"{info.max_model_len} tokens for the answer",
        )
    sampling = request.sampling
    sampling.validate(info.vocab_size)
    if sampling.grammar is not None and not info.grammars:
        raise RequestError("grammar", NO_GRAMMARS)
    max_outputs = info.max_model_len - request.num_prompt_tokens
    if sampling.max_tokens is not None and sampling.max_tokens > max_outputs:
        raise RequestError(
            "max_tokens",
            f"max_tokens is {sampling.max_tokens}, but after a prompt of {request.num_prompt_tokens} tokens the "
            f"context of {info.max_model_len} has {max_outputs} left",
        )


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request that is being served.

    take: returns everything since the last call as one output, or None if there is nothing new. Raises GrammarError if
        the request's grammar failed.
    close: aborts the request if it still runs. Must be called in the end; further calls do nothing.
    """

    take: Callable[[], RequestOutput | None]
    close: Callable[[], None]


class Engine(ABC):
    """The interface of an engine. Each subclass has coroutines that create and start it.

    first_key: key of the first request.
    """

    def __init__(self, info: EngineInfo, first_key: int = 0):
        self.info = info
        self.stats = EngineStats(num_blocks=info.num_blocks, num_free_blocks=info.num_blocks)
        self.dead: str | None = None
        self._streams = RequestStreams()
        self._open_ids: set[str] = set()
        # The engine identifies requests by keys that no client uses twice, so that late outputs of an aborted request
        # cannot reach a later request with the same id.
        self._keys = itertools.count(first_key)

    def check(self, request: Request) -> None:
        """Check a request against this engine's limits. Raises RequestError, which names the invalid field."""
        check_request(request, self.info)

    def open(self, request: Request, sink: Sink) -> OpenRequest:
        """Serve one request. `sink` is woken whenever there is output to take.

        Raises RequestError, and EngineDeadError if the engine has died.
        """
        self.check(request)
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if request.id in self._open_ids:
            raise RequestError("request_id", f"request id {request.id!r} is in use: choose another")
        # A copy, because the engine sets fields of its own.
        engine_request = replace(request, token_ids=request.prompt_ids)
        engine_request.key = key = next(self._keys)

        def close() -> None:
            self._open_ids.discard(request.id)
            if self._streams.close(key) and self.dead is None:
                self._abort(key)

        self._submit(engine_request)
        self._open_ids.add(request.id)
        backlog = Backlog(request, sink)
        self._streams.open(key, backlog)
        return OpenRequest(backlog.take, close)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Serve one request and yield its outputs; the last output has a finish_reason.

        Closing the generator early aborts the request.
        Raises RequestError; GrammarError if its grammar can't be compiled or fails; EngineDeadError.
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
    async def compile(self, spec: GrammarSpec) -> ParameterTypes:
        """Compile a grammar ahead of requests. A request waits until its grammar is compiled.

        Returns the types of parameters that are written as XML elements.
        Raises GrammarError if it can't be compiled, is too large or takes too long; EngineDeadError if the engine dies.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Stop the engine. Open requests fail with EngineDeadError."""

    @abstractmethod
    def _submit(self, request: Request) -> None:
        """Submit a validated request."""

    @abstractmethod
    def _abort(self, key: int) -> None:
        """Abort a request if it still runs."""

    def _die(self, reason: str) -> None:
        """Reject new requests from now on, and fail the open ones."""
        if self.dead is None:
            self.dead = reason
            self._streams.fail_all(reason)
