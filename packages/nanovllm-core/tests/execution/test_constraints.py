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


class StubEvent:
    """The event at the end of a step that is unfinished until the test waits for the event or sets `is_over`."""

    def __init__(self):
        self.is_over = True
        self.num_waits = 0

    def record(self, stream: None) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True
        self.num_waits += 1


class CountingMatcher:
    """Its mask after n tokens allows token n only. It accepts `max_tokens` tokens of any kind, then raises.

    calls: receives the number of rows of each call for all rows.
    """

    end_ids = frozenset({5})

    def __init__(self, max_tokens: int, calls: list[int]):
        self.count = 0
        self.max_tokens = max_tokens
        self.calls = calls

    def accept(self, token: int) -> bool:
        if self.count == self.max_tokens:
            raise RuntimeError("too deep")
        self.count += 1
        return True

    def fill_mask(self, masks: np.ndarray, index: int) -> None:
        masks[index] = 0
        masks[index, 0] = 1 << self.count

    @staticmethod
    def accept_all(matchers, tokens) -> list[bool]:
        matchers[0].calls.append(len(matchers))
        return [matcher.accept(token) for matcher, token in zip(matchers, tokens, strict=True)]

    @staticmethod
    def fill_masks(matchers, masks) -> None:
        matchers[0].calls.append(len(matchers))
        for index, matcher in enumerate(matchers):
            matcher.fill_mask(masks, index)


@dataclass
class CountingGrammar:
    calls: list[int]
    max_tokens: int = 1000

    def start(self) -> CountingMatcher:
        return CountingMatcher(self.max_tokens, self.calls)


def make_new_row(row: int, budget: ReasoningBudget | None, grammar: CountingGrammar | None = None) -> NewRow:
    sampling = SamplingParams(reasoning_budget=budget)
    return NewRow(row, as_token_ids([1, 2]), 2, 0, sampling, seed=0, stop_ids=(), compiled_grammar=grammar)


def make_plan(rows: list[int], new_rows: list[NewRow] | None = None, samples: list[bool] | None = None) -> StepPlan:
    count = len(rows)
    scheduled = ScheduledRows(np.array(rows), np.ones(count, np.int64), np.array(samples or [True] * count))
    return StepPlan(0, new_rows or [], NewBlocks(), scheduled, BatchShape(count, count, 1), 10)


def make_handle(tokens: list[int]) -> tuple[StepHandle, StubEvent]:
    host_tokens, event = torch.empty(len(tokens) + 1, dtype=torch.int32), StubEvent()
    host_slot = HostCopySlot(host_tokens, host_tokens.numpy(), StubEvent(), event, None)
    rows = DeviceRows(*(torch.empty(0),) * 3)
    step = StepInputs(rows, np.ones(len(tokens), np.int64), np.arange(len(tokens)), 0, np.full(len(tokens), -1), -1)
    return StepHandle(step, torch.tensor(tokens, dtype=torch.int32), None, host_slot), event


def allowed_tokens(masks: torch.Tensor) -> list[list[int]]:
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row[:VOCAB]).tolist() for row in bits]


def test_sending_masks_removes_masks_of_the_earlier_step():
    """A captured sampling graph reads one mask per row, although fewer masks were sent."""
    buffer = MaskBuffer(4, 2, torch.device("cpu"))
    for which in ([2, 0, 3], [1]):
        assert (buffer.new_masks(len(which)) == -1).all()
        buffer.send(which)
    assert buffer.first_masks(4).rows.tolist() == [1, -1, -1, -1]


def test_step_waits_only_if_a_mask_depends_on_the_previous_step():
    constraints = Constraints(4, VOCAB, torch.device("cpu"))
    rows = [3, 0, 2]
    assert not constraints.begin_step(
        make_plan(rows, [make_new_row(3, None), make_new_row(0, ReasoningBudget(2, (7, 68))), make_new_row(2, None)])
    )
    events = []
    for tokens in ([1, 5, 1], [1, 7, 1]):
        step_handle, event = make_handle(tokens)
        constraints.end_step(step_handle)
        events.append(event)
        must_wait = constraints.begin_step(make_plan(rows))
    assert must_wait
    assert [event.num_waits for event in events] == [0, 0]
    # The last token of row 0 is the first of the end sequence.
    which, bits = constraints.fill_masks(np.arange(3))
    assert [event.num_waits for event in events] == [1, 1]
    assert which.tolist() == [1]
    assert allowed_tokens(bits) == [[68]]
    step_handle, event = make_handle([1, 68, 1])
    constraints.end_step(step_handle)
    # The host does not know yet whether the budget is closed.
    assert constraints.begin_step(make_plan(rows))
    assert constraints.fill_masks(np.arange(3)) is None
    assert not constraints.begin_step(make_plan(rows))
    assert not constraints._constraint_by_row


