"""Runs the sequences of one answer on the engine. A client that reads slowly gets fewer and larger deltas."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from nanovllm_core import Engine, EngineDeadError, GrammarError, OpenRequest, PromptLogprobs, Request, RequestOutput
from nanovllm_server.chat.output_assembler import OutputAssembler
from nanovllm_server.observability.choice_metrics import ChoiceMetrics
from nanovllm_server.observability.metrics import Metrics
from nanovllm_server.protocol.error import timed_out
from nanovllm_server.protocol.response import Delta, Usage

# Interval at which `stream_deltas` yields empty lists, which keep idle streams alive.
KEEP_ALIVE_INTERVAL_S = 15.0


class OutputNotifier:
    """Wakes the reader of an answer when the engine has new outputs or has failed."""

    def __init__(self) -> None:
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._has_outputs = False

    def wake(self) -> None:
        """Wakes the reader for new outputs. The engine calls this method."""
        self._has_outputs = True
        self.wake_reader()

    def fail(self, reason: str) -> None:
        """Makes the reader's `wait` raise EngineDeadError. The engine client calls this method."""
        self.raise_in_reader(EngineDeadError(reason))

    def raise_in_reader(self, failure: Exception) -> None:
        """Makes the reader's `wait` raise `failure`."""
        self._failure = failure
        self.wake_reader()

    def wake_reader(self) -> None:
        """Makes the reader's `wait` return, even without new outputs."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Returns after new outputs or `wake_reader`. Raises the exception that `fail` or `raise_in_reader` has set."""
        if not self._has_outputs and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._has_outputs = False
        if self._failure is not None:
            raise self._failure


