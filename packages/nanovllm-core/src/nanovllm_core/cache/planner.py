"""Computes the number of cache blocks and state slots that fit into the memory, and the longest request they allow."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nanovllm_core.config import GIB, PAGE_SIZES, ConfigError, ResolvedConfig
from nanovllm_core.model import MLASpec, PagedSpec, StateSpec
from nanovllm_kernels import fp8
from nanovllm_kernels.attention import best_page_size
from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL

# Checkpoint slots per row: as many checkpoints as a prompt of 8,192 tokens leaves.
CHECKPOINTS_PER_ROW = 8
# Most blocks of a prefix cache, because the host keeps about 200 bytes per block. Only toy models reach the limit.
MAX_CACHED_BLOCKS = 1 << 20
# Share of the memory for state slots, unless the slots of the rows alone take more.
STATE_SHARE = 0.5


class CachePlan(NamedTuple):
    """Blocks and state slots to allocate, without the null ones, and the longest request in tokens."""

    num_blocks: int
    num_slots: int
    max_model_len: int


def slot_shape(spec: PagedSpec | MLASpec) -> tuple[int, int]:
    """Shape of one token in a layer's cache: heads (keys and values together), numbers per head."""
    if isinstance(spec, MLASpec):
        return 1, spec.latent_dim + spec.rope_dim
    return 2 * spec.num_kv_heads, spec.head_dim


def bytes_per_block(specs: Sequence[PagedSpec | MLASpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, including FP8 scales."""
    scale_bytes = fp8.SCALE_BYTES if dtype == fp8.DTYPE else 0
    shapes = map(slot_shape, specs)
    return sum(heads * (head_dim * dtype.itemsize + scale_bytes) for heads, head_dim in shapes) * block_size


def bytes_per_slot(specs: Sequence[StateSpec], state_dtype: torch.dtype, dtype: torch.dtype) -> int:
    """Bytes of one state slot over all recurrent layers."""
    return sum(
        math.prod(spec.recurrent) * state_dtype.itemsize + math.prod(spec.conv) * dtype.itemsize for spec in specs
    )


def choose_block_size(config: ResolvedConfig, attention: PagedSpec | MLASpec, *, has_states: bool) -> int:
    """Tokens per block: the configured number, or the one that attention kernels read fastest within the token budget.

    attention: cache spec of the model's attention layers.
    Raises ConfigError if a block would be longer than the distance of state checkpoints.
    """
    smallest = min(PAGE_SIZES)
    if config.block_size is not None:
        if has_states and config.block_size > CHECKPOINT_INTERVAL:
            raise ConfigError(
                f"block_size is {config.block_size}, but must be at most {CHECKPOINT_INTERVAL} for a model with "
                "recurrent layers"
            )
        return config.block_size
    if has_states or isinstance(attention, MLASpec):
        return smallest
    best = best_page_size(attention.head_dim, config.kv_cache_dtype, config.attention_backend)
    return best if config.max_num_seqs + best <= config.max_num_batched_tokens else smallest


def plan_cache(
    config: ResolvedConfig, block_size: int, free_bytes: int, block_bytes: int, slot_bytes: int = 0
) -> CachePlan:
    """Size the cache: `config.num_blocks` blocks if set, else as many as fit into `free_bytes`.

    Without prefix caching, there are no more blocks than all running requests use at full length.
    slot_bytes: bytes of a state slot; 0 for a model without recurrent layers. Every row gets a slot; the other slots
        hold checkpoints.
    Raises ConfigError if the cache is too small for one request or for the slots of all rows.
    """
    blocks_per_request = -(-config.max_model_len // block_size)
    num_slots = _plan_slots(config, free_bytes, slot_bytes) if slot_bytes else 0
    if num_slots:
        free_bytes -= (num_slots + 1) * slot_bytes
    if config.num_blocks is None:
        in_use = blocks_per_request * config.max_num_seqs
        most = max(in_use, MAX_CACHED_BLOCKS) if config.prefix_caching else in_use
        num_blocks = min(max(free_bytes // block_bytes - 1, 0), most)
    else:
        num_blocks = config.num_blocks
    if num_blocks >= blocks_per_request:
        return CachePlan(num_blocks, num_slots, config.max_model_len)
    if config.may_shorten and num_blocks >= 2:
        return CachePlan(num_blocks, num_slots, num_blocks * block_size)
    raise ConfigError(
        f"the KV cache holds {num_blocks * block_size} tokens, fewer than max_model_len ({config.max_model_len}): "
        "lower max_model_len, or give the cache more memory (gpu_memory_utilization, cpu_cache_gib, num_blocks)"
    )


def _plan_slots(config: ResolvedConfig, free_bytes: int, slot_bytes: int) -> int:
    # One more slot than rows, so that a checkpoint can be read when the last row begins.
    least = config.max_num_seqs + config.prefix_caching
    if config.num_state_slots is not None:
        if config.num_state_slots < least:
            raise ConfigError(
                f"num_state_slots is {config.num_state_slots}, but must be at least {least}, for max_num_seqs "
                f"{config.max_num_seqs}"
            )
        return config.num_state_slots
    if (least + 1) * slot_bytes > free_bytes:
        raise ConfigError(
            f"the states of max_num_seqs {config.max_num_seqs} requests take {(least + 1) * slot_bytes / GIB:.2f} GiB, "
            f"but there are {free_bytes / GIB:.2f} GiB for the cache: lower max_num_seqs, or give the cache more "
            "memory (gpu_memory_utilization, cpu_cache_gib)"
        )
    if not config.prefix_caching:
        return least
    most = config.max_num_seqs * (1 + CHECKPOINTS_PER_ROW)
    return max(least, min(most, int(free_bytes * STATE_SHARE) // slot_bytes - 1))
