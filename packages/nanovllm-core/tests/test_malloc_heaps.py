import sys
from pathlib import Path

import pytest

from nanovllm_core.malloc_heaps import return_freed_memory

MIB = 1 << 20


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has these functions")
def test_free_pages_between_used_blocks_are_returned_to_the_system():
    # Python allocates blocks over 512 bytes with malloc. While `kept` lives, malloc keeps the end of its heap.
    blocks = [b"x" * 1000 + bytes([index % 256]) for index in range(128 * 1024)]
    kept = blocks[::128]
    del blocks
    bytes_before = resident_bytes()
    return_freed_memory()
    assert resident_bytes() < bytes_before - 64 * MIB
    assert all(len(block) == 1001 for block in kept)
