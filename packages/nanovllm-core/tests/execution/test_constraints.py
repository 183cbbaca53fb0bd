import time

import numpy as np
import pytest
import torch
from constrained_steps import (
    VOCAB,
    CountingGrammar,
    CountingMatcher,
    ScriptedStepHandle,
    allowed_tokens,
    make_new_row,
    make_plan,
)

from nanovllm_core import ReasoningBudget
from nanovllm_core.execution import constraints as constraints_module
from nanovllm_core.execution.constraints import Constraints
from nanovllm_core.execution.inputs import MaskBuffer
from nanovllm_core.execution.row_constraint import GrammarFailure


def test_sending_masks_removes_masks_of_the_earlier_step():
    """A captured sampling graph reads the masks of all rows, so masks of an earlier step must not remain."""
    buffer = MaskBuffer(4, 2, torch.device("cpu"))
    for sample_indices in ([2, 0, 3], [1]):
        assert (buffer.new_masks(len(sample_indices)) == -1).all()
        buffer.send(sample_indices)
    assert buffer.first_masks(4).sample_indices.tolist() == [1, -1, -1, -1]


def test_step_waits_only_if_a_mask_depends_on_the_previous_step():
    constraints = Constraints(4, VOCAB, torch.device("cpu"))
    rows = [3, 0, 2]
    assert not constraints.begin_step(
        make_plan(
            rows, [make_new_row(3), make_new_row(0, reasoning_budget=ReasoningBudget(2, (7, 68))), make_new_row(2)]
        )
    )
    steps = []
    for tokens in ([1, 5, 1], [1, 7, 1]):
        step = ScriptedStepHandle(tokens)
        constraints.end_step(step)
        steps.append(step)
        must_wait = constraints.begin_step(make_plan(rows))
    assert must_wait
    assert [step.num_waits for step in steps] == [0, 0]
    # Token 7 of row 0 begins the end sequence, so the budget forces token 68.
    sample_indices, bits = constraints.fill_masks(np.arange(3))
    assert [step.num_waits for step in steps] == [1, 1]
    assert sample_indices.tolist() == [1]
    assert allowed_tokens(bits) == [[68]]
    step = ScriptedStepHandle([1, 68, 1])
    constraints.end_step(step)
    # The host does not know yet whether the end sequence is complete.
    assert constraints.begin_step(make_plan(rows))
    assert constraints.fill_masks(np.arange(3)) is None
    assert not constraints.begin_step(make_plan(rows))
    assert not constraints._constraint_by_row


def test_allowed_ids_need_a_mask_but_no_wait():
    constraints = Constraints(4, VOCAB, torch.device("cpu"))
    new = make_new_row(2, allowed_token_ids=(0, 31, 32, 69))
    assert constraints.begin_step(make_plan([0, 2], [make_new_row(0), new]))
    steps = []
    for _ in range(3):
        sample_indices, bits = constraints.fill_masks(np.arange(2))
        assert sample_indices.tolist() == [1]
        assert allowed_tokens(bits) == [[0, 31, 32, 69]]
        step = ScriptedStepHandle([1, 31])
        constraints.end_step(step)
        steps.append(step)
        assert constraints.begin_step(make_plan([0, 2]))
    assert [step.num_waits for step in steps] == [0, 0, 0]
    for step in steps:
        step.is_finished = True
    constraints.end_step(ScriptedStepHandle([1, 31]))
    assert len(constraints._steps_in_flight) == 1


def test_skipped_and_reassigned_rows_are_not_advanced():
    constraints = Constraints(2, VOCAB, torch.device("cpu"))
    budget = ReasoningBudget(0, (9,))
    assert not constraints.begin_step(
        make_plan([0, 1], [make_new_row(0, reasoning_budget=budget), make_new_row(1)], [False, True])
    )
    assert constraints.begin_step(make_plan([1, 0]))
    sample_indices, bits = constraints.fill_masks(np.arange(2))
    assert (sample_indices.tolist(), allowed_tokens(bits)) == ([1], [[9]])
    step = ScriptedStepHandle([4, 9])
    constraints.end_step(step)
    step.is_finished = True
    assert constraints.begin_step(make_plan([1, 0], [make_new_row(0, reasoning_budget=ReasoningBudget(0, (10,)))]))
    sample_indices, bits = constraints.fill_masks(np.arange(2))
    assert (sample_indices.tolist(), allowed_tokens(bits)) == ([1], [[10]])
    assert not constraints.begin_step(make_plan([1], [make_new_row(0)]))


