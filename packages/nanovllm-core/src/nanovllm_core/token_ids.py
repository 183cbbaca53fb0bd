"""Stores token ids as read-only int32 arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]


def as_token_ids(ids: Sequence[int] | NDArray[Any]) -> TokenIds:
    """Convert `ids` to a read-only array. Raises ValueError unless `ids` is a sequence of int32 integers."""
    array = np.asarray(ids)
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError("a sequence of integers is expected")
    if array.dtype != np.int32:
        bounds = np.iinfo(np.int32)
        if array.min() < bounds.min or array.max() > bounds.max:
            raise ValueError(f"token ids must be from 0 to {bounds.max}")
        array = array.astype(np.int32)
    elif array.flags.writeable:
        array = array.copy()
    array.flags.writeable = False
    return array
