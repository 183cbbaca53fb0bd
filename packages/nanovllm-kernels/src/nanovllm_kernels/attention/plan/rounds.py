"""Estimates the time of attention in a step's prompts, from the tiles into which kernels cut the prompts."""

from collections.abc import Iterable
from typing import NamedTuple

# Speed of work lists relative to FlashAttention, on an H200 with 32 query heads and 8 key-value heads.
WORK_LIST_RATE = 0.4


def attention_pairs(start: int, num_tokens: int) -> int:
    """Return the number of (query, visible key) pairs of `num_tokens` tokens after `start` computed tokens."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class AttentionRounds(NamedTuple):
    """A device attends in rounds of `num_tiles` tiles. A tile holds `tile_tokens` tokens of one prompt.

    work_list_limit, min_work_list_context: work lists compute the chunks with at least `min_work_list_context` computed
        tokens, if these chunks together have fewer than `work_list_limit` tokens.
    """

    tile_tokens: int
    num_tiles: int
    work_list_limit: int = 0
    min_work_list_context: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of a chunk whose tiles fill the device once."""
        return self.tile_tokens * self.num_tiles

    def estimate_pairs(self, chunks: Iterable[tuple[int, int]]) -> int:
        """Return the number of (query, key) pairs that a fully busy device would compute in the time of all `chunks`.

        chunks: (computed tokens before the chunk, tokens of the chunk).
        """
        longest_first = sorted(chunks, reverse=True)
        num_late_tokens = sum(num_tokens for start, num_tokens in longest_first if start >= self.min_work_list_context)
        busy_pairs = round_pairs = num_idle_tiles = 0
        for start, num_tokens in longest_first:
            pairs = attention_pairs(start, num_tokens)
            num_tiles = -(-num_tokens // self.tile_tokens)
            if start >= self.min_work_list_context and num_late_tokens < self.work_list_limit:
                busy_pairs += int(pairs * num_tiles * self.tile_tokens / (num_tokens * WORK_LIST_RATE))
                continue
            busy_pairs += pairs
            # Tiles of a chunk fill the rounds that longer chunks leave incomplete.
            num_rounds = -(-max(num_tiles - num_idle_tiles, 0) // self.num_tiles)
            num_idle_tiles += num_rounds * self.num_tiles - num_tiles
            round_pairs += num_rounds * self.num_tokens * pairs // num_tokens
        return max(busy_pairs, round_pairs)


# For a device, such as a CPU, whose time does not depend on how chunks are cut.
ONE_TOKEN_ROUNDS = AttentionRounds(1, 1)
