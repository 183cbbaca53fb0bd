"""From bytes to blocks: how many the memory allows, and how long a request may get with them.

This room must not know where the memory is or who measured it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nanovllm_core.config import ConfigError, ResolvedConfig
from nanovllm_core.model import MLASpec, PagedSpec
from nanovllm_kernels import fp8


class CachePlan(NamedTuple):
    """Blocks to allocate, without the null block, and the longest request that they allow, in tokens."""

    num_blocks: int
    max_model_len: int


def slot_shape(spec: PagedSpec | MLASpec) -> tuple[int, int]:
    """What one layer's cache has a token: how many heads, keys and values together, of how many numbers each."""
    if isinstance(spec, MLASpec):
        return 1, spec.latent_dim + spec.rope_dim
    return 2 * spec.num_kv_heads, spec.head_dim


def bytes_per_block(specs: Sequence[PagedSpec | MLASpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes one block takes over all layers, in FP8 with its scales."""
    beside = fp8.SCALE_BYTES if dtype == fp8.DTYPE else 0
    shapes = map(slot_shape, specs)
    return sum(heads * (head_dim * dtype.itemsize + beside) for heads, head_dim in shapes) * block_size


def plan_cache(config: ResolvedConfig, free_bytes: int, block_bytes: int) -> CachePlan:
    """Size the cache: `config.num_blocks` if given, else what `free_bytes` hold, up to all requests at full length.

    Raises ConfigError when the cache would be too small for one request.
    """
    size = config.block_size
    wanted = -(-config.max_model_len // size)
    if config.num_blocks is None:
        num_blocks = min(max(free_bytes // block_bytes - 1, 0), wanted * config.max_num_seqs)
    else:
        num_blocks = config.num_blocks
    if num_blocks >= wanted:
        return CachePlan(num_blocks, config.max_model_len)
    if config.may_shorten and num_blocks >= 2:
        return CachePlan(num_blocks, num_blocks * size)
    raise ConfigError(
        f"the KV cache holds {num_blocks * size} tokens, fewer than max_model_len ({config.max_model_len}): lower "
        "max_model_len, or give the cache more memory (gpu_memory_utilization, cpu_cache_gib, num_blocks)"
    )
