"""Keeps drafts at random, so that the speed of speculative decoding can be measured with random weights."""

import numpy as np
import torch
from torch import Tensor

from nanovllm_core.execution.request_table import RequestTable

_SEED = 0


class ForcedAcceptance:
    """Decides at random which drafts are kept, whether they are right or wrong.

    Samples of steps without drafts are replaced too: from them, the planner learns whether a draft that was not
    scheduled
    would have been kept.

    acceptance_length: mean number of new tokens of a request in a step with `max_drafts` drafts: from 1 to
        1 + max_drafts.
    """

    def __init__(self, acceptance_length: float, table: RequestTable):
        self._table = table
        generator = torch.Generator(table.device).manual_seed(_SEED)
        probability = find_probability(acceptance_length, table.max_drafts)
        # Whether the draft of each row at each position is kept.
        self._is_kept = torch.rand(table.tokens.shape, generator=generator, device=table.device) < probability
        # The tokens after a row's last token serve as its drafts. Make them random, because equal drafts would all
        # choose the same experts.
        table.tokens.random_(table.vocab_size, generator=generator)

    def replace_samples(self, samples: Tensor, table_rows: Tensor, positions: Tensor) -> Tensor:
        """Replace each sample by the draft at its position, if this draft is kept.

        If a sample equals a draft that is not kept, the next token id replaces the sample.
        samples, table_rows, positions: int32 [num_samples], see `ForwardOutput`.
        """
        # Padding and finished requests may have positions outside the table.
        rows, positions = table_rows.long(), positions.clamp(0, self._is_kept.shape[1] - 1).long()
        drafts = self._table.tokens[rows, positions]
        is_kept = self._is_kept[rows, positions]
        rejecting_samples = torch.where(samples == drafts, (samples + 1) % self._table.vocab_size, samples)
        return torch.where(is_kept, drafts, rejecting_samples)


def find_probability(acceptance_length: float, max_drafts: int) -> float:
    """The probability of keeping each draft, so that a request gets `acceptance_length` tokens per step on average."""
    # Drafts 1 to i are all kept with probability p ** i, so `acceptance_length` is 1 + p + ... + p ** max_drafts.
    # This equation has one solution p >= 0.
    roots = np.roots([1.0] * max_drafts + [1.0 - acceptance_length])
    return float(roots.real[abs(roots.imag) < 1e-9].max())
