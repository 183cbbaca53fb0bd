"""The scheduler's state of requests that hold a row, as numpy columns, so that a step processes all rows at once."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.request_state import RequestState
from nanovllm_core.sampling_params import MAX_STOP_TOKENS
from nanovllm_core.scheduling.plan import ScheduledRows

Rows = NDArray[np.int64]

# No token has this id.
_NO_TOKEN = -1


class RequestColumns(NamedTuple):
    """Rows and, in the same order, their requests, request keys and lists of output tokens."""

    rows: Rows
    requests: list[RequestState]
    keys: list[int]
    output_ids: list[list[int]]


class DecodeBatch(NamedTuple):
    """Rows that decode together in consecutive steps, and the requests of these rows."""

    scheduled: ScheduledRows
    columns: RequestColumns


class RowTable:
    """Rows 0..num_rows-1. A request keeps its row until no step in flight refers to it.

    requests: the request of each row; None for a free row.
    running: bool [rows], whether the request may be scheduled.
    finished: bool [rows], whether the request has finished; its further tokens are discarded.
    The other columns are int64 [rows]:
    keys: request keys.
    num_prompt: tokens of the prompt.
    num_known: tokens that the host knows.
    num_tokens: num_known plus tokens sampled on the device that have not reached the host yet.
    num_computed: tokens computed by all scheduled steps; at most num_tokens.
    max_total: tokens at which the request finishes.
    capacity: tokens that the request's blocks hold.
    steps_in_flight: steps in flight that refer to the row.
    """

    def __init__(self, num_rows: int, eos_count: int):
        self.requests: list[RequestState | None] = [None] * num_rows
        numbers = np.zeros((8, num_rows), np.int64)
        (
            self.keys,
            self.num_known,
            self.num_tokens,
            self.num_computed,
            self.max_total,
            self.capacity,
            self.num_prompt,
            self.steps_in_flight,
        ) = numbers
        self.running, self.finished = np.zeros((2, num_rows), np.bool_)
        self._stop_ids = np.full((num_rows, MAX_STOP_TOKENS + eos_count), _NO_TOKEN, np.int64)
        self._most_stop_ids = 1
        # By token id, whether any request so far had it as a stop token. The last entry is False.
        self._may_stop = np.zeros(1, np.bool_)
        self._decode_batch: DecodeBatch | None = None
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    @property
    def num_running(self) -> int:
        """Number of requests that may be scheduled."""
        return int(np.count_nonzero(self.running))

    def assign(self, request: RequestState, num_computed: int, capacity: int) -> None:
        """Give `request` a free row. The caller has checked `num_free`."""
        request.row = row = self._free.pop()
        self.requests[row] = request
        self.keys[row] = request.key
        self.num_known[row] = self.num_tokens[row] = request.num_tokens
        self.num_computed[row] = num_computed
        self.max_total[row] = request.max_total_tokens
        self.capacity[row] = capacity
        self.num_prompt[row] = request.num_prompt_tokens
        self.running[row], self.finished[row] = True, False
        self._stop_ids[row] = _NO_TOKEN
        self._stop_ids[row, : len(request.stop_ids)] = tuple(request.stop_ids)
        self._most_stop_ids = max(self._most_stop_ids, len(request.stop_ids))
        self._record_stop_ids(request.stop_ids)
        self._decode_batch = None

    def free(self, request: RequestState) -> None:
        """Free the row of `request`. No step in flight may refer to it."""
        row = request.row
        self.requests[row] = None
        self.running[row] = False
        self._free.append(row)
        request.row = -1

    def requests_of(self, rows: Rows) -> list[RequestState]:
        """The requests of `rows`; free rows are skipped."""
        requests = self.requests
        return [request for row in rows.tolist() if (request := requests[row]) is not None]

    def columns(self, rows: Rows) -> RequestColumns:
        """The requests of `rows` with their keys and outputs. No row may be free."""
        requests = self.requests_of(rows)
        return RequestColumns(rows, requests, self.keys[rows].tolist(), [request.output_ids for request in requests])

    def decode_batch(self, rows: Rows) -> DecodeBatch:
        """The batch in which each of `rows` decodes one token; the same object while the requests stay the same."""
        if self._decode_batch is None or not np.array_equal(self._decode_batch.scheduled.rows, rows):
            count = len(rows)
            scheduled = ScheduledRows(rows, np.ones(count, np.int64), np.ones(count, np.bool_))
            self._decode_batch = DecodeBatch(scheduled, self.columns(rows))
        return self._decode_batch

    def stopped_by(self, rows: Rows, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether each token is a stop token of its row: bool [n]. rows: int64 [n]. tokens: int32 [n]."""
        if not self._may_stop.take(tokens, mode="clip").any():
            return np.zeros(len(tokens), np.bool_)
        return (self._stop_ids[rows, : self._most_stop_ids] == tokens[:, None]).any(1)

    def _record_stop_ids(self, stop_ids: Collection[int]) -> None:
        if not stop_ids:
            return
        missing = max(stop_ids) + 2 - len(self._may_stop)
        if missing > 0:
            self._may_stop = np.append(self._may_stop, np.zeros(missing, np.bool_))
        self._may_stop[list(stop_ids)] = True
