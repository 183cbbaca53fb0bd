"""Histograms in shared memory."""

from bisect import bisect_left
from itertools import accumulate

from nanovllm_server.observability.shared_counters import SharedCounters


class Histogram:
    """Counts observations in buckets. Fast enough for one observation per token. Not thread-safe.

    bounds: finite upper bounds of the buckets. One more bucket counts values above all bounds.
    """

    def __init__(self, name: str, help_text: str, bounds: tuple[float, ...], counters: SharedCounters):
        self.name = name
        self.help_text = help_text
        self._bounds = bounds
        # Counters: one per bound, one for values above all bounds, one for the sum of all values.
        self._counters = counters.claim(len(bounds) + 2)
        self._sum_index = len(bounds) + 1

    def observe(self, value: float, count: int = 1) -> None:
        """Records `count` observations of `value`."""
        self._counters.add(bisect_left(self._bounds, value), count)
        self._counters.add(self._sum_index, value * count)

    def read_buckets_and_sum(self) -> tuple[list[tuple[str, float]], float]:
        """Returns (pairs of upper bound and cumulative count, sum of all values), both for all workers together."""
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        counts = accumulate(map(self._counters.total, range(len(bounds))))
        return list(zip(bounds, counts, strict=True)), self._counters.total(self._sum_index)
