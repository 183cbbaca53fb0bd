"""Decides how many drafts each decode has in a step, from the measured acceptance and the predicted step times.

A draft is a proposed token. A step with drafts computes them after the request's last token, and keeps the drafts that
equal the tokens it samples.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.scheduling.plan import DraftResults, EntryRanges, RowIndices, ScheduledRows
from nanovllm_core.scheduling.rows import RowTable
from nanovllm_core.scheduling.step_time import StepTimeModel, StepWork

# The acceptance of the drafts of all requests is estimated as if one more draft had been accepted with this
# probability. The acceptance of a request's drafts is estimated as if one more had been accepted with that of all.
_PRIOR_ACCEPTANCE = 0.7
# Each step that measures acceptance multiplies the weights of earlier steps in the acceptance of all requests by this.
_PRIOR_DECAY = 0.8
# The acceptance of a request's next drafts is estimated from recent drafts, as if one more draft had been accepted with
# the acceptance of all drafts. Each verification multiplies the weights of earlier verifications by this factor.
_ACCEPTANCE_DECAY = 0.9
# A probe is a step that proposes drafts although they are not expected to pay, to measure their acceptance. The number
# of steps between probes begins with the minimum, and doubles up to the maximum.
_MIN_PROBE_INTERVAL, _MAX_PROBE_INTERVAL = 32, 512
# Probes take at most this share of the time. They may take it at once for the last _MAX_PROBE_INTERVAL steps.
_MAX_PROBE_SHARE = 0.015
_MAX_SPARE_SHARE = _MAX_PROBE_SHARE * _MAX_PROBE_INTERVAL
# If a step accepts at least this share of the drafts that it tests, the next probe does not wait.
_MIN_PROBE_ACCEPTANCE = 0.5
# The time of late entries is weighed against the gain in this number of steps.
_LATE_ENTRY_STEPS = 64
# Rounds in which the output rate and the numbers of drafts, which depend on each other, are computed.
_NUM_ROUNDS = 2


class DraftLimits(NamedTuple):
    """Limits of drafts.

    max_drafts: maximum number of drafts per request and step; 0 without speculation.
    max_step_tokens: maximum number of tokens of a step with drafts.
    num_lookahead_tokens: number of tokens after a request's last token for which the cache should have space. 0 if
        proposing drafts takes almost no time: then every step proposes.
    can_lag: whether a step that proposes no drafts leaves out cache entries, which a later step has to compute.
    """

    max_drafts: int = 0
    max_step_tokens: int = 0
    num_lookahead_tokens: int = 0
    can_lag: bool = False


class Proposals(NamedTuple):
    """What a step proposes.

    proposes: see `BatchShape`. late_entries: see `StepPlan`. is_usable: see `ScheduledStep.has_proposals`.
    """

    proposes: bool
    late_entries: EntryRanges | None
    is_usable: NDArray[np.bool_]


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
        # The number of steps that measured acceptance, and the sum of their acceptances, weighted by age.
        self._prior_trials = self._prior_successes = 0.0
        # The time that probes may take now, as a share of a step.
        self._spare_share = 0.0
        self._num_skipped_steps, self._probe_interval = 0, _MIN_PROBE_INTERVAL

    def plan_proposals(
        self, scheduled: ScheduledRows, num_computed_tokens: NDArray[np.int64], work: StepWork, *, has_prompts: bool
    ) -> Proposals:
        """Choose whether a step proposes drafts: if they should pay, or as a probe. Updates `RowTable.draft_lag`.

        num_computed_tokens: see `ScheduledStep`.
        work: of the step without drafts.
        """
        rows, limits = scheduled.rows, self._limits
        # Drafts that are rejected after a step without proposals stay counted in the lag, which may exceed all tokens.
        lag = np.minimum(self._rows.draft_lag[rows] + scheduled.num_tokens, num_computed_tokens)
        proposes, late_entries, is_usable = True, None, scheduled.is_sampled
        if limits.num_lookahead_tokens:
            # The entries of accepted drafts exist. Proposing computes the entries of the last two tokens.
            has_entries = (lag < scheduled.num_tokens) | (lag <= 1)
            num_late = np.where(has_entries | (not limits.can_lag), 0, lag - 1)
            num_now = np.zeros_like(num_late)
            # Steps that may verify no drafts afterwards need no proposals.
            proposes = False
            if not has_prompts and 2 * len(rows) <= limits.max_step_tokens:
                proposes, num_now = self._choose_proposals(rows, num_late, work)
            is_usable = is_usable & self._rows.can_draft[rows] & (num_now == num_late) & proposes
            if (indices := np.flatnonzero(num_now)).size:
                late_entries = EntryRanges(rows[indices], (num_computed_tokens - lag)[indices], num_now[indices])
            lag -= num_now
        self._rows.draft_lag[rows] = np.where(is_usable, -1, lag)
        return Proposals(proposes, late_entries, is_usable)

    def _choose_proposals(
        self, rows: RowIndices, num_late: NDArray[np.int64], work: StepWork
    ) -> tuple[bool, NDArray[np.int64]]:
        """Whether a step proposes drafts, and the number of late entries that it computes for each row, int64 [n].

        num_late: int64 [n], number of entries without which drafts of a row are not usable.
        """
        limits, step_s, costs = self._limits, self._model.predict(work), self._model.coefficients
        may_draft = self._rows.can_draft[rows] & (self._rows.max_total_tokens[rows] - self._rows.num_tokens[rows] > 1)
        if not may_draft.any():
            return False, np.zeros_like(num_late)
        acceptance = np.where(self._keys[rows] == self._rows.keys[rows], self._acceptance(rows), self._prior)
        num_drafts = self._choose_profitable(may_draft * limits.max_drafts, acceptance, work)
        late_s = costs.per_late_entry * float(num_late[num_drafts > 0].sum())
        if self._pays(num_drafts, acceptance, work, costs.per_proposal + late_s / _LATE_ENTRY_STEPS):
            self._num_skipped_steps, self._probe_interval = 0, _MIN_PROBE_INTERVAL
            num_now = _select_late(num_late, num_drafts > 0, limits.max_step_tokens, may_split=True)
            num_drafts *= num_now == num_late
            return self._pays(num_drafts, acceptance, work, costs.per_proposal), num_now
        self._num_skipped_steps += 1
        self._spare_share = min(self._spare_share + _MAX_PROBE_SHARE, _MAX_SPARE_SHARE)
        spare_s = self._spare_share * step_s - costs.per_proposal
        if self._num_skipped_steps < self._probe_interval or spare_s < 0:
            return False, np.zeros_like(num_late)
        max_late = limits.max_step_tokens
        if costs.per_late_entry * max_late > spare_s:
            max_late = int(spare_s / costs.per_late_entry)
        num_now = _select_late(num_late, may_draft, max_late, may_split=max_late == limits.max_step_tokens)
        proposes = bool((may_draft & (num_now == num_late)).any())
        self._spare_share -= (costs.per_late_entry * float(num_now.sum()) + costs.per_proposal * proposes) / step_s
        if proposes:
            self._num_skipped_steps, self._probe_interval = 0, min(2 * self._probe_interval, _MAX_PROBE_INTERVAL)
        return proposes, num_now

    def choose(self, decode_rows: RowIndices, work: StepWork) -> NDArray[np.int64] | None:
        """The number of drafts of each of `decode_rows`, int64 [n]; None if the step should have no drafts.

        Maximizes the expected number of output tokens per second.
        work: of the step without drafts.
        """
        rows, limits = self._rows, self._limits
        max_drafts = rows.max_total_tokens[decode_rows] - rows.num_tokens[decode_rows] - 1
        # A new request has no proposals of its own yet. A step that proposed nothing makes earlier drafts stale.
        is_known = rows.can_draft[decode_rows] & (self._keys[decode_rows] == rows.keys[decode_rows])
        is_known &= rows.draft_lag[decode_rows] < 0
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
        if trials.any():
            acceptance = float(successes.sum() / trials.sum())
            self._prior_trials = self._prior_trials * _PRIOR_DECAY + 1
            self._prior_successes = self._prior_successes * _PRIOR_DECAY + acceptance
            if acceptance >= _MIN_PROBE_ACCEPTANCE:
                self._num_skipped_steps = self._probe_interval = _MIN_PROBE_INTERVAL
                self._spare_share = _MAX_SPARE_SHARE
        self._keys[rows] = self._rows.keys[rows]
        self._num_proposed[rows] = results.num_proposed
        self._first_drafts[rows] = results.first_drafts
        return num_verified, num_accepted

    @property
    def _prior(self) -> float:
        """The estimated acceptance of the drafts of a new request."""
        return (self._prior_successes + _PRIOR_ACCEPTANCE) / (self._prior_trials + 1)

    def _acceptance(self, rows: RowIndices) -> NDArray[np.float64]:
        """The estimated probability that a draft is accepted if all drafts before it are accepted."""
        acceptance = (self._all_successes[rows] + self._prior) / (self._all_trials[rows] + 1)
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
            num_tokens = work.num_tokens + _count_expected(num_drafts, acceptance)
            seconds = step_s + draft_s * float(num_drafts.sum())
        return num_drafts

    def _pays(
        self, num_drafts: NDArray[np.int64], acceptance: NDArray[np.float64], work: StepWork, cost_s: float
    ) -> bool:
        """Whether drafts raise the expected output rate, if proposing them takes `cost_s`."""
        cost_s += self._model.coefficients.per_token * float(num_drafts.sum())
        gain_s = _count_expected(num_drafts, acceptance) * self._model.predict(work) / work.num_tokens
        return bool(num_drafts.any()) and gain_s >= cost_s


def _count_expected(num_drafts: NDArray[np.int64], acceptance: NDArray[np.float64]) -> float:
    """The expected number of accepted drafts."""
    return float((acceptance * (1 - acceptance**num_drafts) / (1 - acceptance)).sum())


def _select_late(
    num_late: NDArray[np.int64], is_wanted: NDArray[np.bool_], max_late: int, *, may_split: bool
) -> NDArray[np.int64]:
    """The number of late entries to compute for each row, at most `max_late` in all: whole rows, the shortest first.

    may_split: whether the shortest row gets a part of its entries if they are too many for one step.
    """
    order = np.argsort(np.where(is_wanted, num_late, np.iinfo(np.int64).max), kind="stable")
    order = order[: int(np.count_nonzero(is_wanted))]
    num_now = np.zeros_like(num_late)
    fits = num_late[order].cumsum() <= max_late
    num_now[order[fits]] = num_late[order[fits]]
    if may_split and not num_now.any() and not fits.all():
        num_now[order[~fits][0]] = max_late
    return num_now
