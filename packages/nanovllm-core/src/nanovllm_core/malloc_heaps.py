"""Limits the freed memory that glibc's malloc keeps."""

import ctypes
import sys
from collections.abc import Callable

# Parameters of `mallopt`, from malloc.h.
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def limit_malloc_heaps(num_heaps: int, max_block_bytes: int | None = None) -> None:
    """Limit the heaps (arenas) of this process. Has no effect without glibc.

    num_heaps: maximum number of heaps. By default, a process has up to eight heaps per CPU core.
    max_block_bytes: malloc returns blocks above this size to the system when they are freed. None: glibc chooses.
    """
    mallopt = _find_function("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, num_heaps)
        if max_block_bytes is not None:
            mallopt(_M_MMAP_THRESHOLD, max_block_bytes)


def return_freed_memory() -> None:
    """Return the free pages of all heaps to the system, in about 20 ms for 100 MB. Has no effect without glibc.

    Without this call, malloc returns only the free end of its first heap.
    """
    malloc_trim = _find_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _find_function(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
