"""What the scheduler knows of the requests that hold a row, as columns: a step looks at all of them at once.

In steady decode nothing happens to a request but that its numbers grow; whoever needs more than that is found here by
comparing columns. This room must not know when or why a number changes.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.request import MAX_STOP_TOKENS, Request
from nanovllm_core.scheduling.plan import ScheduledRows

Rows = NDArray[np.int64]

# No token has this id.
_NO_TOKEN = -1


class Members(NamedTuple):
    """Rows, and of the request that holds each: itself, its key, and the list of its outputs."""

    rows: Rows
    requests: list[Request]
    keys: list[int]
    output_ids: list[list[int]]


class Cohort(NamedTuple):
    """Requests that decode together, step after step: what each of these steps schedules, and for whom."""

    scheduled: ScheduledRows
    members: Members


class RowTable:
    """Rows 0..num_rows-1. A row is its request's until no step in flight refers to it.

    requests: whose each row is. The rest are columns [rows], of bools:
    running: whether it may be scheduled. over: whether nobody wants its tokens any more.
    and of int64:
    keys: of the requests. num_prompt: tokens of the prompt. num_known: tokens that the host knows. num_tokens: with the
    placeholders of those that were sampled on the device and have not reached the host yet. num_computed: chases
    num_tokens. max_total: where it ends. capacity: tokens that its blocks hold. steps_in_flight: that refer to it.
    """

    def __init__(self, num_rows: int, eos_count: int):
        self.requests: list[Request | None] = [None] * num_rows
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
        self.running, self.over = np.zeros((2, num_rows), np.bool_)
        self._stop_ids = np.full((num_rows, MAX_STOP_TOKENS + eos_count), _NO_TOKEN, np.int64)
        self._most_stop_ids = 1
        # By token, whether it has ever stopped anybody; False for all from the last on.
        self._may_stop = np.zeros(1, np.bool_)
        self._cohort: Cohort | None = None
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that nobody holds."""
        return len(self._free)

    @property
    def num_running(self) -> int:
        """Requests that may be scheduled."""
        return int(np.count_nonzero(self.running))

    def take(self, request: Request, num_computed: int, capacity: int) -> None:
        """Give `request` a row, there being one."""
        request.row = row = self._free.pop()
        self.requests[row] = request
        self.keys[row] = request.key
        self.num_known[row] = self.num_tokens[row] = request.num_tokens
        self.num_computed[row] = num_computed
        self.max_total[row] = request.max_total_tokens
        self.capacity[row] = capacity
        self.num_prompt[row] = request.num_prompt_tokens
        self.running[row], self.over[row] = True, False
        self._stop_ids[row] = _NO_TOKEN
        self._stop_ids[row, : len(request.stop_ids)] = tuple(request.stop_ids)
        self._most_stop_ids = max(self._most_stop_ids, len(request.stop_ids))
        self._remember(request.stop_ids)
        self._cohort = None

    def give_back(self, request: Request) -> None:
        """Take the row of `request` back, which no step refers to."""
        row = request.row
        self.requests[row] = None
        self.running[row] = False
        self._free.append(row)
        request.row = -1

    def of(self, rows: Rows) -> list[Request]:
        """The requests of `rows`, each of which somebody holds."""
        requests = self.requests
        return [request for row in rows.tolist() if (request := requests[row]) is not None]

    def members(self, rows: Rows) -> Members:
        """Who holds `rows`, each of which somebody does."""
        requests = self.of(rows)
        return Members(rows, requests, self.keys[rows].tolist(), [request.output_ids for request in requests])

    def cohort(self, rows: Rows) -> Cohort:
        """Of `rows`, which all compute a token and sample one; the same object while they are the same requests'."""
        if self._cohort is None or not np.array_equal(self._cohort.scheduled.rows, rows):
            count = len(rows)
            scheduled = ScheduledRows(rows, np.ones(count, np.int64), np.ones(count, np.bool_))
            self._cohort = Cohort(scheduled, self.members(rows))
        return self._cohort

    def stopped_by(self, rows: Rows, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether a row's token is one that stops it: bool, like `rows` and `tokens`."""
        if not self._may_stop.take(tokens, mode="clip").any():
            return np.zeros(len(tokens), np.bool_)
        return (self._stop_ids[rows, : self._most_stop_ids] == tokens[:, None]).any(1)

    def _remember(self, stop_ids: Collection[int]) -> None:
        if not stop_ids:
            return
        missing = max(stop_ids) + 2 - len(self._may_stop)
        if missing > 0:
            self._may_stop = np.append(self._may_stop, np.zeros(missing, np.bool_))
        self._may_stop[list(stop_ids)] = True
