import numpy as np
import pytest

from nanovllm_core import Request
from nanovllm_core.request_state import RequestState
from nanovllm_core.scheduling.draft_times import DecodeTimes, DraftLimits, DraftTimes
from nanovllm_core.scheduling.drafting import DraftPlanner
from nanovllm_core.scheduling.plan import DraftResults, ScheduledRows
from nanovllm_core.scheduling.rows import RowTable
from nanovllm_core.scheduling.step_time import StepTimeModel, StepWork, calibrate

MAX_DRAFTS = 4
RIGHT, WRONG = 7, 8  # All drafts are RIGHT. Steps that reject drafts sample WRONG.


STEP_S = 0.01


class Decodes:
    """Requests that decode. When step n is planned, the results of the steps up to n - 2 are known.

    Late entries are entries of earlier tokens that the draft model's cache still lacks.
    Times are relative to the time of a step without drafts. Pass times are per step with late entries.
    """

    def __init__(
        self,
        relative_draft_time: float,
        num_requests: int = 1,
        max_step_tokens: int = 64,
        *,
        relative_proposal_time: float = 0.0,
        relative_late_entry_time: float = 0.0,
        relative_late_pass_time: float = 0.0,
        prompt_len: int = 0,
    ):
        self.rows = RowTable(num_requests, 1)
        self.rows.can_draft[:] = True
        self.times = DecodeTimes(num_requests, STEP_S, STEP_S * relative_draft_time, STEP_S * relative_proposal_time)
        self.step_time_model = StepTimeModel()
        self.late_pass_s, self.late_entry_s = STEP_S * relative_late_pass_time, STEP_S * relative_late_entry_time
        draft_times = DraftTimes([self.times], self.late_pass_s, self.late_entry_s)
        limits = DraftLimits(
            MAX_DRAFTS, max_step_tokens, uses_cache=bool(relative_proposal_time), can_lag=bool(relative_late_entry_time)
        )
        self.planner = DraftPlanner(self.rows, limits, self.step_time_model, draft_times)
        self.proposing_steps: list[int] = []
        self.num_late_draft_entries: list[int] = []
        self.num_steps, self.extra_time = 0, 0.0
        self._in_flight: tuple | None = None
        self.start_requests(prompt_len)

    def start_requests(self, prompt_len: int = 0) -> None:
        """Replace all requests by requests with computed prompts."""
        self._in_flight = None
        self.rows.num_proposed[:] = self.rows.draft_trials[:] = self.rows.draft_successes[:] = 0
        self.rows.num_tokens[:], self.rows.max_total_tokens[:] = prompt_len + 10, prompt_len + 10_000
        self.rows.num_computed_tokens[:], self.rows.draft_lag[:] = prompt_len + 9, prompt_len + 9

    def choose(self) -> list[int]:
        count = len(self.rows.keys)
        num_drafts = self.planner.choose(np.arange(count), StepWork(count, 0, 0))
        return [0] * count if num_drafts is None else num_drafts.tolist()

    def run_steps(self, count: int, *, accepts: bool, num_proposed: int = MAX_DRAFTS) -> int:
        """Returns the number of steps that proposed drafts."""
        num_before = len(self.proposing_steps)
        for _ in range(count):
            self._run_step(accepts=accepts, num_proposed=num_proposed)
        return len(self.proposing_steps) - num_before

    def _run_step(self, *, accepts: bool, num_proposed: int) -> None:
        num_requests = len(self.rows.keys)
        num_drafts, indices = np.array(self.choose()), np.arange(num_requests)
        scheduled = ScheduledRows(indices, 1 + num_drafts, np.ones(num_requests, np.bool_))
        num_computed = self.rows.num_computed_tokens + scheduled.num_tokens
        work = StepWork(num_requests)
        proposes, late_draft_entries, has_proposals = self.planner.plan_proposals(
            scheduled, num_computed, work, has_prompts=False
        )
        for row, start, num_tokens in late_draft_entries:
            assert 0 <= start < start + num_tokens < num_computed[row]
        num_late = sum(entries.num_tokens for entries in late_draft_entries)
        seconds = self.times.draft_s * num_drafts.sum() + self.times.proposal_s * proposes
        seconds += self.late_pass_s * (num_late > 0) + self.late_entry_s * num_late
        self.extra_time += seconds / STEP_S
        self.num_late_draft_entries.append(num_late)
        if proposes:
            self.proposing_steps.append(self.num_steps)
        self.num_steps += 1
        num_new = 1 + num_drafts * accepts
        self.rows.num_computed_tokens[:] += num_new
        self.rows.num_tokens[:] += num_new
        first_tokens = np.full(num_requests, RIGHT if accepts else WRONG, np.int32)
        counts = num_proposed * has_proposals
        results = DraftResults(num_new, counts, np.full((num_requests, MAX_DRAFTS), RIGHT, np.int32))
        if self._in_flight is not None:
            self.planner.observe(*self._in_flight)
        self._in_flight = indices, num_drafts, first_tokens, num_new, results


