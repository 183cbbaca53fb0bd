"""Ranks of tensor parallelism. Layers split their weights over ranks, but only one rank is supported so far."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """This process's rank in a tensor-parallel group of `size` processes."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if (self.rank, self.size) != (0, 1):
            raise ValueError(f"rank {self.rank} of {self.size}: only one rank is supported so far")

    def split_evenly(self, total: int, quantity: str) -> int:
        """This rank's share of `total`. Raises ValueError if the ranks' shares would differ.

        quantity: what `total` counts, for the error.
        """
        if total % self.size:
            raise ValueError(f"{quantity} is {total}, which {self.size} ranks can't split evenly")
        return total // self.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """`x` of all ranks, concatenated along the last dimension."""
        return x


def own_slice(parallel: ParallelContext, share: int) -> slice:
    """This rank's slice of a dimension that is split over the ranks. share: number of indices per rank."""
    return slice(parallel.rank * share, (parallel.rank + 1) * share)
