"""Numpy columns with the scheduler's state of running requests. Each running request has a row."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.request_state import RequestState
from nanovllm_core.sampling_params import MAX_STOP_TOKENS
from nanovllm_core.scheduling.plan import RequestColumns, RowIndices, ScheduledRows

_NO_TOKEN = -1


class RowTable:
    """A table with rows 0..num_rows-1. A request keeps its row until no step in flight refers to the row.

    Each group of requests has num_rows / num_groups consecutive rows (see `Scheduler`).

    requests: the request of each row; None for a free row.
    is_running: bool [rows], whether the request may be scheduled.
    is_finished: bool [rows], whether the request has finished.
    can_draft: bool [rows], whether the request may have drafts; False for a request with penalties. Penalties depend on
        all earlier tokens, so the token after a draft cannot be sampled before the draft is verified.

    The other columns are int64 [rows]. keys: request keys. num_prompt_tokens, max_total_tokens: see `RequestState`.
    num_host_tokens: tokens that have reached the host.
    num_tokens: tokens on the host plus tokens that steps in flight will sample, assuming that they reject no draft.
    num_computed_tokens: tokens that are computed once all steps in flight have finished, if these steps reject no
        draft; at most num_tokens.
    capacity: number of tokens for which the request's blocks have space.
    num_steps_in_flight: number of unfinished steps that compute the row.
    draft_lag: upper bound on the computed tokens that the proposer of drafts has not processed yet. -1 if the last
        scheduled step proposes drafts for the request: the proposer then has also processed the newly sampled token.
    num_proposed, first_draft_ids: number of drafts that the last finished step proposed, and the first of these drafts.
    draft_trials, draft_successes: float64 [rows], numbers of tested and of accepted drafts. Older drafts weigh less. A
        step tests drafts up to the first wrong draft.
    """

    def __init__(self, num_rows: int, num_eos_tokens: int, num_groups: int = 1):
        self.requests: list[RequestState | None] = [None] * num_rows
        self.keys, self.num_prompt_tokens, self.num_host_tokens, self.num_tokens = np.zeros((4, num_rows), np.int64)
        self.num_computed_tokens, self.max_total_tokens = np.zeros((2, num_rows), np.int64)
        self.capacity, self.num_steps_in_flight, self.draft_lag = np.zeros((3, num_rows), np.int64)
        self.is_running, self.is_finished, self.can_draft = np.zeros((3, num_rows), np.bool_)
        self.num_proposed, self.first_draft_ids = np.zeros((2, num_rows), np.int64)
        self.draft_trials, self.draft_successes = np.zeros((2, num_rows))
        self._stop_ids = np.full((num_rows, MAX_STOP_TOKENS + num_eos_tokens), _NO_TOKEN, np.int64)
        # Largest number of stop tokens of any request so far.
        self._max_stop_ids = 1
        # Entry i: whether token id i was a stop id of any request so far. The last entry is False, and also stands for
        # all larger ids.
        self._is_any_stop_id = np.zeros(1, np.bool_)
        self._last_decode_batch: tuple[ScheduledRows, RequestColumns] | None = None
        self._rows_per_group = num_rows // num_groups
        self._free_rows_by_group = [
            list(range(first_row + self._rows_per_group - 1, first_row - 1, -1))
            for first_row in range(0, num_rows, self._rows_per_group)
        ]

    @property
    def num_free_rows(self) -> int:
        """The number of rows without a request."""
        return sum(map(len, self._free_rows_by_group))

    @property
    def num_running(self) -> int:
        """The number of requests that may be scheduled."""
        return int(np.count_nonzero(self.is_running))

    def group_of(self, row: int) -> int:
        """The group whose requests use `row`."""
        return row // self._rows_per_group

    def split_by_group(self, rows: RowIndices) -> list[RowIndices]:
        """Split `rows`, which are in ascending order, by group."""
        num_groups = len(self._free_rows_by_group)
        if num_groups == 1:
            return [rows]
        return np.split(rows, np.searchsorted(rows, [group * self._rows_per_group for group in range(1, num_groups)]))

    def count_free_rows(self, group: int) -> int:
        """The number of rows of `group` without a request."""
        return len(self._free_rows_by_group[group])

    def running_rows(self, group: int) -> RowIndices:
        """The rows of requests of `group` that may be scheduled."""
        first_row = group * self._rows_per_group
        return first_row + np.flatnonzero(self.is_running[first_row : first_row + self._rows_per_group])

    def count_unreleased(self, group: int) -> int:
        """The number of preempted and finished requests of `group` that still hold a row and blocks."""
        return self._rows_per_group - self.count_free_rows(group) - len(self.running_rows(group))

    def assign(self, request: RequestState, group: int, num_computed_tokens: int, capacity: int) -> None:
        """Give `request` a free row of `group`. The caller checks `count_free_rows`."""
        request.row = row = self._free_rows_by_group[group].pop()
        self.requests[row] = request
        self.keys[row] = request.key
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_host_tokens[row] = self.num_tokens[row] = request.num_tokens
        self.num_computed_tokens[row] = num_computed_tokens
        self.max_total_tokens[row] = request.max_total_tokens
        self.capacity[row] = capacity
        self.is_running[row], self.is_finished[row] = True, False
        self.can_draft[row] = not request.sampling.has_penalties
        self.num_proposed[row] = self.draft_trials[row] = self.draft_successes[row] = 0
        self._stop_ids[row] = _NO_TOKEN
        self._stop_ids[row, : len(request.stop_ids)] = tuple(request.stop_ids)
        self._max_stop_ids = max(self._max_stop_ids, len(request.stop_ids))
        self._record_stop_ids(request.stop_ids)
        self._last_decode_batch = None

    def release(self, request: RequestState) -> None:
        """Free the row of `request`. No step in flight may refer to the row."""
        row = request.row
        self.requests[row] = None
        self.is_running[row] = False
        self._free_rows_by_group[self.group_of(row)].append(row)
        request.row = -1

    def requests_of(self, rows: RowIndices) -> list[RequestState]:
        """The requests in `rows`. Free rows are skipped."""
        requests = self.requests
        return [request for row in rows.tolist() if (request := requests[row]) is not None]

    def columns_of(self, rows: RowIndices) -> RequestColumns:
        """The columns of `rows`. No row may be free."""
        requests = self.requests_of(rows)
        return RequestColumns(rows, requests, self.keys[rows].tolist(), [request.output_ids for request in requests])

    def decode_batch(self, rows: RowIndices) -> tuple[ScheduledRows, RequestColumns]:
        """The batch in which each of `rows` decodes one token.

        Consecutive calls with equal `rows` return the same batch.
        """
        if self._last_decode_batch is None or not np.array_equal(self._last_decode_batch[0].rows, rows):
            scheduled = ScheduledRows(rows, np.ones(len(rows), np.int64), np.ones(len(rows), np.bool_))
            self._last_decode_batch = scheduled, self.columns_of(rows)
        return self._last_decode_batch

    def draft_batch(self, rows: RowIndices, num_drafts: NDArray[np.int64]) -> tuple[ScheduledRows, RequestColumns]:
        """The batch in which rows[i] decodes with num_drafts[i] drafts, for each i."""
        order = np.argsort(num_drafts > 0, kind="stable")
        rows, num_tokens = rows[order], 1 + num_drafts[order]
        return ScheduledRows(rows, num_tokens, np.ones(len(rows), np.bool_)), self.columns_of(rows)

    def are_stop_tokens(self, rows: RowIndices, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether `tokens[i]` is a stop token of the request in `rows[i]`. tokens: int32 [n]."""
        if not self._is_any_stop_id.take(tokens, mode="clip").any():
            return np.zeros(len(tokens), np.bool_)
        return (self._stop_ids[rows, : self._max_stop_ids] == tokens[:, None]).any(1)

    def _record_stop_ids(self, stop_ids: Collection[int]) -> None:
        if not stop_ids:
            return
        num_missing_entries = max(stop_ids) + 2 - len(self._is_any_stop_id)
        if num_missing_entries > 0:
            self._is_any_stop_id = np.append(self._is_any_stop_id, np.zeros(num_missing_entries, np.bool_))
        self._is_any_stop_id[list(stop_ids)] = True
