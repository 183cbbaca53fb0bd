"""The numbers of drafts that the scheduler chooses, from the acceptance of earlier drafts and the times of steps."""

import numpy as np
import pytest

from nanovllm_core.scheduling.drafting import DraftLimits, DraftPlanner
from nanovllm_core.scheduling.plan import DraftResults
from nanovllm_core.scheduling.rows import RowTable
from nanovllm_core.scheduling.step_time import StepTimeCoefficients, StepTimeModel, StepWork

MAX_DRAFTS = 4
RIGHT, WRONG = 7, 8  # The proposed token, and another one.


class FixedStepTimes(StepTimeModel):
    """Predicts steps of 10 ms. draft_share: time of a draft as a share of a step."""

    def __init__(self, draft_share: float):
        super().__init__()
        self._coefficients = StepTimeCoefficients(0.01, 0.01 * draft_share, 0.0, 0.0)

    def predict(self, work: StepWork) -> float:
        return 0.01


class Decodes:
    """Requests that decode, with the results of their steps."""

    def __init__(self, draft_share: float, num_requests: int = 1, max_step_tokens: int = 64, num_lookahead: int = 0):
        self.rows = RowTable(num_requests, 1)
        self.rows.keys[:] = np.arange(num_requests) + 1
        self.rows.can_draft[:] = True
        self.rows.num_tokens[:], self.rows.max_total_tokens[:] = 10, 1000
        limits = DraftLimits(MAX_DRAFTS, max_step_tokens, num_lookahead)
        self.planner = DraftPlanner(self.rows, limits, FixedStepTimes(draft_share))

    def choose(self) -> list[int]:
        """The number of drafts of each request in the next step."""
        count = len(self.rows.keys)
        num_drafts = self.planner.choose(np.arange(count), StepWork(count, 0, 0))
        return [0] * count if num_drafts is None else num_drafts.tolist()

    def count_proposing_steps(self, num_steps: int) -> int:
        """The number of steps that should propose drafts."""
        count = len(self.rows.keys)
        return sum(self.planner.should_propose(np.arange(count), StepWork(count, 0, 0)) for _ in range(num_steps))

    def run_steps(self, count: int, *, accepts: bool, num_proposed: int = MAX_DRAFTS) -> None:
        """Run steps with the chosen drafts, of which all or none are accepted."""
        for _ in range(count):
            num_drafts = np.array(self.choose())
            num_new = 1 + num_drafts * accepts
            first_tokens = np.full(len(num_drafts), RIGHT if accepts else WRONG, np.int32)
            proposals = np.full(len(num_drafts), num_proposed), np.full(len(num_drafts), RIGHT, np.int32)
            rows = np.arange(len(num_drafts))
            self.planner.observe(rows, num_drafts, first_tokens, DraftResults(num_new, *proposals))


def test_a_request_without_proposals_has_no_drafts():
    decodes = Decodes(0.01)
    assert decodes.choose() == [0]
    decodes.run_steps(3, accepts=True, num_proposed=0)
    assert decodes.choose() == [0]
    decodes.run_steps(1, accepts=True, num_proposed=2)
    assert decodes.choose() == [2]


def test_accepted_drafts_lead_to_as_many_drafts_as_allowed():
    decodes = Decodes(0.05)
    decodes.run_steps(20, accepts=True)
    assert decodes.choose() == [MAX_DRAFTS]
    assert decodes.planner.num_accepted.tolist() == decodes.planner.num_verified.tolist()


def test_drafts_that_cost_time_are_rarely_proposed_while_they_are_rejected():
    decodes = Decodes(0.05, num_lookahead=MAX_DRAFTS)
    assert decodes.count_proposing_steps(32) == 32
    decodes.run_steps(20, accepts=False)
    assert decodes.count_proposing_steps(32) == 2
    decodes.run_steps(20, accepts=True)
    assert decodes.count_proposing_steps(32) == 32
    # N-grams cost almost no time.
    decodes = Decodes(0.05)
    decodes.run_steps(20, accepts=False)
    assert decodes.count_proposing_steps(32) == 32


@pytest.mark.parametrize("draft_share", [0.01, 0.03, 0.1])
def test_rejected_drafts_cost_less_than_one_percent_of_the_time(draft_share):
    decodes, num_steps = Decodes(draft_share), 1000
    decodes.run_steps(num_steps, accepts=False)
    assert decodes.choose() == [0]
    assert decodes.planner.num_verified.sum() * draft_share < 0.01 * num_steps
    assert decodes.planner.num_accepted.sum() == 0


def test_drafts_return_soon_after_text_begins_to_repeat():
    decodes = Decodes(0.03)
    decodes.run_steps(300, accepts=False)
    assert decodes.choose() == [0]
    # Tokens that equal unused proposals count as evidence.
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


def test_a_new_request_in_a_row_starts_without_proposals():
    decodes = Decodes(0.01)
    decodes.run_steps(20, accepts=True)
    decodes.rows.keys[0] = 99
    assert decodes.choose() == [0]


def test_drafts_end_before_the_maximum_length():
    decodes = Decodes(0.01)
    decodes.run_steps(20, accepts=True)
    decodes.rows.num_tokens[0] = 997
    assert decodes.choose() == [2]
    decodes.rows.num_tokens[0] = 999
    assert decodes.choose() == [0]
