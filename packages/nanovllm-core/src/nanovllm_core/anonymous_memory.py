"""Allocates shared memory without a name."""

import mmap
import os
import tempfile
import weakref
from multiprocessing.reduction import DupFd
from typing import Any


class AnonymousMemory:
    """Shared memory of a fixed size, initially zeros. An instance can be an argument of a new process.

    The operating system frees the memory when the last process closes it, even if processes are killed.

    descriptor: the memory's file descriptor in this process.
    """

    def __init__(self, num_bytes: int):
        self._own_descriptor(_create_file(num_bytes), num_bytes)

    def _own_descriptor(self, descriptor: int, num_bytes: int) -> None:
        self.descriptor = descriptor
        self._num_bytes = num_bytes
        weakref.finalize(self, os.close, descriptor)

    def __getstate__(self) -> tuple[Any, int]:
        # `DupFd` works only while multiprocessing starts a process, so other pickling fails.
        return DupFd(self.descriptor), self._num_bytes

    def __setstate__(self, state: tuple[Any, int]) -> None:
        descriptor, num_bytes = state
        self._own_descriptor(descriptor.detach(), num_bytes)

    def map(self, *, populates: bool = True) -> memoryview:
        """Map the memory into this process. All mappings show the same bytes.

        populates: whether to allocate the pages now. If False, the first writes take several times as long.
        """
        flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populates else 0)
        return memoryview(mmap.mmap(self.descriptor, self._num_bytes, flags))


def _create_file(num_bytes: int) -> int:
    """The descriptor of a new file without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("nanovllm")
    else:
        descriptor, path = tempfile.mkstemp(prefix="nanovllm-")
        os.unlink(path)  # noqa: PTH108
    os.ftruncate(descriptor, num_bytes)
    return descriptor
