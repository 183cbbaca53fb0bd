"""Hands each request's outputs to whoever reads them, and lets nobody wait for an engine that is gone.

A step's outputs come as columns. They are added, per request, to what its reader has not taken yet, and become a
`RequestOutput` only when it does: a reader that was busy finds one. This room must not know how requests reach the
engine.
"""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from nanovllm_core.engine.status import EngineDeadError
from nanovllm_core.request import (
    FinishReason,
    GrammarError,
    PromptLogprobs,
    Request,
    RequestOutput,
    StepOutputs,
    TokenLogprobs,
)

T = TypeVar("T")


class Sink(Protocol):
    """Who is told of what comes for a request, on the event loop's thread. Neither may raise."""

    def wake(self) -> None:
        """Learn that there is something to take."""
        ...

    def fail(self, reason: str) -> None:
        """Learn that the engine died and nothing more will come."""
        ...


class Backlog:
    """What was made for one request and nobody has taken yet. What comes is written to the public fields."""

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
        """Everything since the last call as one output, under the id that the sender chose; None if that is nothing.

        Raises GrammarError when the request's grammar failed and nothing more will come.
        """
        tokens, logprobs, request = self.tokens, self.logprobs, self._request
        if not tokens:
            if self.failure is not None:
                raise GrammarError(self.failure)
            return None
        self.tokens = []
        num_top, told = request.sampling.prompt_logprobs, None
        if num_top is not None and self._num_output_tokens == 0:
            told = PromptLogprobs.joined(num_top, self.prompt_logprobs)
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
            told,
        )


class Reader:
    """The sink of one reader, who sleeps while there is nothing to take."""

    __slots__ = ("_dead", "_waiter")

    def __init__(self) -> None:
        self._dead: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Let the reader go on, if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, reason: str) -> None:
        """Let the reader, now or later, get an EngineDeadError."""
        self._dead = reason
        self.wake()

    def wait(self) -> asyncio.Future[None]:
        """Something to wait for, there being nothing to take now. Raises EngineDeadError."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        return waiter


class RequestStreams:
    """The backlogs of all requests of one client, by key."""

    def __init__(self) -> None:
        self._backlogs: dict[int, Backlog] = {}

    def open(self, key: int, backlog: Backlog) -> None:
        """Send the outputs of a new request to `backlog`."""
        self._backlogs[key] = backlog

    def close(self, key: int) -> bool:
        """Forget a request, and drop what still comes for it. Returns whether its last output had not come yet."""
        return self._backlogs.pop(key, None) is not None

    def dispatch(self, outputs: StepOutputs) -> None:
        """Give everything in `outputs` to the backlog it is for, if somebody still listens, and wake who reads that."""
        backlogs = self._backlogs
        for backlog, num_cached_tokens in self._open_ones(outputs.begins):
            backlog.num_cached_tokens = num_cached_tokens
        for backlog, prompt_logprobs in self._open_ones(outputs.prompt_logprobs):
            backlog.prompt_logprobs.append(prompt_logprobs)
        for backlog, logprobs in self._open_ones(outputs.logprobs):
            backlog.logprobs.append(logprobs)
        for key, reason, stop_token in outputs.ends:
            if (backlog := backlogs.get(key)) is not None:
                backlog.finish_reason, backlog.stop_token = reason, stop_token
        for key, token in zip(outputs.keys, outputs.tokens, strict=True):
            if (backlog := backlogs.get(key)) is not None:
                backlog.tokens.append(token)
                backlog.sink.wake()
        for key, _, _ in outputs.ends:
            backlogs.pop(key, None)
        for key, failure in outputs.failures:
            if (backlog := backlogs.pop(key, None)) is not None:
                backlog.failure = failure
                backlog.sink.wake()

    def _open_ones(self, values: Iterable[tuple[int, T]]) -> Iterator[tuple[Backlog, T]]:
        """What is in `values`, by keys, for requests that somebody still listens to, and their backlogs."""
        for key, value in values:
            if (backlog := self._backlogs.get(key)) is not None:
                yield backlog, value

    def fail_all(self, reason: str) -> None:
        """Tell every open sink that nothing more will come."""
        for backlog in tuple(self._backlogs.values()):
            backlog.sink.fail(reason)
