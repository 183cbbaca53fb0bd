"""When a step waits for the tokens of the previous step because of grammars and budgets."""

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm_core import ReasoningBudget, SamplingParams
from nanovllm_core.execution import constraints as constraints_module
from nanovllm_core.execution.constraints import Constraints
from nanovllm_core.execution.host_copy import HostCopySlot
from nanovllm_core.execution.inputs import DeviceRows, MaskBuffer
from nanovllm_core.execution.request_table import StepInputs
from nanovllm_core.execution.step_handle import StepHandle
from nanovllm_core.scheduling.plan import BatchShape, NewBlocks, NewRow, ScheduledRows, StepPlan
from nanovllm_core.token_ids import as_token_ids

VOCAB = 70


class Event:
    """The end event of a step that is unfinished until the test waits for it or sets `over`."""

    def __init__(self):
        self.over = True
        self.waits = 0

    def record(self, stream: None) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True
        self.waits += 1


class CountingMatcher:
    """Allows after n tokens the token n, and whatever comes; fails after `breaks_after`. Notes calls for all rows."""

    end_ids = frozenset({5})

    def __init__(self, breaks_after: int, calls: list[int]):
        self.count = 0
        self.breaks_after = breaks_after
        self.calls = calls

    def accept(self, token: int) -> bool:
        if self.count == self.breaks_after:
            raise RuntimeError("too deep")
        self.count += 1
        return True

    def fill(self, masks: np.ndarray, index: int) -> None:
        masks[index] = 0
        masks[index, 0] = 1 << self.count

    @staticmethod
    def accept_all(matchers, tokens) -> list[bool]:
        matchers[0].calls.append(len(matchers))
        return [matcher.accept(token) for matcher, token in zip(matchers, tokens, strict=True)]

    @staticmethod
    def fill_all(matchers, masks) -> None:
        matchers[0].calls.append(len(matchers))
        for index, matcher in enumerate(matchers):
            matcher.fill(masks, index)


@dataclass
class CountingGrammar:
    calls: list[int]
    breaks_after: int = 1000

    def start(self) -> CountingMatcher:
        return CountingMatcher(self.breaks_after, self.calls)


def new_row(row: int, budget: ReasoningBudget | None, grammar: CountingGrammar | None = None) -> NewRow:
    sampling = SamplingParams(reasoning_budget=budget)
    return NewRow(row, as_token_ids([1, 2]), 2, 0, sampling, seed=0, stop_ids=(), compiled_grammar=grammar)


def plan(rows: list[int], new_rows: list[NewRow] | None = None, samples: list[bool] | None = None) -> StepPlan:
    count = len(rows)
    scheduled = ScheduledRows(np.array(rows), np.ones(count, np.int64), np.array(samples or [True] * count))
    return StepPlan(0, new_rows or [], NewBlocks(), scheduled, BatchShape(count, count, 1), 10)


def handle(tokens: list[int]) -> tuple[StepHandle, Event]:
    landed, event = torch.empty(len(tokens) + 1, dtype=torch.int32), Event()
    place = HostCopySlot(landed, landed.numpy(), Event(), event, None)
    rows = DeviceRows(*(torch.empty(0),) * 3)
    step = StepInputs(rows, np.arange(len(tokens)), 0, np.full(len(tokens), -1), -1)
    return StepHandle(step, torch.tensor(tokens, dtype=torch.int32), None, place), event


def allowed(masks: torch.Tensor) -> list[list[int]]:
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row[:VOCAB]).tolist() for row in bits]


def test_masks_of_an_earlier_step_apply_to_no_row():
    """A captured choice of tokens looks at as many as it has rows, however few were sent."""
    buffer = MaskBuffer(4, 2, torch.device("cpu"))
    for which in ([2, 0, 3], [1]):
        assert (buffer.new_masks(len(which)) == -1).all()
        buffer.send(which)
    assert buffer.first_masks(4).rows.tolist() == [1, -1, -1, -1]


