"""Counts the calls that a function makes. Unlike its time, the count is the same on every machine."""

import gc
import sys
from collections import Counter
from collections.abc import Callable


def count_calls(work: Callable[..., object], *args: object) -> Counter[str]:
    """Returns counts of profiler events, such as "call" (Python functions) and "c_call" (C functions)."""
    counts: Counter[str] = Counter()
    # A garbage collection would add calls of finalizers.
    gc.disable()
    sys.setprofile(lambda frame, event, arg: counts.update((event,)))
    try:
        work(*args)
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts
