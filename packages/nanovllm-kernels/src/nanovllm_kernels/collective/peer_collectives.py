"""The collectives of GPUs: kernels that write to the memory of peers for small tensors, and NCCL for large tensors."""

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm_kernels.collective import gluon_all_reduce_norm, gluon_exchange, gluon_two_shot
from nanovllm_kernels.collective.collective_reference import TorchCollectives
from nanovllm_kernels.collective.peer_memory import PeerMemory, count_buffer_bytes
from nanovllm_kernels.collective.policy import (
    EMPTY_BYTE,
    MAX_PROGRAMS,
    LaunchPolicy,
    choose_one_shot_limit,
    choose_region_bytes,
)
from nanovllm_kernels.collective.symmetric_memory import SymmetricBuffer
from nanovllm_kernels.platform import describe_device

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def open_peer_memory(group: dist.ProcessGroup, device: torch.device) -> PeerMemory:
    """Allocate and map the receive buffers. All ranks of `group` call this function.

    Raises: RuntimeError if the GPUs can't access each other's memory.
    """
    size, region_bytes = group.size(), choose_region_bytes(group.size())
    buffer = SymmetricBuffer(group, device, count_buffer_bytes(size, region_bytes))
    buffer.memory.fill_(EMPTY_BYTE)
    addresses = torch.tensor(buffer.addresses, dtype=torch.int64, device=device)
    phases = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
    # Programs wait for each other, so all programs of a kernel must run at the same time: at most one per SM.
    num_sms = torch.tensor(describe_device(device).num_sms, dtype=torch.int32, device=device)
    # This call is also a barrier: when the host has the result, all ranks have filled their buffers with EMPTY_BYTE.
    dist.all_reduce(num_sms, dist.ReduceOp.MIN, group)
    max_programs = min(MAX_PROGRAMS, int(num_sms))
    return PeerMemory(group.rank(), size, addresses, phases, max_programs, region_bytes, buffer)


class PeerCollectives:
    """The collectives of one process group of GPUs. `Communicator` documents the methods, and checks the arguments."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        peers: PeerMemory,
        policy: LaunchPolicy | None = None,
        fallback: TorchCollectives | None = None,
    ) -> None:
        """Use kernels within the limits of `policy` (None: default limits). Other calls use `fallback` (None: NCCL)."""
        self.rank, self.size = peers.rank, peers.size
        self._peers = peers
        one_shot_limit = choose_one_shot_limit(peers.size)
        self._policy = policy or LaunchPolicy(peers.size, peers.max_programs, peers.region_bytes, one_shot_limit)
        self._fallback = fallback or TorchCollectives(group)

    def all_reduce(self, x: Tensor) -> None:
        """Overwrite `x` with the sum of all ranks' `x`."""
        is_float = x.dtype in FLOAT_DTYPES
        if is_float and (launch := self._policy.choose_exchange(x.nbytes)):
            gluon_exchange.sum_all(self._peers, x, x, launch, sends_parts=False)
        elif is_float and (launch := self._policy.choose_two_shot(x.numel(), x.itemsize)):
            gluon_two_shot.all_reduce(self._peers, x, launch)
        else:
            self._fallback.all_reduce(x)

    def all_reduce_norm(
        self, partial: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        """Overwrite `residual`, or `partial` if there is no residual, with the new residual. Returns normed rows."""
        num_rows, row_size = partial.shape
        normed = torch.empty_like(partial, dtype=dtype)
        rows_per_launch = self._policy.choose_norm_rows(num_rows, row_size * partial.itemsize)
        if rows_per_launch is None:
            self.all_reduce(partial)
            gluon_all_reduce_norm.add_norm(self._peers, partial, residual, norm_weight, eps, normed)
            return normed
        for start in range(0, num_rows, rows_per_launch):
            rows = slice(start, start + rows_per_launch)
            residual_rows = None if residual is None else residual[rows]
            gluon_all_reduce_norm.all_reduce_norm(
                self._peers, partial[rows], residual_rows, norm_weight, eps, normed[rows]
            )
        return normed

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' `x` [n, ...], concatenated: [size * n, ...]."""
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        if self._concatenate(x, gathered, x.nbytes, sends_parts=False):
            return gathered
        return self._fallback.all_gather(x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's part [n, ...] of the sum of all ranks' `x` [size * n, ...]."""
        launch = self._policy.choose_exchange(x.nbytes // self.size) if x.dtype in FLOAT_DTYPES else None
        if launch is None:
            return self._fallback.reduce_scatter(x)
        sums = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        gluon_exchange.sum_all(self._peers, x, sums, launch, sends_parts=True)
        return sums

    def exchange_columns(self, x: Tensor) -> Tensor:
        """Return all columns [n / size, size * c] of this rank's rows. `x` [n, c] has this rank's columns of n rows."""
        num_rows, num_columns = x.shape
        exchanged = x.new_empty((num_rows // self.size, self.size * num_columns))
        if self._concatenate(x, exchanged, num_columns * x.itemsize, sends_parts=True):
            return exchanged
        return self._fallback.exchange_columns(x)

    def broadcast(self, x: Tensor, source: int) -> None:
        """Overwrite `x` with the `x` of rank `source`."""
        self._fallback.broadcast(x, source)

    def close(self) -> None:
        """Wait until no rank uses the buffers, and free this rank's buffer."""
        barrier = torch.zeros(1, device=self._peers.addresses.device)
        self._fallback.all_reduce(barrier)
        barrier.item()
        del self._peers

    def _concatenate(self, x: Tensor, out: Tensor, row_bytes: int, *, sends_parts: bool) -> bool:
        """Concatenate rows of all ranks' `x`, or of this rank's parts. Return False if no kernel supports `x`."""
        is_exact = x.dtype not in FLOAT_DTYPES
        part_bytes = x.nbytes // (self.size if sends_parts else 1)
        launch = self._policy.choose_exchange(part_bytes * 2 if is_exact else part_bytes)
        if launch is None or row_bytes % 4:
            return False
        if x.storage_offset() * x.itemsize % 4:
            # Ranks may pass tensors with different offsets, but must choose the same kernel.
            x = x.clone()
        words, out_words = x.view(-1).view(torch.int32), out.view(-1).view(torch.int32)
        gluon_exchange.concatenate(
            self._peers, words, out_words, row_bytes // 4, launch, sends_parts=sends_parts, is_exact=is_exact
        )
        return True
