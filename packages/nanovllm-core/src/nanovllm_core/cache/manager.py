"""Allocates cache blocks and state slots to requests, and finds cached prefixes of prompts."""

from collections.abc import Sequence
from typing import NamedTuple

from nanovllm_core.cache.block_pool import BlockPool
from nanovllm_core.cache.prefix import PrefixHasher
from nanovllm_core.cache.state_pool import NULL_SLOT, StatePool
from nanovllm_core.config import PrefixHash
from nanovllm_core.request_state import RequestState


class BlockShortage(NamedTuple):
    """A request was not admitted because it needs `num_blocks` free blocks."""

    num_blocks: int


class CacheManager:
    """Manages the blocks of all requests, and their state slots if the model has recurrent layers (`states`).

    With recurrent layers, a cached prefix can be used only up to a state checkpoint.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool,
        prefix_hash: PrefixHash,
        watermark: float,
        states: StatePool | None = None,
    ):
        self.pool = BlockPool(num_blocks)
        self.states = states
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._hasher = PrefixHasher(prefix_hash, block_size) if prefix_caching else None
        self._watermark_blocks = int(num_blocks * watermark)

    def admit(self, request: RequestState, *, keep_watermark: bool) -> int | BlockShortage:
        """Allocate the blocks of all known tokens of a request without blocks, using cached blocks of its prefix.

        keep_watermark: leave the watermark's share of blocks free.
        Returns the number of cached tokens, or a BlockShortage, which changes nothing. The last token is never counted
        as cached, because its logits are needed; nor are tokens whose successor's log-probability is still wanted.
        """
        hits = self._find_blocks(request)
        shared, origin = len(hits), NULL_SLOT
        if self.states is not None:
            num_hits, origin = self.states.find(request.block_hashes[:shared])
            del hits[num_hits:]
        needed = self._blocks_for(request.num_tokens) - len(hits)
        revived = sum(1 for block in hits if self.pool.refs(block) == 0)
        spare = self._watermark_blocks if keep_watermark else 0
        if needed + revived + spare > self.pool.num_free:
            return BlockShortage(needed + revived + spare)
        for block in hits:
            self.pool.acquire(block)
        request.block_ids = hits + self.pool.allocate(needed)
        request.num_committed_blocks = len(hits)
        num_computed = len(hits) * self.block_size
        if self.states is not None:
            self.states.open(
                request, origin, begin=num_computed, shared=shared * self.block_size, caching=self.prefix_caching
            )
        return num_computed

    def grow(self, requests: Sequence[RequestState]) -> list[int] | None:
        """Allocate one more block for each of `requests`, in order. Returns None, without any change, if too few."""
        if len(requests) > self.pool.num_free:
            return None
        blocks = self.pool.allocate(len(requests))
        for request, block in zip(requests, blocks, strict=True):
            request.block_ids.append(block)
        return blocks

    def commit(self, request: RequestState, num_computed: int) -> None:
        """Register full blocks and checkpoints within the first `num_computed` tokens, so that later prompts find them.

        The step that computed these tokens must have finished.
        """
        full = num_computed // self.block_size
        if self._hasher is None or full <= request.num_committed_blocks:
            return
        self._hasher.extend(request)
        for index in range(request.num_committed_blocks, full):
            self.pool.register(request.block_ids[index], request.block_hashes[index])
        request.num_committed_blocks = full
        if self.states is not None:
            self.states.commit(request, num_computed)

    def release(self, request: RequestState) -> None:
        """Release all blocks and the state slot of `request`."""
        # The last block first, so that it is evicted first: later prompts match from the front.
        self.pool.release(reversed(request.block_ids))
        request.block_ids = []
        request.num_committed_blocks = 0
        if self.states is not None:
            self.states.close(request)

    def hash_prompt(self, request: RequestState) -> None:
        """Hash the full blocks of a new request. This takes a millisecond for 16,000 tokens."""
        if self._hasher is not None:
            self._hasher.extend(request)

    def count_hits(self, request: RequestState, known: int | None) -> int:
        """Estimate the cached tokens at the start of a waiting request.

        known: result of the last call for this request, or None. These tokens are not searched again, although they may
            have been evicted.
        """
        if self.states is None:
            num_blocks = (known or 0) // self.block_size
            return (num_blocks + len(self._find_blocks(request, num_blocks))) * self.block_size
        # With recurrent layers the last checkpoint counts. Finding it takes many lookups, so search only once.
        if known is None:
            hits = self._find_blocks(request)
            known = self.states.find(request.block_hashes[: len(hits)])[0] * self.block_size
        return known

    def _find_blocks(self, request: RequestState, skip: int = 0) -> list[int]:
        """The cached blocks with which `request` begins, from block `skip` on."""
        hits: list[int] = []
        if self._hasher is None:
            return hits
        self._hasher.extend(request)
        most = (request.num_scored_tokens if request.num_unscored_tokens else request.num_tokens - 1) // self.block_size
        for block_hash in request.block_hashes[skip:most]:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
