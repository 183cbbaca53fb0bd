"""Runs the sequences of one answer on the engine and yields their deltas.

A slow reader or a busy event loop gets larger deltas instead of a longer queue.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from nanovllm_core import Engine, EngineDeadError, GrammarError, OpenRequest, PromptLogprobs, Request, RequestOutput
from nanovllm_server.chat.output_assembler import OutputAssembler
from nanovllm_server.observability.metrics import Metrics
from nanovllm_server.protocol.error import timed_out
from nanovllm_server.protocol.response import Delta, Usage

IDLE_S = 15.0


class OutputNotifier:
    """Wakes the one reader of an answer when the engine has new outputs for any of its choices, or has failed."""

    def __init__(self) -> None:
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._has_outputs = False

    def wake(self) -> None:
        """Called by the engine: there are new outputs."""
        self._has_outputs = True
        self.wake_reader()

    def fail(self, reason: str) -> None:
        """Called by the engine: it died."""
        self.raise_in_reader(EngineDeadError(reason))

    def raise_in_reader(self, failure: Exception) -> None:
        """Make the reader raise `failure`."""
        self._failure = failure
        self.wake_reader()

    def wake_reader(self) -> None:
        """Let the reader's `wait` return, even if there are no new outputs."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for new outputs or `wake_reader`. Raises the failure that was passed to `fail` or `raise_in_reader`."""
        if not self._has_outputs and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._has_outputs = False
        if self._failure is not None:
            raise self._failure


class Generation:
    """One answer while it is generated: a request and an output assembler for each choice.

    timeout_s: longest time from the requests' arrival to the end; None for no limit.
    refuse: makes the exception to raise, from the reason, if the grammar fails during generation.
    first_token_s: time from arrival to the first token; None before it.
    prompt_logprobs: of all prompt tokens but the first; None before the first token, or if not requested.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        assemblers: Sequence[OutputAssembler],
        metrics: Metrics,
        *,
        timeout_s: float | None = None,
        refuse: Callable[[str], Exception] = GrammarError,
    ):
        self.first_token_s: float | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self._timeout_s = timeout_s
        self._engine = engine
        self._requests = requests
        self._assemblers = assemblers
        self._metrics = metrics
        self._refuse = refuse
        self._notifier = OutputNotifier()
        self._cached_tokens = 0
        self._last: list[float | None] = [None] * len(assemblers)
        # By index of the choice.
        self._opened: dict[int, OpenRequest] = {}
        self._timers: list[asyncio.TimerHandle | asyncio.Task[None]] = []
        self._closed = False

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        prompt_tokens = self._requests[0].num_prompt_tokens
        return Usage(
            prompt_tokens,
            self._cached_tokens,
            sum(assembler.num_tokens for assembler in self._assemblers),
            sum(assembler.num_reasoning_tokens for assembler in self._assemblers),
        )

    @property
    def prompt_token_ids(self) -> NDArray[np.int32]:
        """The tokens of the prompt; read-only."""
        return self._requests[0].prompt_ids

    @property
    def finish_reasons(self) -> list[str]:
        """Why each choice ended; "abort" for one that has not."""
        return [assembler.finish_reason or "abort" for assembler in self._assemblers]

    def fail(self, failure: Exception) -> None:
        """Ends the generation: `deltas` raises `failure`."""
        self._notifier.raise_in_reader(failure)

    async def deltas(self, idle_s: float = IDLE_S) -> AsyncGenerator[list[Delta], None]:
        """Yields the deltas since the last time; an empty list after each `idle_s` seconds without new ones.

        Ends when every choice has ended. If the caller stops earlier, all sequences are aborted.

        Raises EngineDeadError, the exception of `refuse`, the argument of `fail`, and ApiError after `timeout_s`.
        """
        self._begin(idle_s)
        try:
            self._open(range(1 if self._shares_prompt else len(self._assemblers)))
            unfinished = len(self._assemblers)
            while unfinished:
                await self._notifier.wait()
                outputs = self._outputs()
                if not outputs:
                    yield []
                    continue
                if len(self._opened) < len(self._assemblers):
                    self._open(range(1, len(self._assemblers)))
                deltas: list[Delta] = []
                for index, output in outputs.items():
                    if self._assemblers[index].finish_reason is not None:
                        continue
                    delta = self._take(index, output)
                    if delta is not None:
                        deltas.append(delta)
                    if self._assemblers[index].finish_reason is not None:
                        unfinished -= 1
                        # After a stop string, the engine would otherwise continue this choice.
                        self._opened[index].close()
                if deltas:
                    yield deltas
        finally:
            self.close()

    def close(self) -> None:
        """Aborts sequences that still run, and updates the metrics. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        for timer in self._timers:
            timer.cancel()
        for each in self._opened.values():
            each.close()
        self._count()

    @property
    def _shares_prompt(self) -> bool:
        # After the first token, the prefix cache has the prompt's blocks, so the other choices need not compute it.
        # A prompt that is not longer than a block is never cached.
        info = self._engine.info
        return info.prefix_caching and self._requests[0].num_prompt_tokens > info.block_size

    def _begin(self, idle_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers.append(loop.create_task(self._tick(idle_s)))
        if self._timeout_s is not None:
            left = self._requests[0].arrival_time + self._timeout_s - time.monotonic()
            self._timers.append(loop.call_later(max(left, 0.0), self._expire, self._timeout_s))

    def _expire(self, timeout_s: float) -> None:
        self.fail(timed_out(timeout_s))
        # A slow reader notices the failure late: abort the sequences now.
        for each in self._opened.values():
            each.close()

    def _open(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._opened[index] = self._engine.open(self._requests[index], self._notifier)

    def _outputs(self) -> dict[int, RequestOutput]:
        try:
            return {index: output for index, each in self._opened.items() if (output := each.take()) is not None}
        except GrammarError as error:
            raise self._refuse(str(error)) from error

    def _take(self, index: int, output: RequestOutput) -> Delta | None:
        if index == 0:
            self._cached_tokens = output.num_cached_tokens
            if output.prompt_logprobs is not None:
                self.prompt_logprobs = output.prompt_logprobs
        self._observe(index, len(output.new_token_ids))
        return self._assemblers[index].take(output)

    def _observe(self, index: int, num_tokens: int) -> None:
        if not num_tokens:
            return
        now, last = time.monotonic(), self._last[index]
        self._last[index] = now
        if last is None:
            if self.first_token_s is None:
                self.first_token_s = now - self._requests[index].arrival_time
            self._metrics.time_to_first_token.observe_since(self._requests[index].arrival_time)
            num_tokens -= 1
        elif num_tokens:
            self._metrics.inter_token_latency.observe((now - last) / num_tokens, num_tokens)

    def _count(self) -> None:
        for request, assembler, reason in zip(self._requests, self._assemblers, self.finish_reasons, strict=True):
            self._metrics.finished.count(reason)
            self._metrics.e2e_latency.observe_since(request.arrival_time)
            self._metrics.prompt_tokens.observe(request.num_prompt_tokens)
            self._metrics.generation_tokens.observe(assembler.num_tokens)

    async def _tick(self, idle_s: float) -> None:
        while True:
            await asyncio.sleep(idle_s)
            self._notifier.wake_reader()
