"""Gives requests their share of the cache, finds prompts that begin like earlier ones, and takes everything back.

Of a model with recurrent layers a prompt that begins like an earlier one can only go on where a checkpoint of their
state is, every block before which must be there too. This room must not know about steps, budgets or devices: the
scheduler asks, the answer is numbers of blocks and slots.
"""

from collections.abc import Sequence
from typing import NamedTuple

from nanovllm_core.cache.block_pool import BlockPool
from nanovllm_core.cache.prefix import PrefixHasher
from nanovllm_core.cache.state_pool import NULL_SLOT, StatePool
from nanovllm_core.config import PrefixHash
from nanovllm_core.request import Request


class BlockShortage(NamedTuple):
    """Why a request was not admitted: it needs so many free blocks."""

    num_blocks: int


class CacheManager:
    """The block table of every request that has one, and where the model is recurrent (`states`), its slot."""

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

    def admit(self, request: Request, *, keep_watermark: bool) -> int | BlockShortage:
        """Give a request that holds nothing, and will get a row, the blocks of all its known tokens, cached ones where
        the prefix matches.

        keep_watermark: leave the watermark's share of blocks free.
        Returns the number of tokens that need not be computed, or a BlockShortage, and then nothing has changed. The
        last token is always computed, since its logits are wanted, and so are all after which log-probabilities of the
        prompt are still to come.
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

    def grow(self, requests: Sequence[Request]) -> list[int] | None:
        """Give each of `requests` one block more, in order; None, and nothing changed, when there are too few."""
        if len(requests) > self.pool.num_free:
            return None
        blocks = self.pool.allocate(len(requests))
        for request, block in zip(requests, blocks, strict=True):
            request.block_ids.append(block)
        return blocks

    def commit(self, request: Request, num_computed: int) -> None:
        """Let later prompts find the full blocks among the first `num_computed` tokens, whose step has ended, and the
        checkpoints among them.
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

    def release(self, request: Request) -> None:
        """Take back everything that `request` holds."""
        # Last block first: whoever comes back later matches from the front.
        self.pool.release(reversed(request.block_ids))
        request.block_ids = []
        request.num_committed_blocks = 0
        if self.states is not None:
            self.states.close(request)

    def hash_prompt(self, request: Request) -> None:
        """Hash the full blocks of a new request, which takes a millisecond for 16,000 tokens."""
        if self._hasher is not None:
            self._hasher.extend(request)

    def count_hits(self, request: Request, known: int | None) -> int:
        """Estimate the tokens at the start of a waiting request that need not be computed.

        known: what the last call for this request returned, None before. These tokens are not looked up again, although
        they may have been evicted.
        """
        if self.states is None:
            num_blocks = (known or 0) // self.block_size
            return (num_blocks + len(self._find_blocks(request, num_blocks))) * self.block_size
        # With recurrent layers the last checkpoint counts. To find it takes many look-ups, so it is found only once.
        if known is None:
            hits = self._find_blocks(request)
            known = self.states.find(request.block_hashes[: len(hits)])[0] * self.block_size
        return known

    def _find_blocks(self, request: Request, skip: int = 0) -> list[int]:
        """The cached blocks with which `request` begins, from block `skip` on."""
        hits: list[int] = []
        if self._hasher is None:
            return hits
        self._hasher.extend(request)
        most = (request.num_scored if request.num_to_score else request.num_tokens - 1) // self.block_size
        for block_hash in request.block_hashes[skip:most]:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