def test_a_request_without_proposals_has_no_drafts():
    decodes = Decodes(0.01)
    assert decodes.choose() == [0]
    decodes.run_steps(3, accepts=True, num_proposed=0)
    assert decodes.choose() == [0]
    decodes.run_steps(2, accepts=True, num_proposed=2)
    assert decodes.choose() == [2]


def test_accepted_drafts_lead_to_as_many_drafts_as_allowed():
    decodes = Decodes(0.05)
    decodes.run_steps(20, accepts=True)
    assert decodes.choose() == [MAX_DRAFTS]
    assert decodes.planner.num_accepted.tolist() == decodes.planner.num_verified.tolist()


# By number of requests: relative times of a draft, a proposal, a pass of late entries, and a late entry.
# Measured on an H100 with the shapes of Llama-8B. The draft model has the shapes of Llama-1B.
MEASURED_RELATIVE_TIMES = {1: (0.03, 0.79, 2.4, 0.001), 64: (0.0015, 1.12, 2.0, 0.001), 256: (0.0015, 1.12, 2.0, 0.001)}


@pytest.mark.parametrize("num_requests", MEASURED_RELATIVE_TIMES)
def test_rejected_drafts_of_a_model_cost_less_than_three_percent_of_512_tokens(num_requests):
    relative_draft_time, *relative_times = MEASURED_RELATIVE_TIMES[num_requests]
    names = ("relative_proposal_time", "relative_late_pass_time", "relative_late_entry_time")
    options = {**dict(zip(names, relative_times, strict=True)), "prompt_len": 500}
    for max_step_tokens in (256, 2048):
        decodes = Decodes(relative_draft_time, num_requests, max_step_tokens, **options)
        for _ in range(3):
            extra_before = decodes.extra_time
            decodes.run_steps(512, accepts=False)
            assert decodes.extra_time - extra_before < 0.03 * 512
            decodes.start_requests(prompt_len=500)
        can_draft = 2 * num_requests <= max_step_tokens
        assert bool(decodes.proposing_steps) == can_draft
        assert bool(sum(decodes.num_late_draft_entries)) == can_draft
        assert max(decodes.num_late_draft_entries) <= max_step_tokens


def test_slow_steps_with_prompts_do_not_make_proposals_seem_free():
    decodes = Decodes(0.2, relative_proposal_time=0.9)
    calibrate(decodes.step_time_model, lambda num_tokens, _: 5 * STEP_S + num_tokens * 1e-5, 8192, 8192)
    for _ in range(3):
        extra_before = decodes.extra_time
        decodes.run_steps(512, accepts=False)
        assert decodes.extra_time - extra_before < 0.02 * 512
        decodes.start_requests()


@pytest.mark.parametrize("relative_proposal_time", [0.1, 0.3, 5.0])
def test_probes_take_at_most_half_a_percent_of_the_time(relative_proposal_time):
    decodes = Decodes(0.01, relative_proposal_time=relative_proposal_time, relative_late_entry_time=0.0001)
    decodes.run_steps(100, accepts=False)
    extra_before, num_steps = decodes.extra_time, 4000
    assert decodes.run_steps(num_steps, accepts=False) > 1
    assert decodes.extra_time - extra_before < 0.006 * num_steps


def test_right_drafts_that_take_longer_than_they_save_are_proposed_only_in_probes():
    decodes = Decodes(0.01, relative_proposal_time=10.0, relative_late_entry_time=0.0001)
    decodes.run_steps(100, accepts=True)
    assert 0 < decodes.run_steps(4000, accepts=True) < 5


