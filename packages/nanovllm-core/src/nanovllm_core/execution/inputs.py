"""One upload a step: everything the device must hear about, packed into a single buffer.

This room must not know what the numbers mean.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32Array = NDArray[np.int32]


def upload(arrays: Sequence[Int32Array], device: torch.device) -> list[Tensor]:
    """Copy flat int32 arrays to `device` in one transfer; returns a view for each.

    On CUDA the host side is a pinned buffer of its own for every call, so that the copy needs no waiting and a later
    step never writes over one that is still being read. Each array begins at an even offset, so that a pair of
    entries can be viewed as an int64.
    """
    lengths = [array.size for array in arrays]
    padded = [length + (length & 1) for length in lengths]
    host = torch.empty(sum(padded), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = host.numpy()
    offset = 0
    for array, length, step in zip(arrays, lengths, padded, strict=True):
        flat[offset : offset + length] = array
        offset += step
    there = host.to(device, non_blocking=True)
    pieces = there.split(padded)
    return [piece[:length] for piece, length in zip(pieces, lengths, strict=True)]
