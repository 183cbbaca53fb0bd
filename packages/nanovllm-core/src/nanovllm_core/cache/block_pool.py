"""Allocates the blocks of a paged cache, with reference counts and a lookup by hash.

A block is in use (one or more holders), cached (no holder, contents found by hash) or empty (neither). Cached blocks
are evicted oldest first, once no empty block is left.
"""

from collections import OrderedDict
from collections.abc import Iterable

from nanovllm_core.request_state import BlockHash

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1..num_blocks. Block 0 is the null block, which padding uses."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._num_holders = [0] * (num_blocks + 1)
        self._hashes: list[BlockHash | None] = [None] * (num_blocks + 1)
        self._block_by_hash: dict[BlockHash, int] = {}
        # Free blocks in the order of allocation: empty blocks, then cached blocks in the order of their release.
        self._free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        """Number of blocks without a holder, empty or cached."""
        return len(self._free_blocks)

    @property
    def num_cached(self) -> int:
        """Number of blocks without a holder whose contents can still be found."""
        return self._num_cached

    def count_holders(self, block: int) -> int:
        """Number of holders of `block`."""
        return self._num_holders[block]

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks for one holder, evicting cached blocks if needed.

        The caller has checked `num_free`.
        """
        blocks: list[int] = []
        for _ in range(count):
            block, _ = self._free_blocks.popitem(last=False)
            self._forget_hash(block)
            self._num_holders[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, block: int) -> None:
        """Add a holder to a block found by `lookup`."""
        if self._num_holders[block] == 0:
            del self._free_blocks[block]
            self._num_cached -= 1
        self._num_holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each of `blocks`, given in the order in which they may be evicted.

        Raises RuntimeError if a block has no holder.
        """
        for block in blocks:
            if self._num_holders[block] <= 0:
                raise RuntimeError(f"block {block} was released more often than it was acquired")
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free_blocks[block] = None
                if self._hashes[block] is not None:
                    self._num_cached += 1
                else:
                    self._free_blocks.move_to_end(block, last=False)

    def register(self, block: int, block_hash: BlockHash) -> None:
        """Make `lookup` find `block` by `block_hash`, unless another block has that hash already."""
        if block_hash not in self._block_by_hash:
            self._block_by_hash[block_hash] = block
            self._hashes[block] = block_hash

    def lookup(self, block_hash: BlockHash) -> int | None:
        """The block with that hash, in use or cached; None if no block has the hash."""
        return self._block_by_hash.get(block_hash)

    def _forget_hash(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._block_by_hash[block_hash]
            self._hashes[block] = None
            self._num_cached -= 1
