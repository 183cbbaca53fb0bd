"""Limits the number of sequences in the server, over all workers."""

import asyncio
from collections.abc import Callable

from nanovllm_server.observability.shared_counters import SharedCounters
from nanovllm_server.protocol.error import ApiError, unavailable


class AdmissionControl:
    """Counts the sequences in the server, over all workers, and refuses more than `capacity`.

    closed: once set, the reason for which all requests are refused.
    empty: set while this worker has no sequences.
    """

    def __init__(self, capacity: int, counters: SharedCounters):
        self.capacity = capacity
        self.empty = asyncio.Event()
        self.empty.set()
        self.closed: str | None = None
        self._active = counters.claim(1)
        # If this worker replaces a dead one, the sequences of the dead one are gone.
        self._active.clear()

    @property
    def active(self) -> int:
        """Sequences in the server."""
        return int(self._active.total(0))

    def admit(self, num_sequences: int) -> Callable[[], None]:
        """Count in that many sequences. Returns a function that counts them out. Raises ApiError (429, 503)."""
        if self.closed is not None:
            raise unavailable(self.closed, "draining")
        # First taken, then looked at: two workers that do so at once may both refuse, but never both admit too many.
        self._active.add(0, num_sequences)
        active = self.active
        if active > self.capacity:
            self._active.add(0, -num_sequences)
            raise ApiError(
                429,
                f"the queue is full: {active - num_sequences} sequences of at most {self.capacity} are in the server; "
                "try again in a moment",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.empty.clear()

        def leave() -> None:
            self._active.add(0, -num_sequences)
            if not self._active.own(0):
                self.empty.set()

        return leave