def test_grammars_advance_in_one_call_and_a_failing_grammar_fails_only_its_row():
    constraints, calls, rows = Constraints(4, VOCAB, torch.device("cpu")), [], [0, 1, 2, 3]
    new_rows = [
        make_new_row(0, CountingGrammar(calls)),
        make_new_row(1),
        make_new_row(2, CountingGrammar(calls, max_tokens=2)),
        make_new_row(3, CountingGrammar(calls), reasoning_budget=ReasoningBudget(1, (2,))),
    ]
    assert constraints.begin_step(make_plan(rows, new_rows))
    for step, masked_rows in enumerate([[0, 2, 3], [0, 2, 3], [0, 2, 3], [0, 3]]):
        sample_indices, bits = constraints.fill_masks(np.arange(4))
        assert sample_indices[sample_indices >= 0].tolist() == masked_rows
        assert allowed_tokens(bits[sample_indices >= 0]) == [[step]] * len(masked_rows)
        # Steps after the failure match each row in a separate call.
        assert calls == [3] * min(2 * step + 1, 6)
        constraints.end_step(ScriptedStepHandle([7, 7, 7, 7]))
        assert constraints.begin_step(make_plan(rows))
    assert constraints.failures == []
    constraints.fill_masks(np.arange(4))
    assert constraints.failures == [GrammarFailure(2, 0, "the grammar can't be followed further: too deep")]
    constraints.end_step(ScriptedStepHandle([5, 7, 7, 5]))
    assert constraints.begin_step(make_plan(rows))
    assert constraints.fill_masks(np.arange(4)) is None
    assert not constraints._is_constrained[0]


def test_slow_call_makes_the_next_steps_match_and_time_each_row_separately(monkeypatch):
    monkeypatch.setattr(constraints_module, "_MAX_BATCH_CALL_S", 0.0)
    monkeypatch.setattr(constraints_module, "_NUM_SEPARATE_STEPS", 2)
    constraints, calls, rows = Constraints(2, VOCAB, torch.device("cpu")), [], [0, 1]
    constraints.begin_step(make_plan(rows, [make_new_row(row, CountingGrammar(calls)) for row in rows]))
    for step, num_calls in enumerate([1, 1, 1, 3]):
        _, bits = constraints.fill_masks(np.arange(2))
        assert allowed_tokens(bits) == [[step]] * 2
        assert len(calls) == num_calls
        if step == 2:
            assert all(constraint.match_time.seconds > 0 for constraint in constraints._constraint_by_row.values())
            monkeypatch.setattr(constraints_module, "_MAX_BATCH_CALL_S", 10.0)
        constraints.end_step(ScriptedStepHandle([7, 7]))
        constraints.begin_step(make_plan(rows))


@pytest.mark.parametrize(("max_call_s", "shares_grammar"), [(10.0, False), (10.0, True), (0.0, True)])
def test_all_rows_of_a_slow_grammar_share_one_budget(monkeypatch, max_call_s, shares_grammar):
    monkeypatch.setattr(constraints_module, "_MAX_BATCH_CALL_S", max_call_s)
    clock = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])

    def fill_slowly(matcher: CountingMatcher, masks, index: int) -> None:
        clock[0] += 0.3
        masks[index] = 0
        masks[index, 0] = 1 << 7

    monkeypatch.setattr(CountingMatcher, "fill_mask", fill_slowly)
    constraints, rows, grammar = Constraints(4, VOCAB, torch.device("cpu")), [0, 1, 2, 3], CountingGrammar([])
    grammars = [grammar if shares_grammar else CountingGrammar([]) for _ in rows]
    constraints.begin_step(make_plan(rows, [make_new_row(row, grammars[row]) for row in rows]))
    while True:
        constraints.fill_masks(np.arange(4))
        if len(constraints.failures) == 4:
            break
        constraints.end_step(ScriptedStepHandle([7] * 4))
        constraints.begin_step(make_plan(rows))
    assert "takes too long to follow" in constraints.failures[0].reason
    assert clock[0] < (5.0 if shares_grammar else 11.0)
