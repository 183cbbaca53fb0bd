"""Buffers for the outputs of requests, and listeners that wake the readers of buffers."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from nanovllm_core.errors import EngineDeadError, GrammarError
from nanovllm_core.outputs import FinishReason, PromptLogprobs, RequestOutput, StepOutputs, TokenLogprobs
from nanovllm_core.request import Request

ValueT = TypeVar("ValueT")


class OutputListener(Protocol):
    """Receives notifications about one request, on the event loop's thread. The methods must not raise."""

    def wake(self) -> None:
        """Called when the request has new output or its grammar has failed."""

    def fail(self, reason: str) -> None:
        """Called when the engine has died."""


@dataclass(slots=True, eq=False)
class OutputBuffer:
    """The output of one request since the last call of `take`. `OutputBuffers` writes the public attributes."""

    _request: Request
    listener: OutputListener
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list[PromptLogprobs])
    num_cached_tokens: int = 0
    scheduled_time: float = 0.0
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    grammar_failure: str | None = None
    _num_output_tokens: int = 0

    def take(self) -> RequestOutput | None:
        """Take the output since the last call; None if no token is new. Raises GrammarError if the grammar failed."""
        tokens, logprobs, request = self.tokens, self.logprobs, self._request
        if not tokens:
            if self.grammar_failure is not None:
                raise GrammarError(self.grammar_failure)
            return None
        self.tokens = []
        num_top, prompt_logprobs = request.sampling.prompt_logprobs, None
        if num_top is not None and self._num_output_tokens == 0:
            prompt_logprobs = PromptLogprobs.concatenate(num_top, self.prompt_logprobs)
            self.prompt_logprobs = []
        self._num_output_tokens += len(tokens)
        if logprobs:
            self.logprobs = []
        if self.grammar_failure is not None:
            # The notification of the failure may have come before this call: the next call must raise.
            self.listener.wake()
        return RequestOutput(
            request.id,
            tuple(tokens),
            request.num_prompt_tokens,
            self.num_cached_tokens,
            self._num_output_tokens,
            None if request.sampling.logprobs is None else tuple(logprobs),
            self.finish_reason,
            self.stop_token,
            prompt_logprobs,
            self.scheduled_time,
            self.num_accepted_drafts,
            self.num_rejected_drafts,
        )


class AwaitableListener:
    """A listener that a coroutine awaits."""

    __slots__ = ("_death_reason", "_waiter")

    def __init__(self) -> None:
        self._death_reason: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Wake the coroutine if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, reason: str) -> None:
        """Wake the coroutine. Its next `wait` raises EngineDeadError."""
        self._death_reason = reason
        self.wake()

    def wait(self) -> asyncio.Future[None]:
        """A future that is done when there may be output. Raises EngineDeadError if the engine has died."""
        if self._death_reason is not None:
            raise EngineDeadError(self._death_reason)
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        return waiter


class OutputBuffers:
    """The output buffers of all open requests of one client."""

    def __init__(self) -> None:
        self._buffer_by_key: dict[int, OutputBuffer] = {}

    def open(self, key: int, buffer: OutputBuffer) -> None:
        """Add all further outputs of a new request to `buffer`."""
        self._buffer_by_key[key] = buffer

    def close(self, key: int) -> bool:
        """Discard further outputs of a request. Returns False if the request's last output has arrived already."""
        return self._buffer_by_key.pop(key, None) is not None

    def dispatch(self, outputs: StepOutputs) -> None:
        """Add `outputs` to the buffers of open requests, and wake the listeners."""
        buffers = self._buffer_by_key
        self._record_starts_and_drafts(outputs)
        for buffer, prompt_logprobs in self._with_buffers(outputs.prompt_logprobs):
            buffer.prompt_logprobs.append(prompt_logprobs)
        for buffer, logprobs in self._with_buffers(outputs.logprobs):
            buffer.logprobs.append(logprobs)
        for key, reason, stop_token in outputs.finishes:
            if (buffer := buffers.get(key)) is not None:
                buffer.finish_reason, buffer.stop_token = reason, stop_token
        for key, token in zip(outputs.keys, outputs.tokens, strict=True):
            if (buffer := buffers.get(key)) is not None:
                buffer.tokens.append(token)
                buffer.listener.wake()
        for finish in outputs.finishes:
            buffers.pop(finish.key, None)
        for key, failure in outputs.failures:
            if (buffer := buffers.pop(key, None)) is not None:
                buffer.grammar_failure = failure
                buffer.listener.wake()

    def _record_starts_and_drafts(self, outputs: StepOutputs) -> None:
        buffers = self._buffer_by_key
        for key, num_cached_tokens, scheduled_time in outputs.starts:
            if (buffer := buffers.get(key)) is not None:
                buffer.num_cached_tokens, buffer.scheduled_time = num_cached_tokens, scheduled_time
        for key, num_accepted, num_rejected in outputs.draft_totals:
            if (buffer := buffers.get(key)) is not None:
                buffer.num_accepted_drafts, buffer.num_rejected_drafts = num_accepted, num_rejected

    def _with_buffers(self, values: Iterable[tuple[int, ValueT]]) -> Iterator[tuple[OutputBuffer, ValueT]]:
        """Replace the request key of each pair by the request's buffer. Pairs of closed requests are skipped."""
        for key, value in values:
            if (buffer := self._buffer_by_key.get(key)) is not None:
                yield buffer, value

    def fail_all(self, reason: str) -> None:
        """Fail the listeners of all open requests."""
        for buffer in tuple(self._buffer_by_key.values()):
            buffer.listener.fail(reason)
