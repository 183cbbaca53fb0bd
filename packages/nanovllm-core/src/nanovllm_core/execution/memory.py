"""Sizes and allocates cache memory, and checks that the host does not wait for the device."""

import gc
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from nanovllm_core.config import GIB, ResolvedConfig
from nanovllm_core.errors import ConfigError

# Bytes of a CPU's cache line.
_ALIGNMENT = 64


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros for a cache.

    On a CPU the system provides each page at its first use, so the process takes memory only for pages it writes.
    """
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -pages.ctypes.data % _ALIGNMENT
    return torch.from_numpy(pages[start : start + num_bytes]).view(dtype).view(tuple(shape))


def free_for_cache(config: ResolvedConfig, device: torch.device, run_largest_step: Callable[[], object]) -> int:
    """Bytes for the KV cache: on a CPU a configured value, on a GPU the memory that the largest step leaves free.

    run_largest_step: runs that step. Everything but the cache must be allocated before.
    """
    if device.type == "cpu":
        return int(config.cpu_cache_gib * GIB)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    gc.collect()
    torch.cuda.empty_cache()
    # Memory of other processes, and memory that the driver and libraries allocate themselves, counts as used.
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * config.gpu_memory_utilization) - (total - free) - activations
    if budget <= 0:
        raise ConfigError(
            f"gpu_memory_utilization {config.gpu_memory_utilization} of {total / GIB:.1f} GiB leaves nothing for the "
            f"KV cache: {(total - free) / GIB:.1f} GiB are in use and a step takes {activations / GIB:.1f} GiB; raise "
            "it, free the GPU, or lower max_num_batched_tokens"
        )
    return budget


@contextmanager
def forbidden_waiting() -> Generator[None]:
    """While this context is active, an operation that makes the host wait for the device raises RuntimeError.

    Waiting for an event is allowed, because it is explicit.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
