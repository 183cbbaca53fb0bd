"""The blocks of a paged cache: who holds each, and which to give out next.

A block is in use (held by one or more requests), cached (held by nobody, its contents still found by hash) or empty.
Cached blocks are evicted oldest first, and only once no empty one is left. This room must not know what a block holds
or what its hash is made of.
"""

from collections import OrderedDict
from collections.abc import Iterable

from nanovllm_core.request import BlockHash

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1..num_blocks with reference counts; block 0 is the null block, which padding points at."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._refs = [0] * (num_blocks + 1)
        self._hashes: list[BlockHash | None] = [None] * (num_blocks + 1)
        self._by_hash: dict[BlockHash, int] = {}
        # Eviction order. Empty blocks stand in front of cached ones, and those in the order they were released.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, empty or cached."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose contents can still be found."""
        return self._num_cached

    def refs(self, block: int) -> int:
        """How many requests hold `block`."""
        return self._refs[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks for one holder, evicting cached ones where it must; the caller has checked `num_free`."""
        blocks: list[int] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, block: int) -> None:
        """Become a further holder of a block found by `lookup`."""
        if self._refs[block] == 0:
            del self._free[block]
            self._num_cached -= 1
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Stop holding `blocks`, given in the order in which they may be evicted.

        Raises RuntimeError on a double free.
        """
        for block in blocks:
            if self._refs[block] <= 0:
                raise RuntimeError(f"block {block} was released more often than it was taken")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hashes[block] is not None:
                    self._num_cached += 1
                else:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, block_hash: BlockHash) -> None:
        """Let `block` be found under `block_hash`; of two blocks with the same contents the first is found."""
        if block_hash not in self._by_hash:
            self._by_hash[block_hash] = block
            self._hashes[block] = block_hash

    def lookup(self, block_hash: BlockHash) -> int | None:
        """The block found under `block_hash`, in use or cached."""
        return self._by_hash.get(block_hash)

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block] = None
            self._num_cached -= 1
