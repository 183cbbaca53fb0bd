"""Keeps drafts at random, so that the speed of speculative decoding can be measured with random weights."""

import torch
from torch import Tensor

from nanovllm_core.execution.request_table import RequestTable

_SEED = 0
# Precision of the probability that `find_probability` returns: 2 ** -_NUM_BISECTIONS.
_NUM_BISECTIONS = 40


class ForcedAcceptance:
    """Decides which drafts are kept, whether right or wrong.

    Steps without drafts also get their tokens from here, because such a token tells the planner whether a draft that
    was not used would have been kept.

    acceptance_length: mean number of tokens per request and step with `max_drafts` drafts, 1..1 + max_drafts.
    """

    def __init__(self, acceptance_length: float, table: RequestTable):
        self._table = table
        generator = torch.Generator(table.device).manual_seed(_SEED)
        # Whether the draft of each row at each position is kept.
        self._is_kept = torch.rand(table.tokens.shape, generator=generator, device=table.device) < find_probability(
            acceptance_length, table.max_drafts
        )
        # The tokens that stand in a row are its drafts. Equal tokens would all choose the same experts.
        table.tokens.random_(table.vocab_size, generator=generator)

    def replace_samples(self, samples: Tensor, table_rows: Tensor, positions: Tensor) -> Tensor:
        """Replace samples by the drafts that are kept. Replace a sample that equals another draft by the next token id.

        samples, table_rows, positions: int32 [num_samples], see `ForwardOutput`.
        """
        # Padding and finished requests may have positions outside the table.
        rows, positions = table_rows.long(), positions.clamp(0, self._is_kept.shape[1] - 1).long()
        drafts = self._table.tokens[rows, positions]
        is_kept = self._is_kept[rows, positions]
        rejecting = torch.where(samples == drafts, (samples + 1) % self._table.vocab_size, samples)
        return torch.where(is_kept, drafts, rejecting)

    def count_proposed(self, is_sampled: Tensor) -> Tensor:
        """The number of proposed drafts of each request: as many as a step may have. is_sampled: int32 [n], 0 or 1."""
        return is_sampled * self._table.max_drafts


def find_probability(acceptance_length: float, max_drafts: int) -> float:
    """The probability of keeping a draft, if all drafts before it are kept, for a mean of kept drafts plus one."""
    low, high = 0.0, 1.0
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        # Draft i is kept with all drafts before it with probability middle ** i.
        if sum(middle**number for number in range(max_drafts + 1)) < acceptance_length:
            low = middle
        else:
            high = middle
    return high
