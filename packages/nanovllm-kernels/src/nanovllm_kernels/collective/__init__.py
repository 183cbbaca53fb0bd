"""Collective operators of the tensor- and expert-parallel ranks of one host.

A `Communicator` uses gloo on a CPU. On CUDA, kernels write small tensors to the memory of peers, and NCCL sends large
tensors.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nanovllm_kernels.collective.collective_reference import TorchCollectives

__all__ = ["Communicator"]

SUMMABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)
NORMABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Communicator:
    """The collectives of one rank among the `size` ranks (processes) of a process group on one host.

    All ranks call the same methods in the same order, with tensors of equal shapes and dtypes. Tensors are contiguous
    and on the communicator's device. On CUDA this device is also the current device, and all calls use one stream, or
    streams that wait for each other. Calls can be captured in CUDA graphs. torch.compile(fullgraph=True) is supported.

    Sums have the same bits on every rank. Floating-point sums are computed in float32 in rank order and rounded once,
    except by NCCL: see `all_reduce`.
    """

    rank: int
    size: int

    def __init__(self, group: ProcessGroup, device: torch.device, *, use_peer_memory: bool = True) -> None:
        """Allocate the buffers of the rank. All ranks of `group` construct their communicator at the same time.

        group: needs gloo for a CPU, and NCCL for CUDA. A group has at most one open communicator.
        device: device of all tensors. On CUDA each rank has its own device, with an index.
        use_peer_memory: use kernels that write to the memory of other GPUs. False: CUDA uses only NCCL, which works
            even if the GPUs can't access each other's memory.
        Raises: ValueError if the group has one rank or an open communicator, or if a CUDA device has no index.
            RuntimeError if the GPUs can't access each other's memory.
        """
        if device.type == "cuda" and device.index is None:
            raise ValueError("device 'cuda' has no index; pass for example torch.device('cuda', rank)")
        if group.size() < 2:
            raise ValueError("a communicator needs a group of at least 2 ranks; with 1 rank, leave out the collectives")
        if group.group_name in _open_collectives:
            raise ValueError(f"group {group.group_name!r} has an open communicator; close it first")
        self.rank = group.rank()
        self.size = group.size()
        self._group_name = group.group_name
        _open_collectives[self._group_name] = _create_collectives(group, device, use_peer_memory=use_peer_memory)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Overwrite `x` with the sum of the ranks' `x`, and return `x`.

        NCCL, which computes large sums, rounds after each addition. NCCL's sums also have the same bits on every rank.

        x: any shape; float32, bfloat16, float16, int32 or int64.
        """
        _all_reduce_op(x, self._group_name)
        return x

    def all_reduce_norm(
        self, partial: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Sum the ranks' `partial`, add the sum to `residual`, and normalize the rows (RMSNorm) of the result.

        partial: [T, H], float32, bfloat16 or float16. Overwritten with unspecified values if there is a residual.
        residual: [T, H], equal on all ranks, float32 or with the dtype of `partial`. Overwritten. None: the sum is the
            new residual.
        norm_weight: [H], or the result of `elementwise.prepare_norm_weight`.
        dtype: the dtype of the normed rows.
        Returns: (new residual, normed rows), both [T, H]. The new residual is the tensor `residual`, or `partial` if
            there is no residual. The norm applies to the rounded new residual.
        """
        normed = _all_reduce_norm_op(partial, residual, norm_weight, eps, dtype, self._group_name)
        return (partial if residual is None else residual), normed

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the ranks' `x` [n, ...] of any dtype, concatenated in rank order: [size * n, ...].

        NaNs of other ranks may arrive with other bits.
        """
        return _all_gather_op(x, self._group_name)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's part [n, ...] of the sum of the ranks' `x`. Rank r gets rows r * n to (r + 1) * n - 1.

        x: [size * n, ...], with a dtype that `all_reduce` supports.
        """
        return _reduce_scatter_op(x, self._group_name)

    def exchange_columns(self, x: Tensor) -> Tensor:
        """Exchange some columns of all rows for all columns of some rows, by an all-to-all.

        x: [n, c], this rank's c columns of n rows. n is a multiple of `size`. Any dtype.
        Returns: [n / size, size * c]. Rank r gets n / size rows, from row r * n / size on. Columns are in rank order.
        """
        return _exchange_columns_op(x, self._group_name)

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Overwrite `x`, of any shape and dtype, with the `x` of rank `source`."""
        _broadcast_op(x, source, self._group_name)

    def close(self) -> None:
        """Free the buffers. All ranks close together, after their last call has ended. Do not replay graphs later."""
        _open_collectives.pop(self._group_name).close()


class Collectives(Protocol):
    """The implementation that the operators call. See `Communicator`. `all_reduce` and `broadcast` overwrite `x`."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> None: ...
    def all_reduce_norm(
        self, partial: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor: ...
    def all_gather(self, x: Tensor) -> Tensor: ...
    def reduce_scatter(self, x: Tensor) -> Tensor: ...
    def exchange_columns(self, x: Tensor) -> Tensor: ...
    def broadcast(self, x: Tensor, source: int) -> None: ...
    def close(self) -> None: ...


def _create_collectives(group: ProcessGroup, device: torch.device, *, use_peer_memory: bool) -> Collectives:
    if device.type != "cuda" or not use_peer_memory:
        return TorchCollectives(group)
    from nanovllm_kernels.collective.peer_collectives import PeerCollectives, open_peer_memory

    return PeerCollectives(group, open_peer_memory(group, device))


# Keys: names of process groups. Custom operators take only tensors and plain values, so they take a name.
_open_collectives: dict[str, Collectives] = {}


def _check_contiguous(x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"collectives need contiguous tensors, not strides {x.stride()}; pass x.contiguous()")


def _check_summable(x: Tensor) -> None:
    _check_contiguous(x)
    if x.dtype not in SUMMABLE_DTYPES:
        raise ValueError(f"collectives can't sum {x.dtype}; convert to one of {SUMMABLE_DTYPES}")


def _check_divisible(x: Tensor, size: int) -> None:
    if x.shape[0] % size:
        raise ValueError(f"{x.shape[0]} rows can't be split evenly over {size} ranks; pad the rows")


def _check_norm(partial: Tensor, residual: Tensor | None, norm_weight: Tensor) -> None:
    _check_contiguous(partial)
    _check_contiguous(norm_weight)
    # `prepare_norm_weight` returns two copies of the weight on a CPU.
    if norm_weight.numel() not in (partial.shape[1], 2 * partial.shape[1]):
        raise ValueError(f"norm_weight has {norm_weight.numel()} elements, but partial has {partial.shape[1]} columns")
    if partial.dtype not in NORMABLE_DTYPES:
        raise ValueError(f"all_reduce_norm can't sum {partial.dtype}; convert to one of {NORMABLE_DTYPES}")
    if residual is None:
        return
    _check_contiguous(residual)
    if residual.shape != partial.shape or residual.dtype not in (torch.float32, partial.dtype):
        raise ValueError(
            f"residual {residual.dtype} {list(residual.shape)} does not fit partial {partial.dtype} "
            f"{list(partial.shape)}; the shapes must be equal, and the residual float32 or {partial.dtype}"
        )


@torch.library.custom_op("nanovllm::collective_all_reduce", mutates_args=("x",))
def _all_reduce_op(x: Tensor, group_name: str) -> None:
    _check_summable(x)
    if x.numel():
        _open_collectives[group_name].all_reduce(x)


@torch.library.custom_op("nanovllm::collective_all_reduce_norm", mutates_args=("partial", "residual"))
def _all_reduce_norm_op(
    partial: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, dtype: torch.dtype, group_name: str
) -> Tensor:
    _check_norm(partial, residual, norm_weight)
    if not partial.numel():
        return torch.empty_like(partial, dtype=dtype)
    return _open_collectives[group_name].all_reduce_norm(partial, residual, norm_weight, eps, dtype)


_all_reduce_norm_op.register_fake(
    lambda partial, _residual, _norm_weight, _eps, dtype, _group_name: torch.empty_like(partial, dtype=dtype)
)


@torch.library.custom_op("nanovllm::collective_all_gather", mutates_args=())
def _all_gather_op(x: Tensor, group_name: str) -> Tensor:
    _check_contiguous(x)
    return _open_collectives[group_name].all_gather(x) if x.numel() else _empty_gathered(x, group_name)


@_all_gather_op.register_fake
def _empty_gathered(x: Tensor, group_name: str) -> Tensor:
    return x.new_empty((_open_collectives[group_name].size * x.shape[0], *x.shape[1:]))


@torch.library.custom_op("nanovllm::collective_reduce_scatter", mutates_args=())
def _reduce_scatter_op(x: Tensor, group_name: str) -> Tensor:
    _check_summable(x)
    _check_divisible(x, _open_collectives[group_name].size)
    return _open_collectives[group_name].reduce_scatter(x) if x.numel() else _empty_part(x, group_name)


@_reduce_scatter_op.register_fake
def _empty_part(x: Tensor, group_name: str) -> Tensor:
    return x.new_empty((x.shape[0] // _open_collectives[group_name].size, *x.shape[1:]))


@torch.library.custom_op("nanovllm::collective_exchange_columns", mutates_args=())
def _exchange_columns_op(x: Tensor, group_name: str) -> Tensor:
    _check_contiguous(x)
    _check_divisible(x, _open_collectives[group_name].size)
    return _open_collectives[group_name].exchange_columns(x) if x.numel() else _empty_exchanged(x, group_name)


@_exchange_columns_op.register_fake
def _empty_exchanged(x: Tensor, group_name: str) -> Tensor:
    size = _open_collectives[group_name].size
    return x.new_empty((x.shape[0] // size, size * x.shape[1]))


@torch.library.custom_op("nanovllm::collective_broadcast", mutates_args=("x",))
def _broadcast_op(x: Tensor, source: int, group_name: str) -> None:
    _check_contiguous(x)
    if x.numel():
        _open_collectives[group_name].broadcast(x, source)
