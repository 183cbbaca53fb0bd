"""Uploads the inputs of a step from the host to the device."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.parallel import ParallelContext

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


class Masks(NamedTuple):
    """Masks of tokens that requests may sample: the arguments of `apply_masks_`.

    sample_indices: int32 [n], index of each mask's sample among the samples of the step; -1 for an unused mask.
    bits: int32 [n, words], one bit per token id; 1 for a token that may be sampled.
    """

    sample_indices: Tensor
    bits: Tensor


class DeviceRows(NamedTuple):
    """The requests of a step, on the device.

    table_rows: int32 [n], rows of the request table.
    query_start_loc: int32 [n + 1], index of each request's first token in the step, then the number of tokens.
    is_sampled: int32 [n], 1 for a request that samples a token, else 0.
    """

    table_rows: Tensor
    query_start_loc: Tensor
    is_sampled: Tensor


def stage_upload(array: Int32Array, device: torch.device) -> Tensor:
    """Copy `array` to new host memory for an asynchronous transfer to `device`. The memory is pinned for CUDA."""
    if device.type == "cpu":
        return torch.from_numpy(array.copy())
    host = torch.empty(array.shape, dtype=torch.int32, pin_memory=True)
    host.numpy()[...] = array
    return host


def upload(arrays: Sequence[Int32Array], device: torch.device) -> list[Tensor]:
    """Copy flat int32 arrays to `device` in one transfer. Each result is aligned for a view as int64."""
    padded_lengths = [array.size + (array.size & 1) for array in arrays]
    flat = np.zeros(sum(padded_lengths), np.int32)
    offset = 0
    for array, padded_length in zip(arrays, padded_lengths, strict=True):
        flat[offset : offset + array.size] = array
        offset += padded_length
    padded_views = stage_upload(flat, device).to(device, non_blocking=True).split(padded_lengths)
    return [view[: array.size] for view, array in zip(padded_views, arrays, strict=True)]


class MaskBuffer:
    """Masks at a fixed device address for captured graphs. size: maximum number of masks. num_words: words per mask."""

    def __init__(self, size: int, num_words: int, device: torch.device):
        self._size = size
        self._num_words = num_words
        self._device_buffer = torch.full((size * (1 + num_words),), -1, dtype=torch.int32, device=device)
        self._host_buffer = self._device_buffer
        self._is_clear = True
        self._sample_indices = self._device_buffer[:size]
        self._bits = self._device_buffer[size:].view(size, num_words)

    def new_masks(self, count: int) -> Int32Array:
        """Masks int32 [count, words] that allow every token. The caller restricts the masks and calls `send`."""
        length = self._size + count * self._num_words
        # The previous transfer may still read the previous buffer, so create a new buffer. numpy fills the buffer with
        # one thread. torch would use several threads, which wait for each other on a busy CPU.
        self._host_buffer = torch.empty((length,), dtype=torch.int32, pin_memory=self._device_buffer.is_cuda)
        self._host_buffer.numpy().fill(-1)
        return self._host_buffer.numpy()[self._size :].reshape(count, self._num_words)

    def send(self, sample_indices: Sequence[int]) -> Masks:
        """Upload the masks that the last call of `new_masks` returned. sample_indices: see `Masks`."""
        self._host_buffer.numpy()[: len(sample_indices)] = sample_indices
        self._device_buffer[: len(self._host_buffer)].copy_(self._host_buffer, non_blocking=True)
        self._is_clear = False
        return self.first_masks(len(sample_indices))

    def share(self, count: int, parallel: ParallelContext) -> Masks:
        """Copy the first `count` masks of rank 0 to the other ranks."""
        parallel.broadcast(self._device_buffer[: self._size + count * self._num_words])
        self._is_clear = False
        return self.first_masks(count)

    def first_masks(self, count: int) -> Masks:
        """Views of the first `count` masks."""
        return Masks(self._sample_indices[:count], self._bits[:count])

    def clear(self) -> None:
        """Remove all masks, so that a graph that applies masks can be replayed for a step without masks."""
        if not self._is_clear:
            self._sample_indices.fill_(-1)
            self._is_clear = True


class StepBuffer:
    """The requests of a step at a fixed device address, which captured graphs read.

    size: maximum number of requests of a step. Padding entries are requests without tokens.
    """

    def __init__(self, size: int, device: torch.device):
        self._size = size
        self._device = device
        self._last_packed_step = np.zeros(3 * size + 1, np.int32)
        self._device_buffer = torch.zeros(3 * size + 1, dtype=torch.int32, device=device)
        self._rows = DeviceRows(*self._device_buffer.split((size, size + 1, size)))

    def write(self, rows: Int64Array, tokens_per_row: Int64Array, is_sampled: NDArray[np.bool_]) -> None:
        """Upload the requests of a step, unless the last step had equal requests. Arguments: see `ScheduledRows`."""
        size, count = self._size, len(rows)
        packed_step = np.zeros(3 * size + 1, np.int32)
        packed_step[:count] = rows
        query_starts = packed_step[size : 2 * size + 1]
        np.cumsum(tokens_per_row, out=query_starts[1 : count + 1])
        query_starts[count + 1 :] = query_starts[count]
        packed_step[2 * size + 1 : 2 * size + 1 + count] = is_sampled
        if not np.array_equal(packed_step, self._last_packed_step):
            self._device_buffer.copy_(stage_upload(packed_step, self._device), non_blocking=True)
            self._last_packed_step = packed_step

    def first_rows(self, count: int) -> DeviceRows:
        """Views of the first `count` requests."""
        table_rows, query_start_loc, is_sampled = self._rows
        return DeviceRows(table_rows[:count], query_start_loc[: count + 1], is_sampled[:count])

    def clear(self) -> None:
        """Upload a step without requests."""
        empty = np.zeros(0, np.int64)
        self.write(empty, empty, empty.astype(np.bool_))
