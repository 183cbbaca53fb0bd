"""Token ids as read-only int32 arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]


def as_token_ids(ids: Sequence[int] | NDArray[Any]) -> TokenIds:
    """A read-only int32 array of `ids`; a read-only int32 array is returned as it is, anything else is copied.

    Raises ValueError when `ids` is not one row of integers that int32 holds.
    """
    found = np.asarray(ids)
    if found.size == 0 and found.ndim == 1:
        found = found.astype(np.int32)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError("a sequence of integers is expected")
    if found.dtype != np.int32:
        bounds = np.iinfo(np.int32)
        if found.min() < bounds.min or found.max() > bounds.max:
            raise ValueError(f"they go from 0 to {bounds.max}")
        found = found.astype(np.int32)
    elif found.flags.writeable:
        found = found.copy()
    found.flags.writeable = False
    return found
