"""The queue of requests that wait for a row."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator

from nanovllm_core.request_state import RequestState
from nanovllm_core.scheduling.request_order import SortKey, admission_order

_EntryKey = tuple[SortKey, int]  # (admission order, insertion number)


class WaitingQueue:
    """Requests sorted by `admission_order`."""

    def __init__(self) -> None:
        self._entries: list[tuple[_EntryKey, RequestState]] = []
        self._entry_key_by_request_key: dict[int, _EntryKey] = {}
        self._insertion_numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: RequestState) -> bool:
        return request.key in self._entry_key_by_request_key

    def push(self, request: RequestState) -> None:
        """Add a request that is not in the queue."""
        # The insertion number makes the key unique, so that `remove` finds the entry by bisection.
        entry_key = (admission_order(request), next(self._insertion_numbers))
        self._entry_key_by_request_key[request.key] = entry_key
        insort(self._entries, (entry_key, request), key=lambda entry: entry[0])

    def peek(self, num_requests: int) -> Iterator[RequestState]:
        """The first `num_requests` requests, which stay in the queue."""
        return (request for _, request in self._entries[:num_requests])

    def remove(self, request: RequestState) -> bool:
        """Remove `request`. Returns False if the queue does not contain the request."""
        entry_key = self._entry_key_by_request_key.pop(request.key, None)
        if entry_key is None:
            return False
        del self._entries[bisect_left(self._entries, entry_key, key=lambda entry: entry[0])]
        return True
