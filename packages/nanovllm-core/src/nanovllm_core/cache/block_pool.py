"""Allocates the blocks of a paged cache, counts their holders, and finds their contents by hash.

Holders are requests and copies in flight. A block in use has holders. A cached block has only a hash. An empty block
has neither. When no empty block is left, the cached block that was released first is evicted.
"""

from collections import OrderedDict
from collections.abc import Iterable

from nanovllm_core.request_state import BlockHash

NULL_BLOCK = 0  # padding reads and writes this block, which is never allocated


class BlockPool:
    """The blocks from 1 to num_blocks. Padding uses block 0, the null block.

    num_reserved: number of free blocks that `can_acquire` keeps free for allocations.
    blocks_with_draft_entries: blocks that hold a draft model's cache entries for all their tokens.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._num_holders = [0] * (num_blocks + 1)
        self._hashes: list[BlockHash | None] = [None] * (num_blocks + 1)
        self._block_by_hash: dict[BlockHash, int] = {}
        # Blocks without a holder, in the order in which `allocate` takes them: first empty blocks, then cached blocks.
        self._free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self.num_cached = 0
        self.num_reserved = 0
        self.blocks_with_draft_entries: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of empty and cached blocks."""
        return len(self._free_blocks)

    def count_holders(self, block: int) -> int:
        """Number of holders of `block`."""
        return self._num_holders[block]

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks for one holder, evicting cached blocks if needed. The caller checks `num_free`."""
        blocks = [self._free_blocks.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget_hash(block)
            self._num_holders[block] = 1
        self.blocks_with_draft_entries.difference_update(blocks)
        return blocks

    def can_acquire(self, block: int) -> bool:
        """Whether `block` is in use, or more than `num_reserved` blocks would stay free after `acquire`."""
        return self._num_holders[block] > 0 or self.num_free > self.num_reserved + 1

    def acquire(self, block: int) -> None:
        """Add a holder to a block that `lookup` has found."""
        if self._num_holders[block] == 0:
            del self._free_blocks[block]
            self.num_cached -= 1
        self._num_holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one holder from each block. Blocks without a holder can be evicted later, in the order of `blocks`.

        Raises RuntimeError if a block has no holder.
        """
        for block in blocks:
            if self._num_holders[block] <= 0:
                raise RuntimeError(f"block {block} was released more often than it was acquired")
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free_blocks[block] = None
                if self._hashes[block] is not None:
                    self.num_cached += 1
                else:
                    self._free_blocks.move_to_end(block, last=False)

    def register(self, block: int, block_hash: BlockHash) -> None:
        """Make `lookup` find `block` by `block_hash`, unless this hash already belongs to another block."""
        if block_hash not in self._block_by_hash:
            self._block_by_hash[block_hash] = block
            self._hashes[block] = block_hash

    def lookup(self, block_hash: BlockHash) -> int | None:
        """The block with this hash, in use or cached; None if no block has this hash."""
        return self._block_by_hash.get(block_hash)

    def touch(self, block: int) -> None:
        """Make a cached block the last cached block to be evicted."""
        if self._num_holders[block] == 0:
            self._free_blocks.move_to_end(block)

    def forget_hashes(self) -> None:
        """Forget all hashes. Cached blocks become empty."""
        self._block_by_hash.clear()
        self._hashes = [None] * (self.num_blocks + 1)
        self.num_cached = 0

    def _forget_hash(self, block: int) -> None:
        if (block_hash := self._hashes[block]) is not None:
            del self._block_by_hash[block_hash]
            self._hashes[block] = None
            self.num_cached -= 1
