"""Estimates the attention time of a step's prompt chunks."""

from collections.abc import Iterable
from typing import NamedTuple

# Speed of the kernels for work lists (equal shares of attention work), relative to FlashAttention. Measured on an H200
# for 32 query heads and 8 key-value heads.
WORK_LIST_RATE = 0.4


def attention_pairs(start: int, num_tokens: int) -> int:
    """Return the number of (query, visible key) pairs of a chunk of `num_tokens` after `start` computed tokens."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class AttentionEstimator(NamedTuple):
    """Estimates the time of prompt attention, which a device computes in rounds of `tiles_per_round` tiles.

    tile_tokens: maximum number of tokens in a tile. A tile is consecutive tokens of one chunk.
    min_work_list_context: a chunk has a long context if at least this many tokens of the request precede the chunk.
    work_list_limit: if all chunks with a long context have fewer tokens together, work lists compute these chunks.
        Work lists split the work evenly over the device, so these chunks take no rounds.
    """

    tile_tokens: int
    tiles_per_round: int
    work_list_limit: int = 0
    min_work_list_context: int = 0

    @property
    def tokens_per_round(self) -> int:
        """Maximum number of tokens in one round."""
        return self.tile_tokens * self.tiles_per_round

    def estimate_pairs(self, chunks: Iterable[tuple[int, int]]) -> int:
        """Estimate the time of `chunks`. The unit is the time in which a busy device computes one (query, key) pair.

        chunks: pairs (number of tokens before the chunk, number of tokens in the chunk).
        """
        longest_context_first = sorted(chunks, reverse=True)
        num_long_context_tokens = sum(
            num_tokens for start, num_tokens in longest_context_first if start >= self.min_work_list_context
        )
        # Two estimates: the device is always busy, or every started round takes the time of a full round.
        pairs_if_busy = whole_round_pairs = num_idle_tiles = 0
        for start, num_tokens in longest_context_first:
            pairs = attention_pairs(start, num_tokens)
            chunk_tiles = -(-num_tokens // self.tile_tokens)
            if start >= self.min_work_list_context and num_long_context_tokens < self.work_list_limit:
                pairs_if_busy += int(pairs * chunk_tiles * self.tile_tokens / (num_tokens * WORK_LIST_RATE))
                continue
            pairs_if_busy += pairs
            # The chunk's tiles first fill the rounds that earlier chunks left partly idle.
            num_rounds = -(-max(chunk_tiles - num_idle_tiles, 0) // self.tiles_per_round)
            num_idle_tiles += num_rounds * self.tiles_per_round - chunk_tiles
            whole_round_pairs += num_rounds * self.tokens_per_round * pairs // num_tokens
        return max(pairs_if_busy, whole_round_pairs)


# Estimator for CPUs and other devices on which attention time does not depend on how prompts are cut into chunks.
PROPORTIONAL_ESTIMATOR = AttentionEstimator(1, 1)
