"""Numbers that the workers of one server share: each writes a row of its own, everybody reads them all.

Plain memory, no locks and no messages: a number has one writer, sums are taken when somebody asks, and what a worker
that died had counted stays counted. This room must not know what the numbers mean.
"""

import multiprocessing
from collections.abc import Hashable, Iterator, Sequence
from ctypes import Array, c_double
from typing import Generic, TypeVar

# Of a row; 32 KiB.
COLUMNS = 4096

K = TypeVar("K", bound=Hashable)


def allocate(num_workers: int) -> "Array[c_double]":
    """The memory for that many workers, all zero: an argument for processes that are about to be started."""
    return multiprocessing.get_context("spawn").RawArray(c_double, num_workers * COLUMNS)


class Cells:
    """A few numbers of one writer, and those of the others. Only for one thread."""

    def __init__(self, own: "memoryview[float]", rows: "Sequence[memoryview[float]]"):
        self._own = own
        self._rows = rows

    def add(self, index: int, value: float) -> None:
        """Add to a number of this writer's."""
        self._own[index] += value

    def clear(self) -> None:
        """Set this writer's numbers to zero."""
        for index in range(len(self._own)):
            self._own[index] = 0.0

    def own(self, index: int) -> float:
        """A number of this writer's."""
        return self._own[index]

    def total(self, index: int) -> float:
        """A number, summed over all writers."""
        return sum(row[index] for row in self._rows)


class Sheet:
    """The view of the worker `own`. Everybody must claim the same cells in the same order."""

    def __init__(self, memory: "Array[c_double]", own: int = 0):
        cells = memoryview(memory).cast("B").cast("d")
        self._rows = [cells[start : start + COLUMNS] for start in range(0, len(cells), COLUMNS)]
        self._own = own
        self._next = 0

    def claim(self, count: int) -> Cells:
        """The next `count` columns."""
        begin, self._next = self._next, self._next + count
        if self._next > COLUMNS:
            raise ValueError(f"a sheet has {COLUMNS} columns, too few for {self._next}")
        rows = [row[begin : self._next] for row in self._rows]
        return Cells(rows[self._own], rows)


class Tally(Generic[K]):
    """Counts by key, over all workers. The keys are known beforehand."""

    def __init__(self, sheet: Sheet, keys: Sequence[K]):
        self._columns = {key: index for index, key in enumerate(keys)}
        self._cells = sheet.claim(len(keys))

    def count(self, key: K) -> None:
        """Count one more."""
        self._cells.add(self._columns[key], 1)

    def __getitem__(self, key: K) -> int:
        return int(self._cells.total(self._columns[key]))

    def items(self) -> Iterator[tuple[K, int]]:
        """All keys and their counts."""
        for key, index in self._columns.items():
            yield key, int(self._cells.total(index))
