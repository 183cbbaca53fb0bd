"""The interface of an engine in this process (`AsyncEngine`) or in another process (`EngineClient`)."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from nanovllm_core.engine.output_buffers import AwaitableListener, OutputBuffer, OutputBuffers, OutputListener
from nanovllm_core.engine.status import GRAMMARS_UNSUPPORTED, EngineInfo, EngineStats
from nanovllm_core.errors import EngineDeadError, RequestError
from nanovllm_core.grammar_types import GrammarSpec, ParameterTypes
from nanovllm_core.outputs import RequestOutput
from nanovllm_core.request import Request


def check_request(request: Request, info: EngineInfo) -> None:
    """Raises RequestError if the request is invalid for the engine."""
    if not request.num_prompt_tokens:
        raise RequestError("prompt", "the prompt is empty: it needs at least one token")
    for field_name, ids in (("prompt", request.prompt_ids), ("prediction", request.prediction_ids)):
        if len(ids) and (ids.min() < 0 or ids.max() >= info.vocab_size):
            raise RequestError(field_name, f"the {field_name}'s token ids must be from 0 to {info.vocab_size - 1}")
    if request.num_prompt_tokens >= info.max_model_len:
        raise RequestError(
            "prompt",
            f"the prompt has {request.num_prompt_tokens} tokens, but must leave at least one of the context's "
            f"{info.max_model_len} tokens for the answer",
        )
    if len(request.prediction_ids) > info.max_model_len:
        raise RequestError(
            "prediction",
            f"the prediction has {len(request.prediction_ids)} tokens, but the context has {info.max_model_len}: "
            "shorten the prediction",
        )
    try:
        request.cache_salt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            "cache_salt", f"cache_salt has a surrogate at position {error.start}, which UTF-8 can't encode: remove it"
        ) from error
    if request.prefix_peer and request.prefix_peer not in info.transfer_peers:
        raise RequestError(
            "prefix_peer",
            f"prefix_peer is {request.prefix_peer!r}, which is none of the engine's transfer_peers: name one of them",
        )
    sampling = request.sampling
    sampling.validate(info.vocab_size)
    if sampling.grammar is not None and not info.supports_grammars:
        raise RequestError("grammar", GRAMMARS_UNSUPPORTED)
    max_output_tokens = info.max_model_len - request.num_prompt_tokens
    if sampling.max_tokens is not None and sampling.max_tokens > max_output_tokens:
        raise RequestError(
            "max_tokens",
            f"max_tokens is {sampling.max_tokens}, but after a prompt of {request.num_prompt_tokens} tokens the "
            f"context of {info.max_model_len} has {max_output_tokens} left",
        )
    if sampling.min_tokens > max_output_tokens:
        raise RequestError(
            "min_tokens",
            f"min_tokens is {sampling.min_tokens}, but after a prompt of {request.num_prompt_tokens} tokens the "
            f"context of {info.max_model_len} has {max_output_tokens} left",
        )


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request that is being served.

    take: returns the output since the last call; None if no token is new. Raises GrammarError if the grammar failed.
    close: aborts the request if it still runs. The caller must call `close` at the end; further calls do nothing.
    """

    take: Callable[[], RequestOutput | None]
    close: Callable[[], None]


class Engine(ABC):
    """An engine. death_reason: why the engine is dead; None while it serves.

    first_request_key: key (internal id) of the first request.
    """

    def __init__(self, info: EngineInfo, first_request_key: int = 0):
        self.info = info
        self.stats = EngineStats(
            num_blocks=info.num_blocks,
            num_free_blocks=info.num_blocks,
            num_free_state_slots=info.num_state_slots,
        )
        self.death_reason: str | None = None
        self._output_buffers = OutputBuffers()
        self._open_request_ids: set[str] = set()
        # Clients may reuse request ids. Keys are unique, so late outputs of an aborted request reach no other request.
        self._keys = itertools.count(first_request_key)

    def check(self, request: Request) -> None:
        """Raises RequestError if the request is invalid for this engine."""
        check_request(request, self.info)

    def open_request(self, request: Request, listener: OutputListener) -> OpenRequest:
        """Serve a request, and wake `listener` when there is output to take. Raises RequestError, EngineDeadError."""
        self.check(request)
        if self.death_reason is not None:
            raise EngineDeadError(self.death_reason)
        if request.id in self._open_request_ids:
            raise RequestError("request_id", f"request id {request.id!r} is in use: choose another")
        key = next(self._keys)

        def close() -> None:
            self._open_request_ids.discard(request.id)
            if self._output_buffers.close(key) and self.death_reason is None:
                self._abort(key)

        self._submit(key, request)
        self._open_request_ids.add(request.id)
        buffer = OutputBuffer(request, listener)
        self._output_buffers.open(key, buffer)
        return OpenRequest(buffer.take, close)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Serve a request and yield its outputs. Closing the generator aborts the request.

        Raises RequestError; GrammarError if the grammar can't be compiled or fails; EngineDeadError.
        """
        listener = AwaitableListener()
        open_request = self.open_request(request, listener)
        is_finished = False
        try:
            while not is_finished:
                output = open_request.take()
                if output is None:
                    await listener.wait()
                    continue
                is_finished = output.finish_reason is not None
                yield output
        finally:
            open_request.close()

    @abstractmethod
    async def compile_grammar(self, spec: GrammarSpec) -> ParameterTypes:
        """Compile a grammar before requests use it. Without this call, a request waits until its grammar is compiled.

        Returns the types of tool parameters, which are needed to read tool calls of models that write XML.
        Raises GrammarError if the grammar is invalid, too large or too slow; EngineDeadError if the engine dies.
        """

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Forget all cached blocks, in all tiers. Later requests find none of them. Raises EngineDeadError."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop the engine. Open requests fail with EngineDeadError."""

    @abstractmethod
    def _submit(self, key: int, request: Request) -> None:
        """Send a validated request with a new key to the engine."""

    @abstractmethod
    def _abort(self, key: int) -> None:
        """Abort a request if it still runs."""

    def _die(self, reason: str) -> None:
        """Fail open requests, and reject new requests."""
        if self.death_reason is None:
            self.death_reason = reason
            self._output_buffers.fail_all(reason)
