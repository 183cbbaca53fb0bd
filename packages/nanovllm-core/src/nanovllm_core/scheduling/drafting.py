"""Decides how many drafts each decode has in a step, from the measured acceptance and the predicted step times.

A draft is a proposed token. A step with drafts computes them after the request's last token, and keeps the drafts that
equal the tokens it samples.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.scheduling.plan import DraftResults, RowIndices
from nanovllm_core.scheduling.rows import RowTable
from nanovllm_core.scheduling.step_time import StepTimeModel, StepWork

# The acceptance of all drafts of a request is estimated as if one more draft had been accepted with this probability.
_PRIOR_ACCEPTANCE = 0.5
# The acceptance of a request's next drafts is estimated from recent drafts, as if one more draft had been accepted with
# the acceptance of all drafts. Each verification multiplies the weights of earlier verifications by this factor.
_ACCEPTANCE_DECAY = 0.9
# Drafts that are not expected to pay are proposed once in this number of steps, to measure their acceptance.
_PROBE_INTERVAL = 16
# Rounds in which the output rate and the numbers of drafts, which depend on each other, are computed.
_NUM_ROUNDS = 2


class DraftLimits(NamedTuple):
    """Limits of drafts.

    max_drafts: maximum number of drafts per request and step; 0 without speculation.
    max_step_tokens: maximum number of tokens of a step with drafts.
    num_lookahead_tokens: number of tokens after a request's last token for which the cache should have space.
    """

    max_drafts: int = 0
    max_step_tokens: int = 0
    num_lookahead_tokens: int = 0


class DraftPlanner:
    """Chooses numbers of drafts, and measures how many drafts of each request are accepted.

    num_verified, num_accepted: int64 [max_drafts], totals of verified and accepted drafts by position after the
        request's last token.
    """

    def __init__(self, rows: RowTable, limits: DraftLimits, step_time_model: StepTimeModel):
        self._rows = rows
        self._limits = limits
        self._model = step_time_model
        self._num_proposed, self._first_drafts, self._keys = np.zeros((3, len(rows.keys)), np.int64)
        # Numbers of verified and accepted drafts by row: of all drafts, and weighted by age.
        self._all_trials, self._all_successes = np.zeros((2, len(rows.keys)))
        self._recent_trials, self._recent_successes = np.zeros((2, len(rows.keys)))
        self.num_verified, self.num_accepted = np.zeros((2, limits.max_drafts), np.int64)
        self._num_steps = 0

    def should_propose(self, decode_rows: RowIndices, work: StepWork) -> bool:
        """Whether a step should propose drafts: if they may pay, or to measure acceptance. Arguments: see `choose`."""
        self._num_steps += 1
        is_known = self._keys[decode_rows] == self._rows.keys[decode_rows]
        if not self._limits.num_lookahead_tokens or not is_known.all() or self._num_steps % _PROBE_INTERVAL == 0:
            return True
        max_drafts = np.where(self._rows.can_draft[decode_rows], self._limits.max_drafts, 0)
        return bool(self._choose_profitable(max_drafts, self._acceptance(decode_rows), work).any())

    def choose(self, decode_rows: RowIndices, work: StepWork) -> NDArray[np.int64] | None:
        """The number of drafts of each of `decode_rows`, int64 [n]; None if the step should have no drafts.

        Maximizes the expected number of output tokens per second.
        work: of the step without drafts.
        """
        rows, limits = self._rows, self._limits
        max_drafts = rows.max_total_tokens[decode_rows] - rows.num_tokens[decode_rows] - 1
        # A new request has no proposals of its own yet.
        is_known = rows.can_draft[decode_rows] & (self._keys[decode_rows] == rows.keys[decode_rows])
        max_drafts = np.where(is_known, np.minimum(max_drafts, self._num_proposed[decode_rows]), 0)
        num_drafting = int(np.count_nonzero(max_drafts > 0))
        num_spare_tokens = limits.max_step_tokens - len(decode_rows)
        if num_drafting == 0 or num_spare_tokens < num_drafting:
            return None
        max_drafts = np.minimum(max_drafts, num_spare_tokens // num_drafting)
        num_drafts = self._choose_profitable(max_drafts, self._acceptance(decode_rows), work)
        return num_drafts if num_drafts.any() else None

    def observe(
        self, rows: RowIndices, num_drafts: NDArray[np.int64], first_tokens: NDArray[np.int32], results: DraftResults
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Learn from a finished step.

        Returns the numbers of each row's verified and accepted drafts, int64 [n]. A step may have tokens in the place
        of drafts that were never proposed; these do not count.

        rows: int64 [n], the rows that sampled.
        num_drafts: int64 [n], number of drafts in the step.
        first_tokens: int32 [n], the first new token of each row.
        """
        is_known = self._keys[rows] == self._rows.keys[rows]
        num_proposed = np.where(is_known, self._num_proposed[rows], 0)
        num_verified = np.minimum(num_drafts, num_proposed)
        num_accepted = np.minimum(results.num_tokens - 1, num_verified)
        positions = np.arange(self._limits.max_drafts)
        self.num_verified += (positions < num_verified[:, None]).sum(0)
        self.num_accepted += (positions < num_accepted[:, None]).sum(0)
        # Without drafts in the step, the next token still tells whether the first draft would have been accepted.
        is_unused = (num_verified == 0) & (num_proposed > 0)
        was_right = is_unused & (self._first_drafts[rows] == first_tokens)
        trials = np.where(is_unused, 1, np.minimum(num_accepted + 1, num_verified))
        successes = np.where(is_unused, was_right, num_accepted)
        decay = np.where(is_known, _ACCEPTANCE_DECAY ** (trials > 0), 0)
        self._recent_trials[rows] = self._recent_trials[rows] * decay + trials
        self._recent_successes[rows] = self._recent_successes[rows] * decay + successes
        self._all_trials[rows] = self._all_trials[rows] * is_known + trials
        self._all_successes[rows] = self._all_successes[rows] * is_known + successes
        self._keys[rows] = self._rows.keys[rows]
        self._num_proposed[rows] = results.num_proposed
        self._first_drafts[rows] = results.first_drafts
        return num_verified, num_accepted

    def _acceptance(self, rows: RowIndices) -> NDArray[np.float64]:
        """The estimated probability that a draft is accepted if all drafts before it are accepted."""
        acceptance = (self._all_successes[rows] + _PRIOR_ACCEPTANCE) / (self._all_trials[rows] + 1)
        return (self._recent_successes[rows] + acceptance) / (self._recent_trials[rows] + 1)

    def _choose_profitable(
        self, max_drafts: NDArray[np.int64], acceptance: NDArray[np.float64], work: StepWork
    ) -> NDArray[np.int64]:
        """The numbers of drafts that maximize the expected output rate. Dinkelbach's method for a ratio (1967)."""
        step_s, draft_s = self._model.predict(work), self._model.coefficients.per_token
        if step_s <= 0 or draft_s <= 0:
            return max_drafts
        num_tokens, seconds, num_drafts = float(work.num_tokens), step_s, max_drafts
        for _ in range(_NUM_ROUNDS):
            # The expected number of tokens by which the last draft must increase the output.
            min_gain = draft_s * num_tokens / seconds
            # Draft j is kept with probability acceptance ** j.
            max_profitable = np.floor(np.log(min_gain) / np.log(acceptance)) if min_gain < 1 else 0.0
            num_drafts = np.minimum(max_drafts, max_profitable).astype(np.int64)
            gains = acceptance * (1 - acceptance**num_drafts) / (1 - acceptance)
            num_tokens, seconds = work.num_tokens + float(gains.sum()), step_s + draft_s * float(num_drafts.sum())
        return num_drafts
