"""Uploads per step from the host to the device: arrays in one transfer, sampling masks, and the step's rows."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


def to_device(array: Int32Array, device: torch.device) -> Tensor:
    """A copy of `array` on the host, to be transferred to `device`.

    For CUDA it is a new pinned buffer: the transfer does not block, and no later step overwrites its source.
    """
    if device.type == "cpu":
        return torch.from_numpy(array.copy())
    host = torch.empty(array.shape, dtype=torch.int32, pin_memory=True)
    host.numpy()[...] = array
    return host


def upload(arrays: Sequence[Int32Array], device: torch.device) -> list[Tensor]:
    """Copy flat int32 arrays to `device` in one transfer; returns a view for each.

    Each array begins at an even offset, so that a pair of entries can be viewed as an int64.
    """
    lengths = [array.size for array in arrays]
    padded = [length + (length & 1) for length in lengths]
    flat = np.zeros(sum(padded), np.int32)
    offset = 0
    for array, length, step in zip(arrays, lengths, padded, strict=True):
        flat[offset : offset + length] = array
        offset += step
    uploaded = to_device(flat, device).to(device, non_blocking=True)
    pieces = uploaded.split(padded)
    return [piece[:length] for piece, length in zip(pieces, lengths, strict=True)]


class MaskBuffer:
    """Token masks of a step at a fixed device address, where captured graphs read them.

    which: int32 [size], the request of the step that each mask applies to; -1 for an unused mask.
    bits: int32 [size, words], packed masks, see `nanovllm_kernels.sampling.apply_masks_`.
    """

    def __init__(self, size: int, num_words: int, device: torch.device):
        self._size = size
        self._num_words = num_words
        self._device_buffer = torch.full((size * (1 + num_words),), -1, dtype=torch.int32, device=device)
        self._next = self._device_buffer
        self._is_clear = True
        self.which = self._device_buffer[:size]
        self.bits = self._device_buffer[size:].view(size, num_words)

    def draft(self, count: int) -> Int32Array:
        """Masks int32 [count, words] that allow every token, for the caller to restrict before `send`."""
        length = self._size + count * self._num_words
        # Pinned memory makes the transfer asynchronous. A new buffer is needed while the last transfer may still run.
        self._next = torch.full((length,), -1, dtype=torch.int32, pin_memory=self._device_buffer.is_cuda)
        return self._next.numpy()[self._size :].reshape(count, self._num_words)

    def send(self, which: Sequence[int]) -> None:
        """Upload the masks of `draft`. which: the request that each mask applies to, -1 for none."""
        self._next.numpy()[: len(which)] = which
        self._device_buffer[: len(self._next)].copy_(self._next, non_blocking=True)
        self._is_clear = False

    def clear(self) -> None:
        """Remove the masks of all requests, for graphs that apply masks in a step without masks."""
        if not self._is_clear:
            self.which.fill_(-1)
            self._is_clear = True


class StepBuffer:
    """The rows of a step at a fixed device address, where captured graphs read them.

    rows: int32 [size], the table row of each request.
    query_start_loc: int32 [size + 1], the index of each request's first token in the step.
    samples: int32 [size], 1 for each request that samples a token.
    Entries behind the step's requests are padding: requests without tokens.
    """

    def __init__(self, size: int, device: torch.device):
        self._size = size
        self._device = device
        self._last = np.zeros(3 * size + 1, np.int32)
        self._device_buffer = torch.zeros(3 * size + 1, dtype=torch.int32, device=device)
        self.rows, self.query_start_loc, self.samples = self._device_buffer.split((size, size + 1, size))

    def write(self, rows: Int64Array, lengths: Int64Array, samples: NDArray[np.bool_]) -> None:
        """Upload the rows of a step, unless they equal those of the last step."""
        size, count = self._size, len(rows)
        step = np.zeros(3 * size + 1, np.int32)
        step[:count] = rows
        starts = step[size : 2 * size + 1]
        np.cumsum(lengths, out=starts[1 : count + 1])
        starts[count + 1 :] = starts[count]
        step[2 * size + 1 : 2 * size + 1 + count] = samples
        if not np.array_equal(step, self._last):
            self._device_buffer.copy_(to_device(step, self._device), non_blocking=True)
            self._last = step

    def clear(self) -> None:
        """Upload a step without requests; graphs are captured with it."""
        empty = np.zeros(0, np.int64)
        self.write(empty, empty, empty.astype(np.bool_))
