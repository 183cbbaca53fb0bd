"""Collectives through torch.distributed: gloo on a CPU, where sums are computed in rank order, and NCCL on CUDA."""

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm_kernels.elementwise import rms_norm


class TorchCollectives:
    """The collectives of one process group. `Communicator` documents the methods, and checks the arguments."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce(self, x: Tensor) -> None:
        """Overwrite `x` with the sum of all ranks' `x`."""
        if x.is_cuda:
            dist.all_reduce(x, group=self.group)
        else:
            x.copy_(self._sum_of_all(x))

    def all_reduce_norm(
        self, partial: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        """Overwrite `residual`, or `partial` if there is no residual, with the new residual. Returns normed rows."""
        if partial.is_cuda:
            dist.all_reduce(partial, group=self.group)
            new_residual = partial if residual is None else residual.add_(partial)
        else:
            sums = self._sum_of_all(partial)
            new_residual = partial.copy_(sums) if residual is None else residual.copy_(residual + sums)
        return rms_norm(new_residual, norm_weight, eps, dtype).to(dtype).contiguous()

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' `x` [n, ...], concatenated: [size * n, ...]."""
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        # Send bytes, because torch.distributed does not support all dtypes.
        dist.all_gather_into_tensor(_as_bytes(gathered), _as_bytes(x), group=self.group)
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's part [n, ...] of the sum of all ranks' `x` [size * n, ...]."""
        own_shape = (x.shape[0] // self.size, *x.shape[1:])
        if x.is_cuda:
            sums = x.new_empty(own_shape)
            dist.reduce_scatter_tensor(sums, x, group=self.group)
            return sums
        return _sum_in_order(self._exchange_parts(x)).to(x.dtype)

    def exchange_columns(self, x: Tensor) -> Tensor:
        """Return all columns [n / size, size * c] of this rank's rows. `x` [n, c] has this rank's columns of n rows."""
        return self._exchange_parts(x).transpose(0, 1).reshape(x.shape[0] // self.size, -1)

    def broadcast(self, x: Tensor, source: int) -> None:
        """Overwrite `x` with the `x` of rank `source`."""
        dist.broadcast(_as_bytes(x), group=self.group, group_src=source)

    def close(self) -> None:
        """Do nothing: the process group belongs to the caller."""

    def _sum_of_all(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, in float32 if `x` is floating-point."""
        return _sum_in_order(self.all_gather(x.unsqueeze(0)))

    def _exchange_parts(self, x: Tensor) -> Tensor:
        """Send part d of `x` [size * n, ...] to rank d. Returns the received parts [size, n, ...], in rank order."""
        received = torch.empty_like(x)
        dist.all_to_all_single(_as_bytes(received), _as_bytes(x), group=self.group)
        return received.unflatten(0, (self.size, -1))


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _sum_in_order(parts: Tensor) -> Tensor:
    """Add the tensors parts[0], parts[1], ... in this order, in float32 if they are floating-point."""
    first, *others = parts.float() if parts.is_floating_point() else parts
    for other in others:
        first = first + other
    return first
