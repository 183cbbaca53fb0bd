"""Applies the results of a finished step: appends tokens, registers full blocks, finishes requests."""

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.outputs import FinishReason, StepOutputs, TokenLogprobs
from nanovllm_core.scheduling.lifecycle import Lifecycle
from nanovllm_core.scheduling.plan import ScheduledRows, StepPlan, StepResults
from nanovllm_core.scheduling.rows import DecodeBatch, RequestColumns, Rows
from nanovllm_core.scheduling.step_time import StepWork

# The blocks of this many output tokens are registered together: registering 16-token blocks singly takes twice as long.
COMMITTED_TOKENS = 64


class ScheduledStep(NamedTuple):
    """A step in flight.

    plan: what the runner executes.
    ends: int64 [n], tokens of each row that are computed after the step.
    decode_batch: the rows and their requests if every row decodes; else None.
    work: amounts from which the step's time is predicted.
    expected_s: predicted time in seconds; 0 for a step without prompts.
    """

    plan: StepPlan
    ends: NDArray[np.int64]
    decode_batch: DecodeBatch | None
    work: StepWork
    expected_s: float


class ResultApplier:
    """Applies step results to the requests of `lifecycle`."""

    def __init__(self, lifecycle: Lifecycle):
        self._lifecycle = lifecycle
        self._cache = lifecycle.cache
        self._rows = lifecycle.rows

    def apply(self, step: ScheduledStep, results: StepResults) -> StepOutputs:
        """Apply the results of a finished step, in scheduling order. Returns the outputs for its requests."""
        rows = self._rows
        scheduled, num_tokens, samples = step.plan.scheduled
        rows.steps_in_flight[scheduled] -= 1
        failures = self._finish_failed(step.plan.scheduled, results)
        finished = rows.finished[scheduled]
        if self._cache.prefix_caching:
            self._register_full_blocks(scheduled, num_tokens, step.ends, finished)
        prompt_logprobs = [
            (int(rows.keys[part.row]), logprobs)
            for part, logprobs in zip(step.plan.prompt_logprobs, results.prompt_logprobs, strict=True)
            if not rows.finished[part.row]
        ]
        logprobs = self._logprobs(step.plan.scheduled, results) if results.logprobs else []
        if step.decode_batch is not None and not finished.any():
            columns, tokens = step.decode_batch.columns, results.tokens
        else:
            wanted = ~finished[samples]
            columns, tokens = rows.columns(scheduled[samples][wanted]), results.tokens[wanted]
        token_list = tokens.tolist()
        begins, ends = self._append_tokens(columns, tokens, token_list)
        # Rows of requests that finished in this step may be free already: `requests_of` skips them.
        for request in rows.requests_of(scheduled[~rows.running[scheduled]]):
            self._lifecycle.release_when_idle(request)
        return StepOutputs(columns.keys, token_list, logprobs, begins, ends, failures, prompt_logprobs)

    def _register_full_blocks(
        self, scheduled: Rows, num_tokens: NDArray[np.int64], ends: NDArray[np.int64], finished: NDArray[np.bool_]
    ) -> None:
        """Register the blocks that a step filled: those of prompts at once, those of outputs a few at a time."""
        size = self._cache.block_size
        interval = np.where(num_tokens == 1, max(COMMITTED_TOKENS, size), size)
        filled = np.flatnonzero((ends % interval < num_tokens) & ~finished)
        for request, end in zip(self._rows.requests_of(scheduled[filled]), ends[filled].tolist(), strict=True):
            self._cache.commit(request, end)

    def _finish_failed(self, scheduled: ScheduledRows, results: StepResults) -> list[tuple[int, str]]:
        """Finish the requests whose grammar failed, and return their keys with the reasons."""
        failures: list[tuple[int, str]] = []
        if results.failed:
            sampled = scheduled.rows[scheduled.samples]
            for index, reason in results.failed:
                if not self._rows.finished[sampled[index]]:
                    (request,) = self._rows.requests_of(sampled[index : index + 1])
                    failures.append((request.key, reason))
                    self._lifecycle.finish(request)
        return failures

    def _logprobs(self, scheduled: ScheduledRows, results: StepResults) -> list[tuple[int, TokenLogprobs]]:
        rows = self._rows
        sampled = scheduled.rows[scheduled.samples]
        keys, finished = rows.keys[sampled].tolist(), rows.finished[sampled]
        return [(keys[index], logprobs) for index, logprobs in results.logprobs if not finished[index]]

    def _append_tokens(
        self, columns: RequestColumns, tokens: NDArray[np.int32], token_list: list[int]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, FinishReason, int | None]]]:
        """Append one token to each request of `columns`. Returns `begins` and `ends` as in `StepOutputs`.

        token_list: `tokens` as a list.
        """
        rows, (table_rows, requests, keys, output_ids) = self._rows, columns
        # This appends to every list without a Python loop; the deque discards the results of append.
        deque(map(list.append, output_ids, token_list), maxlen=0)
        num_known = rows.num_known[table_rows]
        first = np.flatnonzero(num_known == rows.num_prompt[table_rows])
        num_known += 1
        rows.num_known[table_rows] = num_known
        stopped = rows.stopped_by(table_rows, tokens)
        ended = np.flatnonzero(stopped | (num_known >= rows.max_total[table_rows]))
        self._lifecycle.counters.generation_tokens += len(token_list)
        begins = [(keys[index], requests[index].num_cached_tokens) for index in first.tolist()]
        ends: list[tuple[int, FinishReason, int | None]] = []
        for index in ended.tolist():
            ends.append((keys[index], "stop", token_list[index]) if stopped[index] else (keys[index], "length", None))
            self._lifecycle.finish(requests[index])
        return begins, ends
