"""The memory of the caches: its layout, its size, and its tensors."""

import gc
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm_core.cache.state_pool import NULL_SLOT
from nanovllm_core.config import BLOCK_SIZES, GIB, ResolvedConfig
from nanovllm_core.errors import ConfigError
from nanovllm_core.model import CacheSpec, MLASpec, PagedSpec, StateCache, StateSpec
from nanovllm_kernels import fp8
from nanovllm_kernels.attention import best_page_size
from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL, copy_states

# Maximum number of checkpoint slots (saved states) per running request. All requests share these slots.
# A prompt of 8,192 tokens saves 8 checkpoints.
CHECKPOINT_SLOTS_PER_REQUEST = 8
# Maximum number of blocks, unless running requests alone can use more. The host keeps about 200 bytes per block.
MAX_CACHED_BLOCKS = 1 << 20
# Maximum share of the cache's memory for state slots, unless the slots of running requests alone take more.
STATE_MEMORY_SHARE = 0.5
_CACHE_LINE_BYTES = 64  # alignment of caches on a CPU


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Shapes and dtypes of a model's caches.

    state_specs: specs of the recurrent layers, with space for drafts.
    state_dtype: dtype of `StateCache.recurrent`.
    conv_dtype: dtype of `StateCache.conv_inputs`.
    draft: layout of the draft model's caches; None without draft model. Both models use the same block indices.
    """

    attention_specs: tuple[PagedSpec | MLASpec, ...]
    state_specs: tuple[StateSpec, ...]
    block_size: int
    kv_cache_dtype: torch.dtype
    state_dtype: torch.dtype
    conv_dtype: torch.dtype
    draft: "CacheLayout | None" = None

    @classmethod
    def from_specs(
        cls,
        specs: Sequence[CacheSpec],
        config: ResolvedConfig,
        max_drafts: int = 0,
        draft_specs: Sequence[CacheSpec] = (),
    ) -> "CacheLayout":
        """The layout for a model's `cache_specs()`. max_drafts: maximum number of drafts per request and step.

        draft_specs: `cache_specs()` of the draft model.
        Raises ValueError if attention layers of a model differ. Raises ConfigError if the configured block size is too
        large, or if the draft model has recurrent layers.
        """
        attention_specs = tuple(spec for spec in specs if not isinstance(spec, StateSpec))
        state_specs = tuple(spec.with_drafts(max_drafts) for spec in specs if isinstance(spec, StateSpec))
        attention, *other_specs = dict.fromkeys(attention_specs)
        if other_specs:
            raise ValueError(
                f"cache_specs() gives both {attention} and {other_specs[0]}: all attention layers of a model must be "
                "alike"
            )
        block_size = choose_block_size(config, attention, has_recurrent_layers=bool(state_specs))
        dtypes = config.torch_kv_cache_dtype, config.torch_state_dtype, config.torch_dtype
        draft = cls.from_specs(draft_specs, replace(config, block_size=block_size)) if draft_specs else None
        if draft is not None and draft.state_specs:
            raise ConfigError("the draft model has recurrent layers: use a draft model whose layers all have attention")
        return cls(attention_specs, state_specs, block_size, *dtypes, draft)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all attention layers, including FP8 scales and the draft model."""
        scale_bytes = fp8.SCALE_BYTES if self.kv_cache_dtype == fp8.DTYPE else 0
        shapes = map(token_shape, self.attention_specs)
        token_bytes = sum(heads * (head_dim * self.kv_cache_dtype.itemsize + scale_bytes) for heads, head_dim in shapes)
        return token_bytes * self.block_size + (0 if self.draft is None else self.draft.block_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one state slot in all recurrent layers; 0 for a model without recurrent layers."""
        state_item_bytes, conv_item_bytes = self.state_dtype.itemsize, self.conv_dtype.itemsize
        return sum(
            math.prod(spec.recurrent) * state_item_bytes + math.prod(spec.conv_inputs) * conv_item_bytes
            for spec in self.state_specs
        )


class CacheSize(NamedTuple):
    """The size of the caches, not counting the null block and the null slot (index 0), which padding uses."""

    num_blocks: int
    num_state_slots: int
    max_model_len: int


class CacheMemory:
    """The tensors of all caches of one rank.

    `num_blocks` and `num_state_slots` do not count the null block and the null slot.
    kv_caches, kv_scales, state_caches: one per layer with such a cache. Shapes: see `ForwardContext`.
    draft: the caches of the draft model; None without draft model.
    """

    def __init__(self, layout: CacheLayout, device: torch.device):
        self.layout = layout
        self._device = device
        self.draft = None if layout.draft is None else CacheMemory(layout.draft, device)
        self.allocate(0, 0)

    def allocate(self, num_blocks: int, num_state_slots: int) -> None:
        """Replace all tensors with zeros for `num_blocks` blocks and `num_state_slots` state slots."""
        layout, device = self.layout, self._device
        self.num_blocks = num_blocks
        self.num_state_slots = num_state_slots
        if self.draft is not None:
            self.draft.allocate(num_blocks, 0)
        # Free the old tensors before the new tensors are allocated.
        self.kv_caches: tuple[Tensor, ...] = ()
        self.kv_scales: tuple[Tensor, ...] = ()
        self.state_caches: tuple[StateCache, ...] = ()
        self._stacked_states: dict[StateSpec, StateCache] = {}
        self.kv_caches = tuple(
            allocate_zeros((num_blocks + 1, layout.block_size, *token_shape(spec)), layout.kv_cache_dtype, device)
            for spec in layout.attention_specs
        )
        if layout.kv_cache_dtype == fp8.DTYPE:
            self.kv_scales = tuple(map(fp8.make_scales, self.kv_caches))
        # Layers with equal specs share tensors [layers, slots, ...], so that one kernel copies a slot in all layers.
        self._stacked_states = {
            spec: StateCache(
                allocate_zeros((num_layers, num_state_slots + 1, *spec.recurrent), layout.state_dtype, device),
                allocate_zeros((num_layers, num_state_slots + 1, *spec.conv_inputs), layout.conv_dtype, device),
            )
            for spec, num_layers in Counter(layout.state_specs).items()
        }
        layer_states = {spec: map(StateCache, *states) for spec, states in self._stacked_states.items()}
        self.state_caches = tuple(next(layer_states[spec]) for spec in layout.state_specs)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys, values and scales."""
        return self.layout.block_bytes * (self.num_blocks + 1)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of recurrent layers."""
        return self.layout.slot_bytes * (self.num_state_slots + 1)

    @property
    def caches_by_kind(self) -> list[list[Tensor]]:
        """[tensors that hold blocks, tensors that hold state slots]. Without recurrent layers, only the first list."""
        draft = self.draft
        blocks = [*self.kv_caches, *self.kv_scales, *(() if draft is None else (*draft.kv_caches, *draft.kv_scales))]
        states = [tensor for cache in self.state_caches for tensor in cache]
        return [blocks, states] if states else [blocks]

    def copy_states(self, sources: Tensor, targets: Tensor) -> None:
        """Copy states between slots. sources, targets: int64 [n], in an order that `order_slot_copies` returns."""
        for states in self._stacked_states.values():
            for stacked in states:
                copy_states(stacked, sources, targets)


def choose_block_size(config: ResolvedConfig, attention: PagedSpec | MLASpec, *, has_recurrent_layers: bool) -> int:
    """Tokens per block: the configured number, else the number with which the attention kernels are fastest.

    Without a configured number, models with latent attention or recurrent layers get the smallest size. Other models
    get the smallest size if a step can't have one token per running request and also a whole block of a prompt.
    Raises ConfigError if a block of a model with recurrent layers would have more than CHECKPOINT_INTERVAL tokens.
    """
    min_size = min(BLOCK_SIZES)
    if config.block_size is not None:
        if has_recurrent_layers and config.block_size > CHECKPOINT_INTERVAL:
            raise ConfigError(
                f"block_size is {config.block_size}, but must be at most {CHECKPOINT_INTERVAL} for a model with "
                "recurrent layers"
            )
        return config.block_size
    if has_recurrent_layers or isinstance(attention, MLASpec):
        return min_size
    fastest_size = best_page_size(attention.head_dim, config.torch_kv_cache_dtype, config.attention_backend)
    return fastest_size if config.max_seqs_per_group + fastest_size <= config.max_tokens_per_group else min_size


def plan_cache(config: ResolvedConfig, layout: CacheLayout, free_bytes: int) -> CacheSize:
    """Choose the size of one rank's cache: `config.num_blocks` blocks if set, else as many as fit into `free_bytes`.

    Without prefix caching, the cache gets at most the blocks that all running requests use at full length.
    Raises ConfigError if the cache is too small for one request, or for one state slot per running request.
    """
    blocks_per_request = -(-config.max_model_len // layout.block_size)
    slot_bytes = layout.slot_bytes
    num_state_slots = _plan_slots(config, free_bytes, slot_bytes) if slot_bytes else 0
    if num_state_slots:
        free_bytes -= (num_state_slots + 1) * slot_bytes
    if config.num_blocks is None:
        max_used_blocks = blocks_per_request * config.max_seqs_per_group
        max_blocks = max(max_used_blocks, MAX_CACHED_BLOCKS) if config.prefix_caching else max_used_blocks
        num_blocks = min(max(free_bytes // layout.block_bytes - 1, 0), max_blocks)
    else:
        num_blocks = config.num_blocks
    if num_blocks >= blocks_per_request:
        return CacheSize(num_blocks, num_state_slots, config.max_model_len)
    if config.may_shorten_context and num_blocks >= 2:
        return CacheSize(num_blocks, num_state_slots, num_blocks * layout.block_size)
    raise ConfigError(
        f"the KV cache holds {num_blocks * layout.block_size} tokens, fewer than max_model_len "
        f"({config.max_model_len}): lower max_model_len, or give the cache more memory (gpu_memory_utilization, "
        "cpu_cache_gib, num_blocks)"
    )


def _plan_slots(config: ResolvedConfig, free_bytes: int, slot_bytes: int) -> int:
    # One slot per running request, and one for the checkpoint from which a request starts. Requests start one after
    # another.
    min_slots = config.max_seqs_per_group + config.prefix_caching
    if config.num_state_slots is not None:
        if config.num_state_slots < min_slots:
            raise ConfigError(
                f"num_state_slots is {config.num_state_slots}, but must be at least {min_slots} per rank, "
                f"for max_num_seqs {config.max_num_seqs}"
            )
        return config.num_state_slots
    min_bytes = (min_slots + 1) * slot_bytes
    if min_bytes > free_bytes:
        raise ConfigError(
            f"max_num_seqs is {config.max_num_seqs}, but the requests' states take {min_bytes / GIB:.2f} GiB per rank, "
            f"and there are {free_bytes / GIB:.2f} GiB for the cache: lower max_num_seqs, or give the cache more "
            "memory (gpu_memory_utilization, cpu_cache_gib)"
        )
    if not config.prefix_caching:
        return min_slots
    max_slots = config.max_seqs_per_group * (1 + CHECKPOINT_SLOTS_PER_REQUEST)
    return max(min_slots, min(max_slots, int(free_bytes * STATE_MEMORY_SHARE) // slot_bytes - 1))


def measure_free_bytes(config: ResolvedConfig, device: torch.device, run_largest_step: Callable[[], object]) -> int:
    """The number of bytes for the cache: `cpu_cache_gib` on a CPU, or the GPU memory that the largest step leaves free.

    run_largest_step: runs the step that takes the most memory. Allocate weights and all other tensors before this call.
    Raises ConfigError if no memory is free.
    """
    if device.type == "cpu":
        return int(config.cpu_cache_gib * GIB)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    allocated_before = torch.cuda.memory_allocated(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    step_bytes = torch.cuda.max_memory_allocated(device) - allocated_before
    gc.collect()
    torch.cuda.empty_cache()
    # `total - free` includes the memory of other processes, of the driver and of libraries.
    free, total = torch.cuda.mem_get_info(device)
    free_bytes = int(total * config.gpu_memory_utilization) - (total - free) - step_bytes
    if free_bytes <= 0:
        raise ConfigError(
            f"gpu_memory_utilization {config.gpu_memory_utilization} of {total / GIB:.1f} GiB leaves nothing for the "
            f"KV cache: {(total - free) / GIB:.1f} GiB are in use and a step takes {step_bytes / GIB:.1f} GiB; raise "
            "gpu_memory_utilization, free the GPU, or lower max_num_batched_tokens"
        )
    return free_bytes


def allocate_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On a CPU, pages that are never written take no memory."""
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.zeros(num_bytes + _CACHE_LINE_BYTES, np.uint8)
    start = -buffer.ctypes.data % _CACHE_LINE_BYTES
    return torch.from_numpy(buffer[start : start + num_bytes]).view(dtype).view(tuple(shape))


def order_slot_copies(copies: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Order copies of slots such that each slot is read before a copy overwrites it.

    copies: pairs (source, target). Each target occurs once. The null slot does not occur.
    If copies form a cycle, the result has an additional pair, which first copies one slot of the cycle to NULL_SLOT.
    """
    source_by_target = {target: source for source, target in copies}
    if source_by_target.keys().isdisjoint(source_by_target.values()):
        return list(copies)
    num_readers = Counter(source_by_target.values())
    writable_targets = [target for target in source_by_target if not num_readers[target]]
    ordered: list[tuple[int, int]] = []
    while source_by_target:
        if not writable_targets:
            # Only cycles remain: each slot is the source of one copy.
            saved_slot, reading_slot = next((source, target) for target, source in source_by_target.items())
            ordered.append((saved_slot, NULL_SLOT))
            source_by_target[reading_slot] = NULL_SLOT
            writable_targets.append(saved_slot)
        target = writable_targets.pop()
        source = source_by_target.pop(target)
        ordered.append((source, target))
        num_readers[source] -= 1
        if source in source_by_target and not num_readers[source]:
            writable_targets.append(source)
    return ordered


def token_shape(spec: PagedSpec | MLASpec) -> tuple[int, int]:
    """Shape of one token in a layer's cache: (number of key and value heads, dimensions per head)."""
    if isinstance(spec, MLASpec):
        return 1, spec.latent_dim + spec.rope_dim
    return 2 * spec.num_kv_heads, spec.head_dim
