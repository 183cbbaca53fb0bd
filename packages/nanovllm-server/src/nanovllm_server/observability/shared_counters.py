"""Counters that the workers of one server share: each worker writes its own row, and all workers read all rows.

They lie in shared memory without locks: a number has one writer, and sums are computed when they are read. The counts
of a worker that died remain.
"""

import multiprocessing
from collections.abc import Hashable, Iterator, Sequence
from ctypes import Array, c_double
from typing import Generic, TypeVar

# Counters in a worker's row, which takes 32 KiB.
COLUMNS = 4096

K = TypeVar("K", bound=Hashable)


def allocate_counters(num_workers: int) -> "Array[c_double]":
    """Memory for the counters of `num_workers` workers, all zero; it is passed to their processes as an argument."""
    return multiprocessing.get_context("spawn").RawArray(c_double, num_workers * COLUMNS)


class CounterGroup:
    """Some columns of the counters. own: this worker's row. rows: the rows of all workers. For one thread only."""

    def __init__(self, own: "memoryview[float]", rows: "Sequence[memoryview[float]]"):
        self._own = own
        self._rows = rows

    def add(self, index: int, value: float) -> None:
        """Add `value` to this worker's counter `index`."""
        self._own[index] += value

    def clear(self) -> None:
        """Set this worker's counters to zero."""
        for index in range(len(self._own)):
            self._own[index] = 0.0

    def own(self, index: int) -> float:
        """The counter of this worker."""
        return self._own[index]

    def total(self, index: int) -> float:
        """The sum of the counter over all workers."""
        return sum(row[index] for row in self._rows)


class SharedCounters:
    """All counters, seen by one worker. All workers must claim the same columns in the same order.

    own: index of this worker's row.
    """

    def __init__(self, memory: "Array[c_double]", own: int = 0):
        cells = memoryview(memory).cast("B").cast("d")
        self._rows = [cells[start : start + COLUMNS] for start in range(0, len(cells), COLUMNS)]
        self._own = own
        self._next = 0

    def claim(self, count: int) -> CounterGroup:
        """Reserves the next `count` columns."""
        begin, self._next = self._next, self._next + count
        if self._next > COLUMNS:
            raise ValueError(f"a worker has {COLUMNS} counters, too few for {self._next}")
        rows = [row[begin : self._next] for row in self._rows]
        return CounterGroup(rows[self._own], rows)


class KeyedCounters(Generic[K]):
    """One counter for each of a fixed set of keys, summed over all workers."""

    def __init__(self, counters: SharedCounters, keys: Sequence[K]):
        self._columns = {key: index for index, key in enumerate(keys)}
        self._counters = counters.claim(len(keys))

    def count(self, key: K) -> None:
        """Count one more."""
        self._counters.add(self._columns[key], 1)

    def __getitem__(self, key: K) -> int:
        return int(self._counters.total(self._columns[key]))

    def items(self) -> Iterator[tuple[K, int]]:
        """All keys and their counts."""
        for key, index in self._columns.items():
            yield key, int(self._counters.total(index))
