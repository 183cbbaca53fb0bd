"""Applies the results of a finished step: appends tokens, registers full blocks, finishes requests."""

from collections import Counter, deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.outputs import DraftTotals, RequestFailure, RequestFinish, RequestStart, StepOutputs, TokenLogprobs
from nanovllm_core.scheduling.drafting import DraftPlanner
from nanovllm_core.scheduling.lifecycle import RequestLifecycle
from nanovllm_core.scheduling.plan import RequestColumns, ScheduledRows, ScheduledStep, StepResults

# One call registers the blocks of this many output tokens in the prefix cache. One call per block takes twice as long.
COMMIT_INTERVAL_TOKENS = 64


class NewTokens(NamedTuple):
    """The new tokens of a step's unfinished requests.

    tokens: int32 [m], all tokens of the first request, then all tokens of the second request, and so on.
    num_tokens: int64 [n], number of tokens of each request.
    """

    columns: RequestColumns
    tokens: NDArray[np.int32]
    num_tokens: NDArray[np.int64]


class ResultApplier:
    """Applies step results to the requests of `lifecycle`. draft_planner: None without speculation."""

    def __init__(self, lifecycle: RequestLifecycle, draft_planner: DraftPlanner | None = None):
        self._lifecycle = lifecycle
        self._draft_planner = draft_planner
        self._rows = lifecycle.rows
        self._prefix_caching = lifecycle.caches[0].prefix_caching
        self._block_size = lifecycle.caches[0].block_size

    def apply(self, step: ScheduledStep, results: StepResults) -> StepOutputs:
        """Apply a finished step's results, and return its outputs. Call in the order in which steps were scheduled."""
        rows, scheduled = self._rows, step.plan.scheduled
        rows.num_steps_in_flight[scheduled.rows] -= 1
        if self._draft_planner is not None:
            self._subtract_rejected_drafts(step, results)
        failures = self._finish_failed_requests(scheduled, results)
        # Requests may have finished after the step was scheduled: discard their results.
        prompt_logprobs = [
            (int(rows.keys[prompt_range.row]), logprobs)
            for prompt_range, logprobs in zip(step.plan.prompt_logprobs_ranges, results.prompt_logprobs, strict=True)
            if not rows.is_finished[prompt_range.row]
        ]
        new_tokens, stopped_indices = self._cut_at_stop_tokens(self._select_new_tokens(step, results))
        draft_totals = self._count_drafts(step, results, new_tokens.num_tokens)
        keys = new_tokens.columns.keys
        if len(new_tokens.tokens) > len(keys):
            keys = np.repeat(keys, new_tokens.num_tokens).tolist()
        logprobs = self._collect_logprobs(scheduled, results, keys) if results.logprobs else []
        starts, finishes = self._append_tokens(new_tokens, stopped_indices)
        if self._prefix_caching:
            self._register_full_blocks(step, results)
        for request in rows.requests_of(scheduled.rows[~rows.is_running[scheduled.rows]]):
            self._lifecycle.release_if_unused(request)
        tokens = new_tokens.tokens.tolist()
        return StepOutputs(keys, tokens, logprobs, starts, finishes, failures, prompt_logprobs, draft_totals)

    def _subtract_rejected_drafts(self, step: ScheduledStep, results: StepResults) -> None:
        """Subtract rejected drafts from the numbers of tokens."""
        if results.drafts is None:
            if results.tokens.size:
                raise ValueError("with speculation, the results of a sampling step must have `drafts`")
            return
        rows, scheduled = self._rows, step.plan.scheduled
        sampled_rows = scheduled.rows[scheduled.is_sampled]
        num_rejected = step.num_drafts + 1 - results.num_tokens
        rows.num_tokens[sampled_rows] -= num_rejected
        rows.num_computed_tokens[sampled_rows] -= num_rejected

    def _count_drafts(
        self, step: ScheduledStep, results: StepResults, num_new_tokens: NDArray[np.int64]
    ) -> list[DraftTotals]:
        """Count the drafts of unfinished requests, and let the planner learn from the step.

        num_new_tokens: int64, number of output tokens of each unfinished request, including a stop token.
        Returns the totals of unfinished requests for which the step verified drafts.
        """
        planner, scheduled = self._draft_planner, step.plan.scheduled
        if planner is None or results.drafts is None:
            return []
        sampled_rows = scheduled.rows[scheduled.is_sampled]
        num_output_tokens = np.zeros_like(results.num_tokens)
        num_output_tokens[~self._rows.is_finished[sampled_rows]] = num_new_tokens
        first_tokens = results.tokens[np.cumsum(results.num_tokens) - results.num_tokens]
        num_proposed = results.drafts.num_proposed * step.has_proposals[scheduled.is_sampled]
        drafts = results.drafts._replace(num_proposed=num_proposed)
        num_verified, num_accepted = planner.observe(
            sampled_rows, step.num_drafts, first_tokens, num_output_tokens, drafts
        )
        totals: list[DraftTotals] = []
        for index in np.flatnonzero(num_verified).tolist():
            (request,) = self._rows.requests_of(sampled_rows[index : index + 1])
            request.num_accepted_drafts += int(num_accepted[index])
            request.num_rejected_drafts += int(num_verified[index] - num_accepted[index])
            totals.append(DraftTotals(request.key, request.num_accepted_drafts, request.num_rejected_drafts))
        return totals

    def _register_full_blocks(self, step: ScheduledStep, results: StepResults) -> None:
        """Register the blocks that a step filled. `release_if_unused` registers the blocks of finished requests."""
        rows, block_size, scheduled = self._rows, self._block_size, step.plan.scheduled
        # A token that this step sampled has no cache entry yet. The next step computes the entry.
        num_computed_tokens = np.where(
            scheduled.is_sampled, rows.num_host_tokens[scheduled.rows] - 1, step.num_computed_tokens
        )
        num_tokens = results.num_tokens if step.plan.shape.has_drafts else scheduled.num_tokens
        is_decode = step.decode_columns is not None
        interval = np.where(is_decode | (num_tokens == 1), max(COMMIT_INTERVAL_TOKENS, block_size), block_size)
        is_due = (num_computed_tokens % interval < num_tokens) & ~rows.is_finished[scheduled.rows]
        indices = np.flatnonzero(is_due)
        requests = rows.requests_of(scheduled.rows[indices])
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

    def _select_new_tokens(self, step: ScheduledStep, results: StepResults) -> NewTokens:
        """The new tokens of the unfinished requests."""
        num_tokens, scheduled = results.num_tokens, step.plan.scheduled
        is_finished = self._rows.is_finished[scheduled.rows]
        if step.decode_columns is not None and not is_finished.any():
            return NewTokens(step.decode_columns, results.tokens, num_tokens)
        is_unfinished = ~is_finished[scheduled.is_sampled]
        columns = self._rows.columns_of(scheduled.rows[scheduled.is_sampled][is_unfinished])
        tokens = results.tokens[np.repeat(is_unfinished, num_tokens)]
        return NewTokens(columns, tokens, num_tokens[is_unfinished])

    def _cut_at_stop_tokens(self, new_tokens: NewTokens) -> tuple[NewTokens, NDArray[np.int64]]:
        """Drop tokens after a request's first stop token. Returns the other tokens and indices of stopped requests."""
        columns, tokens, num_tokens = new_tokens
        is_stop = self._rows.are_stop_tokens(np.repeat(columns.rows, num_tokens), tokens)
        if not is_stop.any():
            return new_tokens, np.zeros(0, np.int64)
        ends = np.cumsum(num_tokens)
        firsts = ends - num_tokens
        indices = np.arange(len(tokens))
        first_stops = np.minimum.reduceat(np.where(is_stop, indices, len(tokens)), firsts)
        num_kept = np.minimum(first_stops + 1, ends) - firsts
        is_kept = indices - np.repeat(firsts, num_tokens) < np.repeat(num_kept, num_tokens)
        return NewTokens(columns, tokens[is_kept], num_kept), np.flatnonzero(first_stops < ends)

    def _collect_logprobs(
        self, scheduled: ScheduledRows, results: StepResults, output_keys: list[int]
    ) -> list[tuple[int, TokenLogprobs]]:
        """Pairs (request key, log-probabilities) of the new tokens. output_keys: the request key of each new token."""
        keys = np.repeat(self._rows.keys[scheduled.rows[scheduled.is_sampled]], results.num_tokens)
        num_left = Counter(output_keys)
        collected: list[tuple[int, TokenLogprobs]] = []
        for index, logprobs in results.logprobs:
            key = int(keys[index])
            if num_left[key] > 0:
                num_left[key] -= 1
                collected.append((key, logprobs))
        return collected

    def _append_tokens(
        self, new_tokens: NewTokens, stopped_indices: NDArray[np.int64]
    ) -> tuple[list[RequestStart], list[RequestFinish]]:
        """Append the tokens to the requests. stopped_indices: requests whose last token is a stop token."""
        rows, ((row_indices, requests, keys, output_ids), tokens, num_tokens) = self._rows, new_tokens
        token_list = tokens.tolist()
        if len(token_list) == len(output_ids):
            # Append a token to every list without a Python loop. The deque discards the results of `append`.
            deque(map(list.append, output_ids, token_list), maxlen=0)
        else:
            ends = np.cumsum(num_tokens)
            for ids, first, end in zip(output_ids, (ends - num_tokens).tolist(), ends.tolist(), strict=True):
                ids += token_list[first:end]
        num_host_tokens = rows.num_host_tokens[row_indices]
        first_token_indices = np.flatnonzero(num_host_tokens == rows.num_prompt_tokens[row_indices])
        num_host_tokens += num_tokens
        rows.num_host_tokens[row_indices] = num_host_tokens
        is_finished = num_host_tokens >= rows.max_total_tokens[row_indices]
        is_finished[stopped_indices] = True
        self._lifecycle.counters.num_generated_tokens += len(token_list)
        starts = [
            RequestStart(keys[index], requests[index].num_cached_tokens, requests[index].scheduled_time)
            for index in first_token_indices.tolist()
        ]
        stopped, finishes = set(stopped_indices.tolist()), list[RequestFinish]()
        for index in np.flatnonzero(is_finished).tolist():
            request = requests[index]
            stop_token = request.output_ids[-1] if index in stopped else None
            finishes.append(RequestFinish(keys[index], "length" if stop_token is None else "stop", stop_token))
            self._lifecycle.finish(request)
        return starts, finishes
