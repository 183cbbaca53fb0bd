"""What the device is asked of beside kernels: how much memory the KV cache may have, and not to be waited for.

This room must not know what the cache is used for.
"""

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from nanovllm_core.config import GIB, ConfigError, ResolvedConfig


def free_for_cache(config: ResolvedConfig, device: torch.device, rehearse: Callable[[], object]) -> int:
    """Bytes for the KV cache: an option's value on the CPU, on a GPU what a rehearsal of the largest step leaves.

    rehearse: runs such a step, with everything else that will be allocated already there.
    """
    if device.type == "cpu":
        return int(config.cpu_cache_gib * GIB)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    rehearse()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    gc.collect()
    torch.cuda.empty_cache()
    # What others use of this GPU, and what the driver and libraries took beside the allocator, counts as used too.
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
    """Make it an error that the host waits for the device, in this process, meanwhile. Raises RuntimeError.

    Waiting for an event is none: it is how one says what is waited for, and that it is meant.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
