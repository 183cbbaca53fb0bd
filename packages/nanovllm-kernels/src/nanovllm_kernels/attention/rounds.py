"""Estimates how long a step's prompts attend, from the tiles into which kernels cut them."""

from collections.abc import Iterable
from typing import NamedTuple

# Rate of work lists relative to FlashAttention's (one H200, 32/8 heads: 183 to 272 of 610 TFLOP/s).
LISTED_RATE = 0.4


def attention_pairs(start: int, num_tokens: int) -> int:
    """Return the number of (query, visible key) pairs of `num_tokens` tokens after `start` computed tokens."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class AttentionRounds(NamedTuple):
    """A device that attends for `num_tiles` tiles at a time, each of `tile_tokens` query tokens of one prompt.

    few_tokens: work lists take the chunks with at least `min_context` computed tokens if these have fewer tokens.
    min_context: in tokens.
    """

    tile_tokens: int
    num_tiles: int
    few_tokens: int = 0
    min_context: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of a chunk whose tiles fill the device once."""
        return self.tile_tokens * self.num_tiles

    def pairs(self, chunks: Iterable[tuple[int, int]]) -> int:
        """Return the number of pairs that a fully busy device would compute in the time of all `chunks`.

        chunks: (computed tokens before the chunk, tokens of the chunk). Rounds matter: on an H200 with 32/8 heads over
        90,000 tokens, 512 tokens run at 574 TFLOP/s, and 528 tokens, which take two rounds, at 344.
        """
        longest_first = sorted(chunks, reverse=True)
        num_late = sum(num_tokens for start, num_tokens in longest_first if start >= self.min_context)
        total = in_rounds = num_free = 0
        for start, num_tokens in longest_first:
            pairs = attention_pairs(start, num_tokens)
            num_tiles = -(-num_tokens // self.tile_tokens)
            if start >= self.min_context and num_late < self.few_tokens:
                total += int(pairs * num_tiles * self.tile_tokens / (num_tokens * LISTED_RATE))
                continue
            total += pairs
            # Tiles of a chunk fill the rounds that longer chunks leave incomplete.
            num_rounds = -(-max(num_tiles - num_free, 0) // self.num_tiles)
            num_free += num_rounds * self.num_tiles - num_tiles
            in_rounds += num_rounds * self.num_tokens * pairs // num_tokens
        return max(total, in_rounds)


# For a device, such as a CPU, whose time does not depend on how chunks are cut.
SMALLEST_ROUNDS = AttentionRounds(1, 1)
