"""How long the prompts of a step attend, as seen from the tiles into which kernels cut them."""

from collections.abc import Iterable
from typing import NamedTuple

# Work lists multiply at about this fraction of FlashAttention's rate (one H200, 32/8 heads: 183 to 272 of 610 TFLOP/s).
LISTED_RATE = 0.4


def attention_pairs(start: int, num_tokens: int) -> int:
    """Pairs of a query and a key that it sees, for `num_tokens` tokens after `start` computed ones."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class AttentionRounds(NamedTuple):
    """A device that attends for `num_tiles` tiles at a time, each of `tile_tokens` query tokens of one prompt.

    few_tokens: if the chunks after at least `min_context` tokens have fewer tokens together, work lists have them.
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
        """Pairs that would take as long, on a device that is never idle, as the attention of all `chunks` takes.

        chunks: (computed tokens before the chunk, its tokens). One H200, 32/8 heads, chunks over 90,000 tokens: 512
        tokens run at 574 TFLOP/s, 528 at 344, as they take two rounds.
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
            # Tiles of a chunk run beside those of longer chunks, where these leave a round unfilled.
            num_rounds = -(-max(num_tiles - num_free, 0) // self.num_tiles)
            num_free += num_rounds * self.num_tiles - num_tiles
            in_rounds += num_rounds * self.num_tokens * pairs // num_tokens
        return max(total, in_rounds)


# For a device whose time does not depend on how chunks are cut, such as a CPU.
SMALLEST_ROUNDS = AttentionRounds(1, 1)