@pytest.mark.parametrize("num_requests", [1, 64])
def test_proposing_resumes_after_drafts_become_right(num_requests):
    decodes = Decodes(0.01, num_requests, 512, relative_proposal_time=1.0, relative_late_entry_time=0.001)
    assert decodes.run_steps(300, accepts=False) < 12
    decodes.run_steps(800, accepts=True)
    # Old requests have too many late entries to propose again soon.
    if num_requests > 1:
        decodes.start_requests()
        decodes.run_steps(20, accepts=True)
    assert decodes.run_steps(32, accepts=True) == 32
    assert min(decodes.choose()) == MAX_DRAFTS


def test_each_step_proposes_if_proposing_takes_no_time():
    assert Decodes(0.05).run_steps(50, accepts=False) == 50


def test_drafts_of_a_model_wait_until_its_entries_of_the_prompt_exist():
    decodes = Decodes(
        0.01, max_step_tokens=64, relative_proposal_time=0.5, relative_late_entry_time=0.0001, prompt_len=200
    )
    assert decodes.run_steps(3, accepts=True) == 0
    assert decodes.run_steps(20, accepts=True) == 20
    assert decodes.num_late_draft_entries[:5] == [64, 64, 64, 20, 0]


def test_late_entries_that_cost_more_than_drafts_give_are_left_out():
    decodes = Decodes(
        0.01, max_step_tokens=64, relative_proposal_time=0.5, relative_late_entry_time=1.0, prompt_len=500
    )
    assert decodes.run_steps(100, accepts=True) == 0
    assert sum(decodes.num_late_draft_entries) == 0


def test_steps_with_prompts_propose_only_without_cost():
    for relative_proposal_time in (0.0, 0.5):
        decodes = Decodes(
            0.01, relative_proposal_time=relative_proposal_time, relative_late_entry_time=relative_proposal_time / 100
        )
        scheduled = ScheduledRows(np.arange(1), np.array([40]), np.ones(1, np.bool_))
        planned = decodes.planner.plan_proposals(scheduled, np.array([40]), StepWork(0), has_prompts=True)
        proposes, late_draft_entries, _ = planned
        assert (proposes, late_draft_entries) == (not relative_proposal_time, [])


@pytest.mark.parametrize("relative_draft_time", [0.01, 0.03, 0.1])
def test_rejected_drafts_cost_less_than_one_percent_of_the_time(relative_draft_time):
    decodes, num_steps = Decodes(relative_draft_time), 1000
    decodes.run_steps(num_steps, accepts=False)
    assert decodes.choose() == [0]
    assert decodes.planner.num_verified.sum() * relative_draft_time < 0.01 * num_steps
    assert decodes.planner.num_accepted.sum() == 0


def test_drafts_return_soon_after_text_begins_to_repeat():
    decodes = Decodes(0.03)
    decodes.run_steps(300, accepts=False)
    assert decodes.choose() == [0]
    # Sampled tokens that equal unverified drafts count as successes.
    decodes.run_steps(5, accepts=True)
    assert decodes.choose()[0] > 0


def test_a_draft_that_costs_more_than_it_gives_is_left_out():
    decodes = Decodes(2.0)
    decodes.run_steps(20, accepts=True)
    assert decodes.choose() == [0]


def test_requests_share_the_tokens_of_a_step():
    decodes = Decodes(0.01, num_requests=3, max_step_tokens=9)
    decodes.run_steps(20, accepts=True)
    assert decodes.choose() == [2, 2, 2]
    decodes = Decodes(0.01, num_requests=3, max_step_tokens=5)
    decodes.run_steps(20, accepts=True)
    assert decodes.choose() == [0, 0, 0]


def test_a_new_request_in_a_row_starts_without_proposals_and_acceptance():
    decodes = Decodes(0.01)
    decodes.run_steps(20, accepts=True)
    rows, request = decodes.rows, RequestState(1, Request("new", [1] * 10), max_total_tokens=10_000)
    assert min(rows.num_proposed[0], rows.draft_trials[0], rows.draft_successes[0]) > 0
    rows.assign(request, 0, 0, 16)
    assert request.row == 0
    assert (rows.num_proposed[0], rows.draft_trials[0], rows.draft_successes[0]) == (0, 0, 0)
    assert decodes.choose() == [0]


def test_drafts_end_before_the_maximum_length():
    decodes = Decodes(0.01)
    decodes.run_steps(20, accepts=True)
    decodes.rows.max_total_tokens[0] = decodes.rows.num_tokens[0] + 3
    assert decodes.choose() == [2]
    decodes.rows.max_total_tokens[0] = decodes.rows.num_tokens[0] + 1
    assert decodes.choose() == [0]
