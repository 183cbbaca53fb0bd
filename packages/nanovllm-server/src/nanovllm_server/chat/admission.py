"""Limits the total number of sequences in all workers of a server."""

import asyncio
from collections.abc import Callable

from nanovllm_server.observability.shared_counters import SharedCounters
from nanovllm_server.protocol.error import ApiError, unavailable

# Index of the only counter in `AdmissionControl._counters`: active sequences.
_ACTIVE = 0


class AdmissionControl:
    """Admits sequences while all workers together have at most `capacity` sequences.

    shutdown_reason: why the worker refuses all requests; None while it admits requests.
    idle: set while this worker has no sequences.
    """

    def __init__(self, capacity: int, counters: SharedCounters):
        self.capacity = capacity
        self.idle = asyncio.Event()
        self.idle.set()
        self.shutdown_reason: str | None = None
        self._counters = counters.claim(1)
        # If this worker replaces a dead worker, the counters still have the dead worker's count.
        self._counters.clear()

    @property
    def num_active(self) -> int:
        """Number of sequences in all workers."""
        return int(self._counters.total(_ACTIVE))

    def admit(self, num_sequences: int) -> Callable[[], None]:
        """Admits sequences. Returns the function that releases these sequences. Raises ApiError (429, 503)."""
        if self.shutdown_reason is not None:
            raise unavailable(self.shutdown_reason, "draining")
        # Add before comparing: simultaneous admissions may refuse too many sequences, but never admit too many.
        self._counters.add(_ACTIVE, num_sequences)
        num_active = self.num_active
        if num_active > self.capacity:
            self._counters.add(_ACTIVE, -num_sequences)
            raise ApiError(
                429,
                f"the queue is full: {num_active - num_sequences} sequences of at most {self.capacity} are in the "
                "server; try again in a moment",
                error_type="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.idle.clear()

        def release() -> None:
            self._counters.add(_ACTIVE, -num_sequences)
            if not self._counters.own_value(_ACTIVE):
                self.idle.set()

        return release
