"""What the host tells the device each step: which rows take part, and differences, each in one transfer.

This room must not know what a row holds.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


def to_device(array: Int32Array, device: torch.device) -> Tensor:
    """A copy of `array` for `device`. On CUDA it lies in a pinned buffer of its own, so that the transfer needs no
    waiting and a later step never writes over one that is still being read.
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
    there = to_device(flat, device).to(device, non_blocking=True)
    pieces = there.split(padded)
    return [piece[:length] for piece, length in zip(pieces, lengths, strict=True)]


class MaskBuffer:
    """Which tokens some of a step's requests may have, always at the same place on the device, where a captured graph
    finds them.

    which: int32 [size], whose mask each is among the step's requests, -1 for nobody's. bits: int32 [size, words], as
    `nanovllm_kernels.sampling.apply_masks_` reads them.
    """

    def __init__(self, size: int, num_words: int, device: torch.device):
        self._size = size
        self._num_words = num_words
        self._there = torch.full((size * (1 + num_words),), -1, dtype=torch.int32, device=device)
        self._next = self._there
        self._is_clear = True
        self.which = self._there[:size]
        self.bits = self._there[size:].view(size, num_words)

    def draft(self, count: int) -> Int32Array:
        """Masks [count, words] that allow everything, for the caller to narrow before `send`."""
        length = self._size + count * self._num_words
        # Pinned, so that the transfer needs no waiting, and a buffer of its own, as the last one may be on its way yet.
        self._next = torch.full((length,), -1, dtype=torch.int32, pin_memory=self._there.is_cuda)
        return self._next.numpy()[self._size :].reshape(count, self._num_words)

    def send(self, which: Sequence[int]) -> None:
        """Send what was drafted; which: whose each is, -1 for nobody's."""
        self._next.numpy()[: len(which)] = which
        self._there[: len(self._next)].copy_(self._next, non_blocking=True)
        self._is_clear = False

    def clear(self) -> None:
        """Take the masks off all requests, for a graph that applies masks in a step without any."""
        if not self._is_clear:
            self.which.fill_(-1)
            self._is_clear = True


class StepBuffer:
    """The rows of a step, always at the same place on the device, where a captured graph finds them.

    rows: int32 [size], the row of each request. query_start_loc: int32 [size + 1], where its tokens begin among the
    step's. samples: int32 [size], 1 where it samples a token. Behind the step's requests come some without a token.
    """

    def __init__(self, size: int, device: torch.device):
        self._size = size
        self._device = device
        self._last = np.zeros(3 * size + 1, np.int32)
        self._there = torch.zeros(3 * size + 1, dtype=torch.int32, device=device)
        self.rows, self.query_start_loc, self.samples = self._there.split((size, size + 1, size))

    def write(self, rows: Int64Array, lengths: Int64Array, samples: NDArray[np.bool_]) -> None:
        """Tell the device of a step; nothing is sent when it is like the last one, as when the same requests decode."""
        size, count = self._size, len(rows)
        step = np.zeros(3 * size + 1, np.int32)
        step[:count] = rows
        starts = step[size : 2 * size + 1]
        np.cumsum(lengths, out=starts[1 : count + 1])
        starts[count + 1 :] = starts[count]
        step[2 * size + 1 : 2 * size + 1 + count] = samples
        if not np.array_equal(step, self._last):
            self._there.copy_(to_device(step, self._device), non_blocking=True)
            self._last = step

    def clear(self) -> None:
        """Tell the device of a step without requests, as graphs are captured with."""
        nothing = np.zeros(0, np.int64)
        self.write(nothing, nothing, nothing.astype(np.bool_))
