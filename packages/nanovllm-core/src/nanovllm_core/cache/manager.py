"""Allocates cache blocks and state slots to requests, and finds cached prefixes of prompts."""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from nanovllm_core.cache.block_pool import BlockPool
from nanovllm_core.cache.host_memory import EntryKind
from nanovllm_core.cache.prefix import PrefixHasher
from nanovllm_core.cache.prefix_load import PrefixLoad
from nanovllm_core.cache.state_pool import NULL_SLOT, StatePool
from nanovllm_core.cache.tiers import HostTier
from nanovllm_core.config import HashAlgorithm
from nanovllm_core.request_state import BlockHash, RequestState


class BlockShortage(NamedTuple):
    """The result of `admit` if too few blocks are free. num_blocks: number of free blocks that the request needs."""

    num_blocks: int


class CacheManager:
    """Manages the blocks of all requests that share one cache.

    watermark: share of all blocks that stay free if `admit` is called with `keep_watermark`.
    state_pool: None for a model without recurrent layers.
    tier: keeps copies of cached entries in host memory; None without such copies.
    hash_secret: engines with equal secrets have equal SHA-256 hashes; None for a random secret.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool,
        hash_algorithm: HashAlgorithm,
        watermark: float,
        state_pool: StatePool | None = None,
        tier: HostTier | None = None,
        hash_secret: bytes | None = None,
    ):
        self.pool = BlockPool(num_blocks)
        self.state_pool = state_pool
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._hasher = PrefixHasher(hash_algorithm, block_size, hash_secret) if prefix_caching else None
        self._watermark_blocks = int(num_blocks * watermark)
        self._tier = tier
        self._group = 0
        self.pools = [self.pool] if state_pool is None else [self.pool, state_pool.slots]
        if tier is not None:
            self._group = tier.attach(self.pools)

    def admit(self, request: RequestState, *, keep_watermark: bool) -> int | BlockShortage:
        """Allocate blocks for all tokens of `request`, which holds no blocks yet. Reuse cached blocks of its prefix.

        keep_watermark: whether the share `watermark` of all blocks must stay free.
        Returns the number of cached tokens. If too few blocks are free, returns BlockShortage and allocates nothing.
        """
        cached_blocks = self._find_cached_blocks(request)
        num_found_blocks, source_slot = len(cached_blocks), NULL_SLOT
        if self.state_pool is not None:
            # Recurrent layers must start from a checkpoint, so use only the cached blocks before the last checkpoint.
            num_usable_blocks, source_slot = self.state_pool.find_checkpoint(request.block_hashes[:num_found_blocks])
            del cached_blocks[num_usable_blocks:]
            if self._tier is not None and source_slot:
                self._tier.queue_store(self._group, EntryKind.CHECKPOINT, request.block_hashes[num_usable_blocks - 1])
        num_new_blocks = -(-request.num_tokens // self.block_size) - len(cached_blocks)
        num_free_cached_blocks = sum(1 for block in cached_blocks if self.pool.count_holders(block) == 0)
        num_reserved_blocks = self._watermark_blocks if keep_watermark else 0
        num_needed_blocks = num_new_blocks + num_free_cached_blocks + num_reserved_blocks
        if num_needed_blocks > self.pool.num_free:
            return BlockShortage(num_needed_blocks)
        for block in cached_blocks:
            self.pool.acquire(block)
        request.block_ids = cached_blocks + self.pool.allocate(num_new_blocks)
        request.num_committed_blocks = len(cached_blocks)
        num_computed = len(cached_blocks) * self.block_size
        if self.state_pool is not None:
            self.state_pool.allocate(
                request,
                source_slot,
                num_computed=num_computed,
                num_shared=num_found_blocks * self.block_size,
                saves_checkpoints=self.prefix_caching,
            )
        return num_computed

    def should_await_other_load(self, request: RequestState) -> bool:
        """Whether `request` should wait for another request's load, which brings blocks that `request` needs."""
        if self._tier is None:
            return False
        return self._tier.is_worth_waiting(self._group, self.reusable_hashes(request))

    def start_load(self, request: RequestState) -> PrefixLoad | None:
        """Load more of an admitted request's prefix from `tier`.

        A request loads only once, unless it loses its blocks or a file could not be read.
        Returns None if `tier` has no more of the prefix, or if computing is faster. Otherwise the request must wait
        until the load has ended. Then call `finish_load`.
        """
        if self._tier is None or request.has_started_load:
            return None
        load = self._tier.start_load(request, self._group, self.reusable_hashes(request))
        request.has_started_load = load is not None
        return load

    def finish_load(self, load: PrefixLoad) -> None:
        """Make an ended load's entries findable. Release all blocks of its request, which must be admitted again."""
        if self._tier is not None:
            self._tier.finish_load(load)
        load.request.has_started_load = not load.may_retry
        self.release(load.request)

    def readmit(self, request: RequestState) -> int | None:
        """Admit a request right after `finish_load`, so that later loads do not evict the loaded blocks.

        Returns the number of cached tokens. Returns None if too few blocks or state slots are free; the request then
        holds nothing.
        """
        num_cached_tokens = self.admit(request, keep_watermark=False)
        if isinstance(num_cached_tokens, BlockShortage):
            return None
        if self.state_pool is not None and not self.state_pool.hold_source(request):
            self.release(request)
            return None
        return num_cached_tokens

    def end_hold(self, request: RequestState) -> None:
        """Let a readmitted request's source checkpoint be evicted. Call when the request's first step is planned."""
        if self.state_pool is not None:
            self.state_pool.end_hold(request)

    def has_loads(self) -> bool:
        """Whether loads are in flight. The blocks of their requests can't be freed before the loads end."""
        return self._tier is not None and self._tier.has_loads(self._group)

    def grow(self, requests: Sequence[RequestState]) -> list[int] | None:
        """Allocate one more block for each request. Returns None and allocates nothing if too few blocks are free."""
        if len(requests) > self.pool.num_free:
            return None
        blocks = self.pool.allocate(len(requests))
        for request, block in zip(requests, blocks, strict=True):
            request.block_ids.append(block)
        return blocks

    def commit(self, request: RequestState, num_computed: int) -> None:
        """Let later prompts find the full blocks and the checkpoints of the first `num_computed` tokens.

        The step that computed these tokens must have finished.
        """
        num_full_blocks = num_computed // self.block_size
        if self._hasher is None or num_full_blocks <= request.num_committed_blocks:
            return
        self._hasher.extend_hashes(request)
        for index in range(request.num_committed_blocks, num_full_blocks):
            self.pool.register(request.block_ids[index], request.block_hashes[index])
        first_new_block, request.num_committed_blocks = request.num_committed_blocks, num_full_blocks
        checkpoint_hashes = [] if self.state_pool is None else self.state_pool.commit(request, num_computed)
        if self._tier is not None:
            for block_hash in request.block_hashes[first_new_block:num_full_blocks]:
                self._tier.queue_store(self._group, EntryKind.BLOCK, block_hash)
            for block_hash in checkpoint_hashes:
                self._tier.queue_store(self._group, EntryKind.CHECKPOINT, block_hash)

    def mark_draft_entries(self, request: RequestState, num_tokens: int) -> None:
        """Record that the blocks hold a draft model's cache entries for the first `num_tokens` tokens."""
        self.pool.blocks_with_draft_entries.update(request.block_ids[: num_tokens // self.block_size])

    def count_draft_entries(self, request: RequestState, num_cached_tokens: int) -> int:
        """The number of leading tokens whose draft-model entries are in the cached blocks."""
        blocks = request.block_ids[: num_cached_tokens // self.block_size]
        return len([*takewhile(self.pool.blocks_with_draft_entries.__contains__, blocks)]) * self.block_size

    def release(self, request: RequestState) -> None:
        """Release all blocks and the state slot of `request`."""
        # The last block is evicted first, because later prompts can use a block only with all preceding blocks.
        if self._tier is not None:
            for block_hash in reversed(request.block_hashes[: request.num_committed_blocks]):
                self._tier.queue_store(self._group, EntryKind.BLOCK, block_hash)
        self.pool.release(reversed(request.block_ids))
        request.block_ids = []
        request.num_committed_blocks = 0
        if self.state_pool is not None:
            self.state_pool.release(request)

    def forget(self) -> None:
        """Forget all cached blocks and checkpoints."""
        self.pool.forget_hashes()
        if self.state_pool is not None:
            self.state_pool.slots.forget_hashes()

    def hash_prompt(self, request: RequestState) -> None:
        """Hash the full blocks of a new request."""
        if self._hasher is not None:
            self._hasher.extend_hashes(request)

    def estimate_cached_tokens(self, request: RequestState, last_estimate: int | None) -> int:
        """Estimate the number of tokens at the start of a waiting request that are cached or can be loaded.

        last_estimate: result of the last call for this request; None for the first call. These tokens are not searched
            again. Some may have been evicted since then, so the new estimate may be too high.
        """
        if self.state_pool is None:
            num_blocks = (last_estimate or 0) // self.block_size
            num_blocks += len(self._find_cached_blocks(request, num_blocks))
        # With recurrent layers, search only once, because finding the last checkpoint takes many lookups.
        elif last_estimate is None:
            num_blocks = len(self._find_cached_blocks(request))
            num_blocks, _ = self.state_pool.find_checkpoint(request.block_hashes[:num_blocks])
        else:
            return last_estimate
        if self._tier is not None and not request.has_started_load:
            num_blocks = self._tier.find_prefix(self._group, self.reusable_hashes(request), num_blocks)
        return num_blocks * self.block_size

    def _find_cached_blocks(self, request: RequestState, num_skipped: int = 0) -> list[int]:
        """The cached blocks at the beginning of `request`, without the first `num_skipped` blocks."""
        cached_blocks: list[int] = []
        for index in range(num_skipped, self._count_reusable_blocks(request)):
            block = self.pool.lookup(request.block_hashes[index])
            if block is None:
                break
            cached_blocks.append(block)
        return cached_blocks

    def reusable_hashes(self, request: RequestState) -> list[BlockHash]:
        """Hashes of the leading blocks that `request` may take from the cache instead of computing them."""
        return request.block_hashes[: self._count_reusable_blocks(request)]

    def _count_reusable_blocks(self, request: RequestState) -> int:
        """The length of `reusable_hashes`."""
        if self._hasher is None:
            return 0
        self._hasher.extend_hashes(request)
        # Cached tokens yield no logits, so use only cached blocks before the first token whose logits are needed.
        max_cached_tokens = (
            request.num_scheduled_prompt_logprobs if request.num_unscheduled_prompt_logprobs else request.num_tokens - 1
        )
        return max_cached_tokens // self.block_size
