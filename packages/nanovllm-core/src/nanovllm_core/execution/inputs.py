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
