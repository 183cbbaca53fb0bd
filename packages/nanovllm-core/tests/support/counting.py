"""Counts what a piece of work does in Python: unlike its time, that is the same on every machine."""

import gc
import sys
from collections import Counter
from collections.abc import Callable


def calls(work: Callable[..., object], *args: object) -> Counter[str]:
    """How many functions `work` calls: of Python ("call") and of C ("c_call")."""
    counts: Counter[str] = Counter()
    # A collection would count with what others have it call.
    gc.disable()
    sys.setprofile(lambda frame, event, arg: counts.update((event,)))
    try:
        work(*args)
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts
