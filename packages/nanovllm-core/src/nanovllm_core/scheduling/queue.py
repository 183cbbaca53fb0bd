"""The queue of requests that wait for a row, ordered by `waiting_score`."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator

from nanovllm_core.request_state import RequestState
from nanovllm_core.scheduling.policy import Score, waiting_score

_Place = tuple[Score, int]


class WaitingQueue:
    """A sorted list of requests. An insertion into thousands of entries takes about a microsecond."""

    def __init__(self) -> None:
        self._entries: list[tuple[_Place, RequestState]] = []
        self._places: dict[int, _Place] = {}
        self._ticket = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: RequestState) -> bool:
        return request.key in self._places

    def push(self, request: RequestState) -> None:
        """Add a request that is not in the queue."""
        # The ticket is unique, so that requests are never compared.
        place = self._places[request.key] = (waiting_score(request), next(self._ticket))
        insort(self._entries, (place, request), key=lambda entry: entry[0])

    def first(self, count: int) -> Iterator[RequestState]:
        """The first `count` requests. They stay in the queue."""
        return (request for _, request in self._entries[:count])

    def remove(self, request: RequestState) -> bool:
        """Remove `request`. Returns False if it was not in the queue."""
        place = self._places.pop(request.key, None)
        if place is None:
            return False
        del self._entries[bisect_left(self._entries, place, key=lambda entry: entry[0])]
        return True
