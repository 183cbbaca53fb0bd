"""Totals of the copies between the caches, the host memory and files."""

from dataclasses import dataclass, field

from nanovllm_core.cache.host_memory import Direction


@dataclass(slots=True)
class TierCounters:
    """Totals since the engine started.

    num_loaded_tokens: number of tokens that were loaded from host memory and files.
    num_file_tokens: number of these tokens that were read from files.
    num_rejected_tokens: number of tokens that could have been loaded, but were faster to compute.
    wait_s: total seconds for which requests have waited for loads.
    num_bytes: number of copied bytes, by `Direction`.
    copy_s: sum of the seconds from the launch to the end of each batch of copies, by `Direction`.
    """

    num_loaded_tokens: int = 0
    num_file_tokens: int = 0
    num_rejected_tokens: int = 0
    num_failed_loads: int = 0
    wait_s: float = 0.0
    num_bytes: list[int] = field(default_factory=lambda: [0] * len(Direction))
    copy_s: list[float] = field(default_factory=lambda: [0.0] * len(Direction))