def test_allowed_ids_need_a_mask_but_no_wait():
    constraints = Constraints(4, VOCAB, torch.device("cpu"))
    sampling = SamplingParams(allowed_token_ids=(0, 31, 32, 69))
    new = NewRow(2, as_token_ids([1, 2]), 2, 0, sampling, seed=0, stop_ids=())
    assert constraints.begin_step(make_plan([0, 2], [make_new_row(0, None), new]))
    events = []
    for _ in range(3):
        which, bits = constraints.fill_masks(np.arange(2))
        assert which.tolist() == [1]
        assert allowed_tokens(bits) == [[0, 31, 32, 69]]
        step_handle, event = make_handle([1, 31])
        constraints.end_step(step_handle)
        events.append(event)
        assert constraints.begin_step(make_plan([0, 2]))
    assert [event.num_waits for event in events] == [0, 0, 0]
    # Finished steps are forgotten, although no step waits for them.
    for event in events:
        event.is_over = True
    constraints.end_step(make_handle([1, 31])[0])
    assert len(constraints._steps_in_flight) == 1


def test_skipped_and_reassigned_rows_are_not_advanced():
    constraints = Constraints(2, VOCAB, torch.device("cpu"))
    budget = ReasoningBudget(0, (9,))
    assert not constraints.begin_step(
        make_plan([0, 1], [make_new_row(0, budget), make_new_row(1, None)], [False, True])
    )
    assert constraints.begin_step(make_plan([1, 0]))
    which, bits = constraints.fill_masks(np.arange(2))
    assert (which.tolist(), allowed_tokens(bits)) == ([1], [[9]])
    step_handle, event = make_handle([4, 9])
    constraints.end_step(step_handle)
    event.is_over = True
    # The request has ended meanwhile, and the next request has its row.
    assert constraints.begin_step(make_plan([1, 0], [make_new_row(0, ReasoningBudget(0, (10,)))]))
    which, bits = constraints.fill_masks(np.arange(2))
    assert (which.tolist(), allowed_tokens(bits)) == ([1], [[10]])
    assert not constraints.begin_step(make_plan([1], [make_new_row(0, None)]))


def test_grammars_advance_in_one_call_and_a_failing_grammar_fails_only_its_row():
    constraints, calls, rows = Constraints(4, VOCAB, torch.device("cpu")), [], [0, 1, 2, 3]
    new_rows = [
        make_new_row(0, None, CountingGrammar(calls)),
        make_new_row(1, None),
        make_new_row(2, None, CountingGrammar(calls, max_tokens=2)),
        make_new_row(3, ReasoningBudget(1, (2,)), CountingGrammar(calls)),
    ]
    assert constraints.begin_step(make_plan(rows, new_rows))
    for step, masked_rows in enumerate([[0, 2, 3], [0, 2, 3], [0, 2, 3], [0, 3]]):
        which, bits = constraints.fill_masks(np.arange(4))
        assert which[which >= 0].tolist() == masked_rows
        assert allowed_tokens(bits[which >= 0]) == [[step]] * len(masked_rows)
        assert calls == ([3] * (2 * step + 1) if step < 3 else [3] * 6 + [2])
        constraints.end_step(make_handle([7, 7, 7, 7])[0])
        assert constraints.begin_step(make_plan(rows))
    assert constraints.failures == []
    constraints.fill_masks(np.arange(4))
    assert constraints.failures == [(2, "the grammar can't be followed further: too deep")]
    # The end token for both remaining grammars.
    constraints.end_step(make_handle([5, 7, 7, 5])[0])
    assert constraints.begin_step(make_plan(rows))
    assert constraints.fill_masks(np.arange(4)) is None
    assert not constraints._is_constrained[0]


def test_slow_call_makes_the_next_steps_match_and_time_each_row_separately(monkeypatch):
    monkeypatch.setattr(constraints_module, "_MAX_BATCH_CALL_S", 0.0)
    monkeypatch.setattr(constraints_module, "_NUM_SEPARATE_STEPS", 2)
    constraints, calls, rows = Constraints(2, VOCAB, torch.device("cpu")), [], [0, 1]
    constraints.begin_step(make_plan(rows, [make_new_row(row, None, CountingGrammar(calls)) for row in rows]))
    for step, num_calls in enumerate([1, 1, 1, 3]):
        _, bits = constraints.fill_masks(np.arange(2))
        assert allowed_tokens(bits) == [[step]] * 2
        assert len(calls) == num_calls
        if step == 2:
            assert all(constraint.match_s > 0 for constraint in constraints._constraint_by_row.values())
            # From now on no call is long.
            monkeypatch.setattr(constraints_module, "_MAX_BATCH_CALL_S", 10.0)
        constraints.end_step(make_handle([7, 7])[0])
        constraints.begin_step(make_plan(rows))