class Generation:
    """The answer to one HTTP request: `n` choices, each with an engine request and an output assembler.

    timeout_s: maximum time from the HTTP request's arrival to the end of the answer; None for no limit.
    make_grammar_error: makes the exception to raise if a grammar fails during generation. Its argument is the reason.
    prompt_logprobs: log-probabilities of the prompt; None before the first token, or if not requested.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        assemblers: Sequence[OutputAssembler],
        metrics: Metrics,
        *,
        timeout_s: float | None = None,
        make_grammar_error: Callable[[str], Exception] = GrammarError,
    ):
        self.prompt_logprobs: PromptLogprobs | None = None
        self._timeout_s = timeout_s
        self._engine = engine
        self._requests = requests
        self._assemblers = assemblers
        self._metrics = metrics
        self._make_grammar_error = make_grammar_error
        self._notifier = OutputNotifier()
        self._choice_metrics = [ChoiceMetrics(metrics, request) for request in requests]
        self._open_requests: dict[int, OpenRequest] = {}
        self._timers: list[asyncio.TimerHandle | asyncio.Task[None]] = []
        self._is_closed = False

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            self._requests[0].num_prompt_tokens,
            self._choice_metrics[0].num_cached_tokens,
            sum(assembler.num_tokens for assembler in self._assemblers),
            sum(assembler.num_reasoning_tokens for assembler in self._assemblers),
            sum(choice.num_accepted_drafts for choice in self._choice_metrics),
            sum(choice.num_rejected_drafts for choice in self._choice_metrics),
        )

    @property
    def first_token_s(self) -> float | None:
        """Seconds from arrival to the first token; None before the first token."""
        return min((choice.first_token_s for choice in self._choice_metrics if choice.first_token_s), default=None)

    @property
    def num_choices(self) -> int:
        """Number of choices."""
        return len(self._requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return self._requests[0].num_prompt_tokens

    @property
    def prompt_token_ids(self) -> NDArray[np.int32]:
        """Token ids of the prompt."""
        return self._requests[0].prompt_ids

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reason of each choice; "abort" for an unfinished choice."""
        return [assembler.finish_reason or "abort" for assembler in self._assemblers]

    def fail(self, failure: Exception) -> None:
        """Makes `stream_deltas` raise `failure`."""
        self._notifier.raise_in_reader(failure)

    async def stream_deltas(self, keep_alive_s: float = KEEP_ALIVE_INTERVAL_S) -> AsyncGenerator[list[Delta], None]:
        """Yields new deltas until every choice has ended. Also yields an empty list every `keep_alive_s` seconds.

        Raises EngineDeadError, ApiError (a timeout), the error of `make_grammar_error`, or the argument of `fail`.
        """
        self._start_timers(keep_alive_s)
        try:
            self._open_choices(range(1 if self._reuses_prompt_cache else len(self._assemblers)))
            num_unfinished = len(self._assemblers)
            while num_unfinished:
                await self._notifier.wait()
                outputs = self._take_outputs()
                if not outputs:
                    yield []
                    continue
                if len(self._open_requests) < len(self._assemblers):
                    self._open_choices(range(1, len(self._assemblers)))
                deltas: list[Delta] = []
                for index, output in outputs.items():
                    if self._assemblers[index].finish_reason is not None:
                        continue
                    delta = self._process_output(index, output)
                    if delta is not None:
                        deltas.append(delta)
                    if self._assemblers[index].finish_reason is not None:
                        self._choice_metrics[index].record_finish(self._assemblers[index].num_tokens)
                        num_unfinished -= 1
                        # The engine does not know stop strings: without `close`, the sequence would go on.
                        self._open_requests[index].close()
                if deltas:
                    yield deltas
        finally:
            self.close()

    def close(self) -> None:
        """Aborts the running sequences and updates the metrics. Further calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for timer in self._timers:
            timer.cancel()
        for request in self._open_requests.values():
            request.close()
        self._record_metrics()

    @property
    def _reuses_prompt_cache(self) -> bool:
        # After the first choice's first token, other choices find full blocks of the prompt in the prefix cache. Each
        # choice computes at least the last token, so a prompt of at most one block finds nothing.
        info = self._engine.info
        return info.prefix_caching and self._requests[0].num_prompt_tokens > info.block_size

    def _start_timers(self, keep_alive_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers.append(loop.create_task(self._wake_reader_regularly(keep_alive_s)))
        if self._timeout_s is not None:
            remaining_s = self._requests[0].arrival_time + self._timeout_s - time.monotonic()
            self._timers.append(loop.call_later(max(remaining_s, 0.0), self._expire, self._timeout_s))

    def _expire(self, timeout_s: float) -> None:
        self.fail(timed_out(timeout_s))
        # Aborts the sequences now, because a slow reader may notice the failure late.
        for request in self._open_requests.values():
            request.close()

    def _open_choices(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._choice_metrics[index].record_submission()
            self._open_requests[index] = self._engine.open_request(self._requests[index], self._notifier)

    def _take_outputs(self) -> dict[int, RequestOutput]:
        try:
            return {
                index: output
                for index, request in self._open_requests.items()
                if (output := request.take()) is not None
            }
        except GrammarError as error:
            raise self._make_grammar_error(str(error)) from error

    def _process_output(self, index: int, output: RequestOutput) -> Delta | None:
        if index == 0 and output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if self.first_token_s is None:
            self._metrics.prompt_tokens_total.add(0, self._requests[0].num_prompt_tokens)
        self._choice_metrics[index].record_output(output)
        return self._assemblers[index].process_output(output)

    def _record_metrics(self) -> None:
        for reason in self.finish_reasons:
            self._metrics.finish_reasons.increment(reason)
        if not any(choice.is_finished for choice in self._choice_metrics):
            return
        # The choices share one prompt.
        prompt_tokens, max_tokens = self._requests[0].num_prompt_tokens, self._requests[0].sampling.max_tokens
        self._metrics.prompt_tokens.observe(prompt_tokens)
        self._metrics.computed_prompt_tokens.observe(prompt_tokens - self._choice_metrics[0].num_cached_tokens)
        self._metrics.max_generation_tokens.observe(max(assembler.num_tokens for assembler in self._assemblers))
        self._metrics.num_choices.observe(len(self._requests))
        if max_tokens is not None:
            self._metrics.max_tokens.observe(max_tokens)

    async def _wake_reader_regularly(self, keep_alive_s: float) -> None:
        while True:
            await asyncio.sleep(keep_alive_s)
            self._notifier.wake_reader()
