"""Requests that wait for a row, best score first.

This room must not know why one request is scored before another.
"""

import heapq
import itertools

from nanovllm_core.request import Request
from nanovllm_core.scheduling.policy import Score, waiting_score


class WaitingQueue:
    """A heap of requests. Removing one from the middle marks its entry; the mark is cleared away when it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[Score, int, Request]] = []
        self._entries: dict[int, int] = {}
        self._ticket = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, request: Request) -> None:
        """Add a request that is not in the queue."""
        ticket = next(self._ticket)
        self._entries[request.key] = ticket
        heapq.heappush(self._heap, (waiting_score(request), ticket, request))

    def peek(self) -> Request | None:
        """The next request, left where it is."""
        while self._heap:
            _, ticket, request = self._heap[0]
            if self._entries.get(request.key) == ticket:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> bool:
        """Take `request` out; False if it was not in the queue."""
        return self._entries.pop(request.key, None) is not None
