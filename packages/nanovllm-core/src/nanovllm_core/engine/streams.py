"""Collects each request's outputs until its reader takes them, and fails all readers when the engine dies."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from nanovllm_core.errors import EngineDeadError, GrammarError
from nanovllm_core.outputs import FinishReason, PromptLogprobs, RequestOutput, StepOutputs, TokenLogprobs
from nanovllm_core.request import Request

T = TypeVar("T")


class Sink(Protocol):
    """Receives notifications of one request, on the event loop's thread. Its methods must not raise."""

    def wake(self) -> None:
        """Called when there is output to take."""
        ...

    def fail(self, reason: str) -> None:
        """Called when the engine has died; no further output will come."""
        ...


class Backlog:
    """Output of one request that its reader has not taken yet. `RequestStreams` writes the public fields."""

    __slots__ = (
        "_num_output_tokens",
        "_request",
        "failure",
        "finish_reason",
        "logprobs",
        "num_cached_tokens",
        "prompt_logprobs",
        "sink",
        "stop_token",
        "tokens",
    )

    def __init__(self, request: Request, sink: Sink):
        self.sink = sink
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.failure: str | None = None
        self._request = request
        self._num_output_tokens = 0

    def take(self) -> RequestOutput | None:
        """Take everything since the last call as one output; None if there is no new token.

        Raises GrammarError if the request's grammar failed and no further output will come.
        """
        tokens, logprobs, request = self.tokens, self.logprobs, self._request
        if not tokens:
            if self.failure is not None:
                raise GrammarError(self.failure)
            return None
        self.tokens = []
        num_top, prompt_logprobs = request.sampling.prompt_logprobs, None
        if num_top is not None and self._num_output_tokens == 0:
            prompt_logprobs = PromptLogprobs.concatenate(num_top, self.prompt_logprobs)
            self.prompt_logprobs = []
        self._num_output_tokens += len(tokens)
        if logprobs:
            self.logprobs = []
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
        )


class Reader:
    """A sink whose reader sleeps while there is nothing to take."""

    __slots__ = ("_dead", "_waiter")

    def __init__(self) -> None:
        self._dead: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Wake the reader if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, reason: str) -> None:
        """Make the current or next `wait` of the reader end with EngineDeadError."""
        self._dead = reason
        self.wake()

    def wait(self) -> asyncio.Future[None]:
        """A future that is done when there may be output to take. Raises EngineDeadError if the engine has died."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        return waiter


class RequestStreams:
    """The backlogs of all requests of one client, by key."""

    def __init__(self) -> None:
        self._backlogs: dict[int, Backlog] = {}

    def open(self, key: int, backlog: Backlog) -> None:
        """Direct the outputs of a new request to `backlog`."""
        self._backlogs[key] = backlog

    def close(self, key: int) -> bool:
        """Discard further outputs of a request. Returns whether its last output had not come yet."""
        return self._backlogs.pop(key, None) is not None

    def dispatch(self, outputs: StepOutputs) -> None:
        """Add `outputs` to the backlogs of open requests, and wake their sinks."""
        backlogs = self._backlogs
        for backlog, num_cached_tokens in self._with_backlogs(outputs.starts):
            backlog.num_cached_tokens = num_cached_tokens
        for backlog, prompt_logprobs in self._with_backlogs(outputs.prompt_logprobs):
            backlog.prompt_logprobs.append(prompt_logprobs)
        for backlog, logprobs in self._with_backlogs(outputs.logprobs):
            backlog.logprobs.append(logprobs)
        for key, reason, stop_token in outputs.finishes:
            if (backlog := backlogs.get(key)) is not None:
                backlog.finish_reason, backlog.stop_token = reason, stop_token
        for key, token in zip(outputs.keys, outputs.tokens, strict=True):
            if (backlog := backlogs.get(key)) is not None:
                backlog.tokens.append(token)
                backlog.sink.wake()
        for key, _, _ in outputs.finishes:
            backlogs.pop(key, None)
        for key, failure in outputs.failures:
            if (backlog := backlogs.pop(key, None)) is not None:
                backlog.failure = failure
                backlog.sink.wake()

    def _with_backlogs(self, values: Iterable[tuple[int, T]]) -> Iterator[tuple[Backlog, T]]:
        """Replace the keys in `values` by the backlogs of open requests; entries of closed requests are skipped."""
        for key, value in values:
            if (backlog := self._backlogs.get(key)) is not None:
                yield backlog, value

    def fail_all(self, reason: str) -> None:
        """Fail the sinks of all open requests."""
        for backlog in tuple(self._backlogs.values()):
            backlog.sink.fail(reason)
