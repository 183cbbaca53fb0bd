"""Decides how many drafts each decode has in a step, from the measured acceptance and the predicted step times.

A proposer, such as a draft model, proposes tokens (drafts). A step verifies drafts: the model computes the request's
last token and the drafts, and the step keeps the drafts that equal the sampled tokens. A draft model has a KV cache.
A step may skip the draft model's cache entries of its tokens. These entries are then late. Proposing needs all entries.
"""

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.scheduling.draft_times import DecodeTimes, DraftLimits, DraftTimes
from nanovllm_core.scheduling.plan import DraftEntryRange, DraftResults, RowIndices, ScheduledRows
from nanovllm_core.scheduling.rows import RowTable
from nanovllm_core.scheduling.step_time import StepTimeModel, StepWork

# The acceptance is the share of tested drafts that are accepted. A step tests a request's drafts up to the first wrong
# draft. The acceptance of all requests is a moving average, which begins with this value.
_FIRST_ACCEPTANCE = 0.7
# A step that tests at least _FULL_WEIGHT_TRIALS drafts has the weight _STEP_WEIGHT in this average. With fewer drafts,
# the weight is proportionally lower.
_STEP_WEIGHT = 0.2
_FULL_WEIGHT_TRIALS = 16
# Limits of one step's acceptance.
_MIN_ACCEPTANCE, _MAX_ACCEPTANCE = 0.01, 0.99
# The acceptance of one request is (accepted drafts + acceptance of all requests) / (tested drafts + 1). Each step that
# tests a draft of the request multiplies the numbers of earlier accepted and tested drafts by this factor.
_ACCEPTANCE_DECAY = 0.9
# Drafts pay if they raise the number of output tokens per second. A probe is a step that measures the acceptance by
# proposing drafts that are not expected to pay. Probes take at most this share of the time.
_PROBE_SHARE = 0.005
# Time that probes do not use is saved for later probes, up to the time of this number of steps without drafts. Probes
# can therefore continue after a few wrong drafts.
_MAX_PROBE_BUDGET = 2.0
# To decide whether computing late entries pays, the planner spreads the computing time over this number of steps.
_LATE_ENTRY_STEPS = 64


