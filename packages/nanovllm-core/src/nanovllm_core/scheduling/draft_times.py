"""Predicts how long a step takes without drafts, and how much longer drafts and proposals make it.

The times are measured at start-up, because an engine that always proposes never sees a step without proposals.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from nanovllm_core.scheduling.step_time import StepWork

# Steps are measured for 1, 2, 4, ... requests. The measurement ends after a step that takes longer than this with
# drafts or with proposals.
_MAX_MEASURED_STEP_S = 0.05
# Minimum time of all drafts of a step, as a share of the step's time. Noise may make the measured time 0.
_MIN_DRAFTS_SHARE = 0.02
# Maximum number of late entries (see `StepPlan.late_draft_entries`) whose time is measured.
_MAX_LATE_ENTRIES = 64
# Weight of a new step in the moving averages of (measured time / predicted time).
_STEP_WEIGHT = 0.1
# Bounds of this ratio for one step.
_MIN_RATIO, _MAX_RATIO = 0.25, 4.0
# A step corrects the times of drafts and proposals only if their predicted time is at least this share of `step_s`.
_MIN_EXTRA_SHARE = 0.01
# The times of drafts and proposals have a correction factor. Each step without drafts and proposals reduces the
# factor's distance from 1 by this share.
_EXTRA_DECAY = 0.01


class DraftLimits(NamedTuple):
    """Limits of drafts.

    max_drafts: maximum number of drafts per request and step; 0 without speculation.
    max_step_tokens: maximum number of tokens of a step with drafts.
    uses_cache, can_lag: see `Proposer`.
    """

    max_drafts: int = 0
    max_step_tokens: int = 0
    uses_cache: bool = False
    can_lag: bool = False


class DecodeTimes(NamedTuple):
    """Times in seconds of steps with `num_requests` decodes.

    step_s: a step without drafts and proposals.
    draft_s: the time that each verified draft adds to a step.
    proposal_s: the time that proposing drafts for all requests adds to a step.
    """

    num_requests: int
    step_s: float
    draft_s: float
    proposal_s: float


class DecodeTimer(Protocol):
    """See `Runner.time_decodes`."""

    def __call__(self, num_reqs: int, num_drafts: int = 0, *, proposes: bool = False, num_late: int = 0) -> float:
        """Measure the seconds of a step."""
        ...


class DraftTimes:
    """Times of steps with decodes, interpolated between measured numbers of requests, and corrected by finished steps.

    Without measurements, all times are 0.
    measured: times for rising numbers of requests.
    late_pass_s: seconds that late entries add to a step, whatever their number. See `StepPlan.late_draft_entries`.
    late_entry_s: seconds that each late entry adds.
    """

    def __init__(self, measured: Sequence[DecodeTimes] = (), late_pass_s: float = 0.0, late_entry_s: float = 0.0):
        self.late_pass_s, self.late_entry_s = late_pass_s, late_entry_s
        num_requests, *columns = zip(*(measured or (DecodeTimes(1, 0.0, 0.0, 0.0),)), strict=True)
        # Interpolated times for 1, 2, 3, ... requests.
        counts = np.arange(1, num_requests[-1] + 1)
        self._times = [*zip(*(np.interp(counts, num_requests, column).tolist() for column in columns), strict=True)]
        self._step_ratio = self._extra_ratio = 1.0

    def predict(self, num_requests: int, context_s: float = 0.0) -> DecodeTimes:
        """The times for `num_requests` decodes. context_s: seconds that attention to their contexts takes."""
        step_s, draft_s, proposal_s = self._times[min(num_requests, len(self._times)) - 1]
        step_s = self._step_ratio * (step_s + context_s)
        return DecodeTimes(num_requests, step_s, self._extra_ratio * draft_s, self._extra_ratio * proposal_s)

    def observe(self, num_requests: int, context_s: float, work: StepWork, seconds: float) -> None:
        """Correct the predictions with a finished step of decodes. work: the step's work, with drafts."""
        times = self.predict(num_requests, context_s)
        if seconds <= 0 or times.step_s <= 0 or work.num_late_draft_entries:
            return
        num_drafts = work.num_tokens - num_requests
        if not num_drafts and not work.num_proposal_passes:
            self._step_ratio *= _average_update_factor(seconds / times.step_s)
            self._extra_ratio += _EXTRA_DECAY * (1 - self._extra_ratio)
            return
        extra_s = num_drafts * times.draft_s + work.num_proposal_passes * times.proposal_s
        if extra_s >= _MIN_EXTRA_SHARE * times.step_s:
            self._extra_ratio *= _average_update_factor((seconds - times.step_s) / extra_s)


def _average_update_factor(ratio: float) -> float:
    """The factor by which a step multiplies a moving average. ratio: the step's measured time / predicted time."""
    return 1 + _STEP_WEIGHT * (min(max(ratio, _MIN_RATIO), _MAX_RATIO) - 1)


def measure_draft_times(time_decodes: DecodeTimer, max_requests: int, limits: DraftLimits) -> DraftTimes:
    """Measure steps of decodes, before the first request. max_requests: maximum number of requests of a step."""
    measured, num_reqs = list[DecodeTimes](), 1
    while num_reqs <= max_requests and 2 * num_reqs <= limits.max_step_tokens:
        step_s = time_decodes(num_reqs)
        num_drafts = min(limits.max_drafts, limits.max_step_tokens // num_reqs - 1)
        drafts_s = max(time_decodes(num_reqs, num_drafts) - step_s, _MIN_DRAFTS_SHARE * step_s)
        proposal_s = max(time_decodes(num_reqs, proposes=True) - step_s, 0.0) if limits.uses_cache else 0.0
        measured.append(DecodeTimes(num_reqs, step_s, drafts_s / (num_reqs * num_drafts), proposal_s))
        if step_s + max(drafts_s, proposal_s) > _MAX_MEASURED_STEP_S:
            break
        num_reqs *= 2
    late_pass_s = late_entry_s = 0.0
    if measured and limits.can_lag:
        num_late = min(_MAX_LATE_ENTRIES, limits.max_step_tokens)
        one_entry_s = time_decodes(1, num_late=1)
        late_entry_s = max(time_decodes(1, num_late=num_late) - one_entry_s, 0.0) / (num_late - 1)
        late_pass_s = max(one_entry_s - late_entry_s - measured[0].step_s, 0.0)
    return DraftTimes(measured, late_pass_s, late_entry_s)
