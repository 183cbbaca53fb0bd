"""Limits glibc's malloc, so that a process returns more freed memory to the system."""

import ctypes
import sys

# Parameters of `mallopt`, from malloc.h.
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def limit_malloc_heaps(num_heaps: int, max_block_bytes: int | None = None) -> None:
    """Limit the heaps of this process. Has no effect without glibc.

    num_heaps: maximum number of heaps. By default, threads get up to eight heaps for each CPU core.
    max_block_bytes: malloc returns larger blocks to the system when they are freed. None: glibc chooses the size.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, num_heaps)
            if max_block_bytes is not None:
                mallopt(_M_MMAP_THRESHOLD, max_block_bytes)