class DraftPlanner:
    """Chooses numbers of drafts, and measures how many drafts of each request are accepted.

    num_verified, num_accepted: int64 [max_drafts], totals of verified and accepted drafts by position after the
        request's last token. An accepted draft after the end of the output counts only as verified.
    """

    def __init__(self, rows: RowTable, limits: DraftLimits, step_time_model: StepTimeModel, times: DraftTimes):
        self._rows = rows
        self._limits = limits
        self._model = step_time_model
        self._times = times
        self.num_verified, self.num_accepted = np.zeros((2, limits.max_drafts), np.int64)
        # The acceptance of all requests: its moving average, and its value in the last step that measured it.
        self._mean_acceptance, self._last_acceptance = _FIRST_ACCEPTANCE, _MAX_ACCEPTANCE
        # The time that probes may take now, as a multiple of the time of a step without drafts.
        self._probe_budget = _MAX_PROBE_BUDGET

    def plan_proposals(
        self, scheduled: ScheduledRows, num_computed_tokens: NDArray[np.int64], work: StepWork, *, has_prompts: bool
    ) -> tuple[bool, list[DraftEntryRange], NDArray[np.bool_]]:
        """Choose whether a step proposes drafts: if drafts should pay, or as a probe. Updates `RowTable.draft_lag`.

        num_computed_tokens: see `ScheduledStep`.
        work: work of the step without drafts.
        Returns `BatchShape.proposes`, `StepPlan.late_draft_entries` and `ScheduledStep.has_proposals`.
        """
        table, limits, (rows, num_tokens, is_sampled) = self._rows, self._limits, scheduled
        lag = np.zeros_like(rows)
        if limits.can_lag:
            # The lag may include rejected drafts, so limit the lag to the number of computed tokens.
            lag = np.minimum(table.draft_lag[rows] + num_tokens, num_computed_tokens)
        # If the last step proposed drafts, `draft_lag` was -1, so that lag < num_tokens. Then no entry is late.
        # Proposing itself computes the entries of the last two tokens. `lag` counts only the first of these tokens.
        num_late = np.where(lag < num_tokens, 0, np.maximum(lag - 1, 0))
        proposes, num_computed_late = not limits.uses_cache, np.zeros_like(rows)
        # Propose nothing if the next step may be unable to verify drafts.
        if limits.uses_cache and not has_prompts and 2 * len(rows) <= limits.max_step_tokens:
            proposes, num_computed_late = self._choose_proposals(rows, num_late, work)
        has_proposals = is_sampled & table.can_draft[rows] & (num_computed_late == num_late) & proposes
        table.draft_lag[rows] = np.where(has_proposals, -1, lag - num_computed_late)
        ranges = np.stack((rows, num_computed_tokens - lag, num_computed_late), 1)[num_computed_late > 0]
        return proposes, [DraftEntryRange(*entries) for entries in ranges.tolist()], has_proposals

    def _choose_proposals(
        self, rows: RowIndices, num_late: NDArray[np.int64], work: StepWork
    ) -> tuple[bool, NDArray[np.int64]]:
        """Whether a step proposes drafts, and the number of late entries that the step computes per row, int64 [n].

        num_late: int64 [n], number of late entries of each row. The row's drafts are usable only if the step
            computes all these entries.
        """
        table, limits, times = self._rows, self._limits, self._predict(work)
        num_computed_late = np.zeros_like(num_late)
        may_draft = table.can_draft[rows] & (table.max_total_tokens[rows] - table.num_tokens[rows] > 1)
        if not may_draft.any():
            return False, num_computed_late
        acceptance = self._acceptance(rows)
        num_drafts = self._choose_profitable(may_draft * limits.max_drafts, acceptance, times)
        num_wanted_late = num_late * (num_drafts > 0)
        late_s = self._predict_late(int(num_wanted_late.sum()))
        if self._pays(num_drafts, acceptance, times, times.proposal_s + late_s / _LATE_ENTRY_STEPS):
            # The rows with the fewest late entries come first.
            order = np.argsort(num_wanted_late, kind="stable")
            num_before = num_wanted_late[order].cumsum() - num_wanted_late[order]
            num_computed_late[order] = np.clip(limits.max_step_tokens - num_before, 0, num_wanted_late[order])
            num_drafts *= num_computed_late == num_late
            return self._pays(num_drafts, acceptance, times, times.proposal_s), num_computed_late
        return self._choose_probe(may_draft, num_late, times)

    def _choose_probe(
        self, may_draft: NDArray[np.bool_], num_late: NDArray[np.int64], times: DecodeTimes
    ) -> tuple[bool, NDArray[np.int64]]:
        """The result of `_choose_proposals` if drafts are not expected to pay. may_draft: bool [n]."""
        limits, num_computed_late = self._limits, np.zeros_like(num_late)
        # A probe computes late entries of one row only: the row that has the fewest late entries.
        index = int(np.where(may_draft, num_late, np.iinfo(np.int64).max).argmin())
        late_s = self._predict_late(int(num_late[index]))
        probe_cost = (times.proposal_s + late_s) / times.step_s
        self._probe_budget = min(self._probe_budget + _PROBE_SHARE, max(_MAX_PROBE_BUDGET, probe_cost))
        if self._probe_budget < probe_cost:
            # Propose nothing yet, unless drafts would pay at the acceptance that was measured last.
            acceptance = np.full(len(num_late), self._last_acceptance)
            num_drafts = self._choose_profitable(may_draft * limits.max_drafts, acceptance, times)
            if not self._pays(num_drafts, acceptance, times, times.proposal_s + late_s / _LATE_ENTRY_STEPS):
                return False, num_computed_late
        num_computed_late[index] = min(num_late[index], limits.max_step_tokens)
        proposes = bool(num_computed_late[index] == num_late[index])
        probe_s = self._predict_late(int(num_computed_late[index])) + times.proposal_s * proposes
        self._probe_budget = max(self._probe_budget - probe_s / times.step_s, 0.0)
        return proposes, num_computed_late

    def choose(self, decode_rows: RowIndices, work: StepWork) -> NDArray[np.int64] | None:
        """The number of drafts of each of `decode_rows`, int64 [n]; None if the step should have no drafts.

        Maximizes the expected number of output tokens per second.
        work: work of the step without drafts.
        """
        table, limits = self._rows, self._limits
        num_left_tokens = table.max_total_tokens[decode_rows] - table.num_tokens[decode_rows]
        # If the row's last step proposed nothing, `draft_lag` is at least 0. Earlier drafts are then stale.
        num_proposed = table.num_proposed[decode_rows] * (table.draft_lag[decode_rows] < 0)
        max_drafts = np.minimum(num_left_tokens - 1, num_proposed)
        num_drafting = int(np.count_nonzero(max_drafts > 0))
        num_spare_tokens = limits.max_step_tokens - len(decode_rows)
        if num_drafting == 0 or num_spare_tokens < num_drafting:
            return None
        max_drafts = np.minimum(max_drafts, num_spare_tokens // num_drafting)
        num_drafts = self._choose_profitable(max_drafts, self._acceptance(decode_rows), self._predict(work))
        return num_drafts if num_drafts.any() else None

    def observe(
        self,
        rows: RowIndices,
        num_drafts: NDArray[np.int64],
        first_tokens: NDArray[np.int32],
        num_output_tokens: NDArray[np.int64],
        results: DraftResults,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Learn from a finished step.

        Returns each row's verified and accepted drafts as counted in the totals, two arrays int64 [n]. A step may
        verify more tokens than were proposed as drafts. The excess tokens are not counted as drafts.

        rows: int64 [n], the rows that sampled.
        num_drafts: int64 [n], number of drafts in the step.
        first_tokens: int32 [n], the first new token of each row.
        num_output_tokens: int64 [n], number of the row's new tokens that are in the output, including a stop token.
            0 if the request had already finished: the totals do not count this row.
        """
        table, num_proposed = self._rows, self._rows.num_proposed[rows]
        num_verified = np.minimum(num_drafts, num_proposed)
        num_accepted = np.minimum(results.num_tokens - 1, num_verified)
        positions = np.arange(self._limits.max_drafts)
        # The planner learns from all drafts. The totals count only drafts in the output.
        num_counted, num_in_output = num_verified * (num_output_tokens > 0), np.minimum(num_accepted, num_output_tokens)
        self.num_verified += (positions < num_counted[:, None]).sum(0)
        self.num_accepted += (positions < num_in_output[:, None]).sum(0)
        # Without drafts in the step, the next token still tells whether the first draft would have been accepted.
        is_unused = (num_verified == 0) & (num_proposed > 0)
        was_right = is_unused & (table.first_draft_ids[rows] == first_tokens)
        trials = np.where(is_unused, 1, np.minimum(num_accepted + 1, num_verified))
        successes = np.where(is_unused, was_right, num_accepted)
        decay = np.where(trials > 0, _ACCEPTANCE_DECAY, 1.0)
        table.draft_trials[rows] = table.draft_trials[rows] * decay + trials
        table.draft_successes[rows] = table.draft_successes[rows] * decay + successes
        table.num_proposed[rows], table.first_draft_ids[rows] = results.num_proposed, results.draft_ids[:, 0]
        if trials.any():
            acceptance = min(max(float(successes.sum() / trials.sum()), _MIN_ACCEPTANCE), _MAX_ACCEPTANCE)
            weight = _STEP_WEIGHT * min(1.0, trials.sum() / _FULL_WEIGHT_TRIALS)
            self._mean_acceptance += weight * (acceptance - self._mean_acceptance)
            self._last_acceptance = acceptance
        return num_counted, num_in_output

    def observe_time(self, num_requests: int, work: StepWork, seconds: float) -> None:
        """Learn from the time of a finished step of decodes. work: the work of the step, with drafts."""
        context_s = self._model.decode_context_seconds(work.decode_context)
        self._times.observe(num_requests, context_s, work, seconds)

    def _acceptance(self, rows: RowIndices) -> NDArray[np.float64]:
        """The estimated probability that a draft is accepted if all drafts before it are accepted."""
        return (self._rows.draft_successes[rows] + self._mean_acceptance) / (self._rows.draft_trials[rows] + 1)

    def _predict(self, work: StepWork) -> DecodeTimes:
        """The times of a step with the decodes of `work`, which has no drafts."""
        return self._times.predict(work.num_tokens, self._model.decode_context_seconds(work.decode_context))

    def _predict_late(self, num_entries: int) -> float:
        """The seconds that computing `num_entries` late entries adds to steps."""
        num_passes = -(-num_entries // max(self._limits.max_step_tokens, 1))
        return num_passes * self._times.late_pass_s + num_entries * self._times.late_entry_s

    def _choose_profitable(
        self, max_drafts: NDArray[np.int64], acceptance: NDArray[np.float64], times: DecodeTimes
    ) -> NDArray[np.int64]:
        """The numbers of drafts that maximize the expected output rate. Dinkelbach's method for a ratio (1967)."""
        num_requests, step_s, draft_s, _ = times
        if step_s <= 0 or draft_s <= 0:
            return max_drafts
        num_tokens, seconds, num_drafts = float(num_requests), step_s, max_drafts
        # The output rate and the numbers of drafts depend on each other. Two iterations come close enough.
        for _ in range(2):
            # The expected number of tokens by which the last draft must increase the output.
            min_gain = draft_s * num_tokens / seconds
            # Draft j is kept with probability acceptance ** j.
            max_profitable = np.floor(np.log(min_gain) / np.log(acceptance)) if min_gain < 1 else 0.0
            num_drafts = np.minimum(max_drafts, max_profitable).astype(np.int64)
            num_tokens = num_requests + _count_expected(num_drafts, acceptance)
            seconds = step_s + draft_s * float(num_drafts.sum())
        return num_drafts

    def _pays(
        self, num_drafts: NDArray[np.int64], acceptance: NDArray[np.float64], times: DecodeTimes, cost_s: float
    ) -> bool:
        """Whether drafts raise the expected output rate, if proposing them takes `cost_s`."""
        cost_s += times.draft_s * float(num_drafts.sum())
        gain_s = _count_expected(num_drafts, acceptance) * times.step_s / times.num_requests
        return bool(num_drafts.any()) and gain_s >= cost_s


def _count_expected(num_drafts: NDArray[np.int64], acceptance: NDArray[np.float64]) -> float:
    """The expected number of accepted drafts."""
    return float((acceptance * (1 - acceptance**num_drafts) / (1 - acceptance)).sum())
