"""Applies the results of a finished step: appends tokens, registers full blocks, finishes requests."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.outputs import RequestFailure, RequestFinish, RequestStart, StepOutputs, TokenLogprobs
from nanovllm_core.scheduling.lifecycle import RequestLifecycle
from nanovllm_core.scheduling.plan import RequestColumns, ScheduledRows, ScheduledStep, StepResults

# One call registers the blocks of this many output tokens in the prefix cache. One call per block takes twice as long.
COMMIT_INTERVAL_TOKENS = 64


class ResultApplier:
    """Applies step results to the requests of `lifecycle`."""

    def __init__(self, lifecycle: RequestLifecycle):
        self._lifecycle = lifecycle
        self._rows = lifecycle.rows
        self._prefix_caching = lifecycle.caches[0].prefix_caching
        self._block_size = lifecycle.caches[0].block_size

    def apply(self, step: ScheduledStep, results: StepResults) -> StepOutputs:
        """Apply the results of a finished step and return its outputs.

        Call in the order in which steps were scheduled.
        """
        rows, scheduled = self._rows, step.plan.scheduled
        rows.num_steps_in_flight[scheduled.rows] -= 1
        failures = self._finish_failed_requests(scheduled, results)
        # Requests may have finished after the step was scheduled: discard their results.
        is_finished = rows.is_finished[scheduled.rows]
        if self._prefix_caching:
            self._register_full_blocks(scheduled, step.num_computed_tokens, is_finished)
        prompt_logprobs = [
            (int(rows.keys[prompt_range.row]), logprobs)
            for prompt_range, logprobs in zip(step.plan.prompt_logprobs_ranges, results.prompt_logprobs, strict=True)
            if not rows.is_finished[prompt_range.row]
        ]
        logprobs = self._collect_logprobs(scheduled, results) if results.logprobs else []
        if step.decode_columns is not None and not is_finished.any():
            columns, tokens = step.decode_columns, results.tokens
        else:
            is_unfinished = ~is_finished[scheduled.is_sampled]
            columns = rows.columns_of(scheduled.rows[scheduled.is_sampled][is_unfinished])
            tokens = results.tokens[is_unfinished]
        token_list = tokens.tolist()
        starts, finishes = self._append_tokens(columns, tokens, token_list)
        for request in rows.requests_of(scheduled.rows[~rows.is_running[scheduled.rows]]):
            self._lifecycle.release_when_idle(request)
        return StepOutputs(columns.keys, token_list, logprobs, starts, finishes, failures, prompt_logprobs)

    def _register_full_blocks(
        self, scheduled: ScheduledRows, num_computed_tokens: NDArray[np.int64], is_finished: NDArray[np.bool_]
    ) -> None:
        """Register the blocks that a step filled."""
        block_size, num_tokens = self._block_size, scheduled.num_tokens
        interval = np.where(num_tokens == 1, max(COMMIT_INTERVAL_TOKENS, block_size), block_size)
        indices = np.flatnonzero((num_computed_tokens % interval < num_tokens) & ~is_finished)
        requests = self._rows.requests_of(scheduled.rows[indices])
        for request, num_computed in zip(requests, num_computed_tokens[indices].tolist(), strict=True):
            self._lifecycle.cache_of(request).commit(request, num_computed)

    def _finish_failed_requests(self, scheduled: ScheduledRows, results: StepResults) -> list[RequestFailure]:
        """Finish the requests whose grammar failed."""
        failures: list[RequestFailure] = []
        if results.grammar_failures:
            sampled_rows = scheduled.rows[scheduled.is_sampled]
            for index, reason in results.grammar_failures:
                if not self._rows.is_finished[sampled_rows[index]]:
                    (request,) = self._rows.requests_of(sampled_rows[index : index + 1])
                    failures.append(RequestFailure(request.key, reason))
                    self._lifecycle.finish(request)
        return failures

    def _collect_logprobs(self, scheduled: ScheduledRows, results: StepResults) -> list[tuple[int, TokenLogprobs]]:
        """Pairs (request key, log-probabilities) of unfinished requests."""
        sampled_rows = scheduled.rows[scheduled.is_sampled]
        keys, is_finished = self._rows.keys[sampled_rows].tolist(), self._rows.is_finished[sampled_rows]
        return [(keys[index], logprobs) for index, logprobs in results.logprobs if not is_finished[index]]

    def _append_tokens(
        self, columns: RequestColumns, tokens: NDArray[np.int32], token_list: list[int]
    ) -> tuple[list[RequestStart], list[RequestFinish]]:
        """Append one token to each request. Returns requests that got their first token, and finished requests."""
        rows, (row_indices, requests, keys, output_ids) = self._rows, columns
        # Append a token to every list without a Python loop. The deque discards the results of `append`.
        deque(map(list.append, output_ids, token_list), maxlen=0)
        num_host_tokens = rows.num_host_tokens[row_indices]
        first_token_indices = np.flatnonzero(num_host_tokens == rows.num_prompt_tokens[row_indices])
        num_host_tokens += 1
        rows.num_host_tokens[row_indices] = num_host_tokens
        is_stopped = rows.are_stop_tokens(row_indices, tokens)
        finished_indices = np.flatnonzero(is_stopped | (num_host_tokens >= rows.max_total_tokens[row_indices]))
        self._lifecycle.counters.num_generated_tokens += len(token_list)
        starts = [
            RequestStart(keys[index], requests[index].num_cached_tokens, requests[index].scheduled_time)
            for index in first_token_indices.tolist()
        ]
        finishes: list[RequestFinish] = []
        for index in finished_indices.tolist():
            finishes.append(
                RequestFinish(keys[index], "stop", token_list[index])
                if is_stopped[index]
                else RequestFinish(keys[index], "length", None)
            )
            self._lifecycle.finish(requests[index])
        return starts, finishes
