"""Ranks: the processes that share one model. The ranks of an engine run on one host."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.collective import Communicator


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """This process's rank among the `size` ranks of an engine.

    communicator: exchanges tensors with the other ranks. None if `size` is 1, and in contexts that only split tensors.
    has_whole_experts: each rank has some experts as a whole (expert parallelism), instead of a part of each expert.
    splits_requests: each request belongs to one rank, which alone computes the request's attention and alone holds its
        KV cache. In a step, all ranks compute equal numbers of tokens and requests, including padding. If False, all
        ranks compute all requests.
    """

    rank: int = 0
    size: int = 1
    communicator: Communicator | None = None
    has_whole_experts: bool = False
    splits_requests: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank is {self.rank}, but must be from 0 to {self.size - 1}")

    def split_evenly(self, total: int, quantity: str) -> int:
        """This rank's share of `total`. Raises ValueError that names `quantity` if the shares would differ."""
        if total % self.size:
            raise ValueError(
                f"{quantity} is {total}, which {self.size} ranks can't split evenly: use a number of ranks that "
                f"divides {total}"
            )
        return total // self.size

    def own_groups(self, num_groups: int, quantity: str) -> slice:
        """This rank's slice of `num_groups` groups. All slices have equal lengths, so some may exceed `num_groups`.

        If there are more ranks than groups, several ranks have the same group.
        Raises ValueError if some groups would have more ranks than others.
        """
        if self.size <= num_groups:
            return own_slice(self, -(-num_groups // self.size))
        if self.size % num_groups:
            raise ValueError(
                f"{quantity} is {num_groups}, which {self.size} ranks can't share evenly: use at most {num_groups} "
                f"ranks, or a multiple of {num_groups}"
            )
        group = self.rank * num_groups // self.size
        return slice(group, group + 1)

    @property
    def num_request_groups(self) -> int:
        """The number of groups of requests: one group per rank if ranks have different requests, else one group."""
        return self.size if self.splits_requests else 1

    def for_attention(self) -> "ParallelContext":
        """The ranks that share the attention of one request: a single rank if ranks have different requests."""
        return ParallelContext() if self.splits_requests else self

    def gather_requests(self, x: Tensor) -> Tensor:
        """The rows of all ranks' requests. x: [n, ...], the rows of this rank's requests.

        Returns [size * n, ...] in the order of ranks if ranks have different requests, else `x`.
        """
        if self.communicator is None or not self.splits_requests:
            return x
        return self.communicator.all_gather(x.contiguous())

    def sum_for_requests(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks, and return the rows of this rank's requests.

        x: [size * n, ...] in the order of `gather_requests` if ranks have different requests; may be overwritten.
        """
        if self.communicator is None or not self.splits_requests:
            return self.all_reduce(x)
        return self.communicator.reduce_scatter(x.contiguous())

    def count_gathered(self, count: int) -> int:
        """The number of rows that `gather_requests` returns if each rank passes `count` rows."""
        return self.num_request_groups * count

    def broadcast_rows(self, x: Tensor, owner: int) -> Tensor:
        """The `x` of rank `owner` if ranks have different requests, else this rank's `x`. Ranks pass equal shapes."""
        if self.splits_requests:
            x = x.clone()
            self.broadcast(x, owner)
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks."""
        return x if self.communicator is None else self.communicator.all_reduce(x)

    def own_rows(self, x: Tensor) -> Tensor:
        """This rank's share of the rows of `x` [n, ...]: ceil(n / size) rows, padded with zeros at the end."""
        if self.size == 1:
            return x
        num_own_rows = -(-x.shape[0] // self.size)
        return _pad_rows(x[own_slice(self, num_own_rows)], num_own_rows)

    def own_requests(self, x: Tensor) -> Tensor:
        """The rows of `x` [n, ...] for which this rank chooses tokens. `x` has a row per request of this rank.

        If ranks have different requests, these are all rows, else this rank's share (`own_rows`).
        """
        return x if self.splits_requests else self.own_rows(x)

    def gather_rows(self, own_rows: Tensor, num_rows: int) -> Tensor:
        """The inverse of `own_rows`: [num_rows, ...] from the shares of all ranks."""
        return own_rows if self.communicator is None else self.communicator.all_gather(own_rows)[:num_rows]

    def exchange_columns(self, x: Tensor) -> Tensor:
        """Turn a split by columns into a split by rows, in which each rank has all columns of its share of the rows.

        x: [n, c]. Returns [ceil(n / size), size * c]; additional rows are zeros.
        """
        if self.communicator is None:
            return x
        return self.communicator.exchange_columns(_pad_rows(x, -(-x.shape[0] // self.size) * self.size))

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Overwrite `x` on every rank with the values of rank `source`."""
        if self.communicator is not None:
            self.communicator.broadcast(x, source)

    def minimum(self, value: int, device: torch.device) -> int:
        """The minimum of `value` over all ranks. The host waits for the ranks. device: device of the rank."""
        if self.communicator is None:
            return value
        own_value = torch.tensor([value], dtype=torch.int64, device=device)
        return int(self.communicator.all_gather(own_value).min())


def own_slice(parallel: ParallelContext, share: int) -> slice:
    """This rank's slice of a dimension that is split over the ranks. share: number of indices per rank."""
    return slice(parallel.rank * share, (parallel.rank + 1) * share)


def _pad_rows(x: Tensor, num_rows: int) -> Tensor:
    num_missing_rows = num_rows - x.shape[0]
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, num_missing_rows)) if num_missing_rows else x
