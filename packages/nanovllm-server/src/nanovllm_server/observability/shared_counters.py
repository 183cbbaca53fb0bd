"""Counters in shared memory without locks: each worker writes its own row, and readers sum over all rows."""

import multiprocessing
from collections.abc import Hashable, Iterator, Sequence
from ctypes import Array, c_double
from typing import Generic, TypeVar

# Maximum number of counters per worker.
MAX_COUNTERS = 1 << 14

Key = TypeVar("Key", bound=Hashable)


def allocate_counters(num_workers: int) -> "Array[c_double]":
    """Allocates counters, all zero. The parent passes the memory to each worker's process."""
    return multiprocessing.get_context("spawn").RawArray(c_double, num_workers * MAX_COUNTERS)


class CounterGroup:
    """Consecutive counters of one object, for all workers. Not thread-safe."""

    def __init__(self, own_row: "memoryview[float]", rows: "Sequence[memoryview[float]]"):
        self._own_row = own_row
        self._rows = rows

    def add(self, index: int, value: float) -> None:
        """Adds `value` to this worker's counter `index`."""
        self._own_row[index] += value

    def clear(self) -> None:
        """Sets this worker's counters to zero."""
        for index in range(len(self._own_row)):
            self._own_row[index] = 0.0

    def own_value(self, index: int) -> float:
        """Returns the value of this worker's counter `index`."""
        return self._own_row[index]

    def values_by_worker(self, index: int) -> list[float]:
        """Returns each worker's value of counter `index`."""
        return [row[index] for row in self._rows]

    def total(self, index: int) -> float:
        """Returns the sum of counter `index` over all workers."""
        return sum(self.values_by_worker(index))


class SharedCounters:
    """Gives one worker access to all counters. All workers must call `claim` with the same sizes in the same order."""

    def __init__(self, memory: "Array[c_double]", worker_index: int = 0):
        cells = memoryview(memory).cast("B").cast("d")
        self._rows = [cells[start : start + MAX_COUNTERS] for start in range(0, len(cells), MAX_COUNTERS)]
        self._worker_index = worker_index
        self.num_claimed = 0

    def claim(self, num_counters: int) -> CounterGroup:
        """Reserves the next `num_counters` counters. Raises ValueError if too few are left."""
        begin, end = self.num_claimed, self.num_claimed + num_counters
        if end > MAX_COUNTERS:
            raise ValueError(f"a worker has {MAX_COUNTERS} counters, too few for {end}")
        self.num_claimed = end
        rows = [row[begin:end] for row in self._rows]
        return CounterGroup(rows[self._worker_index], rows)


class KeyedCounters(Generic[Key]):
    """One counter per key of a fixed set."""

    def __init__(self, counters: SharedCounters, keys: Sequence[Key]):
        self._index_by_key = {key: index for index, key in enumerate(keys)}
        self._group = counters.claim(len(keys))

    def increment(self, key: Key) -> None:
        """Adds 1 to the counter of `key`."""
        self._group.add(self._index_by_key[key], 1)

    def __getitem__(self, key: Key) -> int:
        return int(self._group.total(self._index_by_key[key]))

    def items(self) -> Iterator[tuple[Key, int]]:
        """Yields each key and its count over all workers."""
        for key, index in self._index_by_key.items():
            yield key, int(self._group.total(index))