def test_a_step_waits_only_when_a_mask_depends_on_the_step_before():
    constraints = Constraints(4, VOCAB, torch.device("cpu"))
    rows = [3, 0, 2]
    assert not constraints.begin_step(
        plan(rows, [new_row(3, None), new_row(0, ReasoningBudget(2, (7, 68))), new_row(2, None)])
    )
    events = []
    for tokens in ([1, 5, 1], [1, 7, 1]):
        made, event = handle(tokens)
        constraints.end_step(made)
        events.append(event)
        due = constraints.begin_step(plan(rows))
    assert due
    assert [event.waits for event in events] == [0, 0]
    # Its last token is how the end begins.
    which, bits = constraints.fill_masks(np.arange(3))
    assert [event.waits for event in events] == [1, 1]
    assert which.tolist() == [1]
    assert allowed(bits) == [[68]]
    made, event = handle([1, 68, 1])
    constraints.end_step(made)
    # Whether it is closed is not known yet.
    assert constraints.begin_step(plan(rows))
    assert constraints.fill_masks(np.arange(3)) is None
    assert not constraints.begin_step(plan(rows))
    assert not constraints._constraint_by_row


def test_skipped_and_reassigned_rows_are_not_advanced():
    constraints = Constraints(2, VOCAB, torch.device("cpu"))
    budget = ReasoningBudget(0, (9,))
    assert not constraints.begin_step(plan([0, 1], [new_row(0, budget), new_row(1, None)], [False, True]))
    assert constraints.begin_step(plan([1, 0]))
    which, bits = constraints.fill_masks(np.arange(2))
    assert (which.tolist(), allowed(bits)) == ([1], [[9]])
    made, event = handle([4, 9])
    constraints.end_step(made)
    event.over = True
    # The request has ended meanwhile, and the next one has its row.
    assert constraints.begin_step(plan([1, 0], [new_row(0, ReasoningBudget(0, (10,)))]))
    which, bits = constraints.fill_masks(np.arange(2))
    assert (which.tolist(), allowed(bits)) == ([1], [[10]])
    assert not constraints.begin_step(plan([1], [new_row(0, None)]))


def test_grammars_are_followed_in_one_call_and_one_that_breaks_harms_no_other():
    constraints, calls, rows = Constraints(4, VOCAB, torch.device("cpu")), [], [0, 1, 2, 3]
    new_rows = [
        new_row(0, None, CountingGrammar(calls)),
        new_row(1, None),
        new_row(2, None, CountingGrammar(calls, breaks_after=2)),
        new_row(3, ReasoningBudget(1, (2,)), CountingGrammar(calls)),
    ]
    assert constraints.begin_step(plan(rows, new_rows))
    for step, others in enumerate([[0, 2, 3], [0, 2, 3], [0, 2, 3], [0, 3]]):
        which, bits = constraints.fill_masks(np.arange(4))
        assert which[which >= 0].tolist() == others
        assert allowed(bits[which >= 0]) == [[step]] * len(others)
        assert calls == ([3] * (2 * step + 1) if step < 3 else [3] * 6 + [2])
        constraints.end_step(handle([7, 7, 7, 7])[0])
        assert constraints.begin_step(plan(rows))
    assert constraints.failures == []
    constraints.fill_masks(np.arange(4))
    assert constraints.failures == [(2, "the grammar can't be followed further: too deep")]
    # The end of both that are left.
    constraints.end_step(handle([5, 7, 7, 5])[0])
    assert constraints.begin_step(plan(rows))
    assert constraints.fill_masks(np.arange(4)) is None
    assert not constraints._is_constrained[0]


def test_a_call_that_takes_long_has_each_row_followed_and_timed_by_itself(monkeypatch):
    monkeypatch.setattr(constraints_module, "_MAX_BATCH_CALL_S", 0.0)
    monkeypatch.setattr(constraints_module, "_NUM_SEPARATE_STEPS", 2)
    constraints, calls, rows = Constraints(2, VOCAB, torch.device("cpu")), [], [0, 1]
    constraints.begin_step(plan(rows, [new_row(row, None, CountingGrammar(calls)) for row in rows]))
    for step, seen in enumerate([1, 1, 1, 3]):
        _, bits = constraints.fill_masks(np.arange(2))
        assert allowed(bits) == [[step]] * 2
        assert len(calls) == seen
        if step == 2:
            assert all(constraint.match_s > 0 for constraint in constraints._constraint_by_row.values())
            # From now on no call is long.
            monkeypatch.setattr(constraints_module, "_MAX_BATCH_CALL_S", 10.0)
        constraints.end_step(handle([7, 7])[0])
        constraints.begin_step(plan(rows))
