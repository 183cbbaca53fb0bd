"""Memory of caches on a CPU."""

import resource

import pytest
import torch

from nanovllm_core.execution.memory import zeros

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_zeros_are_aligned_and_writable(dtype):
    for shape in [(3, 5), (1000, 7, 1), (1,)]:
        found = zeros(shape, dtype, CPU)
        assert (found.shape, found.dtype, found.data_ptr() % 64) == (shape, dtype, 0)
        assert not found.float().any()
        found.fill_(1)
        assert bool((found.float() == 1).all())


def test_a_large_cache_takes_no_memory_before_it_is_used():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = zeros((1 << 10, 1 << 20), torch.bfloat16, CPU)
    cache[5] = 1
    assert float(cache[5, 7]) == 1
    # Kilobytes on Linux, bytes on macOS.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 29
