import json

import numpy as np
import pytest
import torch
from constrained_steps import (
    END,
    VOCAB,
    CountingGrammar,
    CountingMatcher,
    RowWithoutDrafts,
    ScriptedStepHandle,
    allowed_tokens,
    make_new_row,
    make_plan,
    unpack,
)

from nanovllm_core import GrammarSpec, ReasoningBudget
from nanovllm_core.execution import row_constraint
from nanovllm_core.execution.constraints import Constraints
from nanovllm_core.execution.row_constraint import GrammarFailure
from nanovllm_core.grammar import json_termination
from nanovllm_core.grammar.compiler import Compiler
from nanovllm_core.scheduling.plan import NewRow, StepPlan

CPU = torch.device("cpu")


def begin_step_and_fill_masks(constraints: Constraints, plan: StepPlan) -> tuple[int, dict[int, list[int]]]:
    """Returns (number of masks, tokens that each masked entry allows)."""
    num_masks = constraints.begin_step(plan)
    num_entries = plan.scheduled.num_tokens if plan.shape.has_drafts else np.ones(len(plan.scheduled.rows), np.int64)
    masks = constraints.fill_masks(np.cumsum(num_entries) - num_entries) if num_masks else None
    if masks is None:
        return num_masks, {}
    is_used = masks.sample_indices >= 0
    return num_masks, dict(
        zip(masks.sample_indices[is_used].tolist(), allowed_tokens(masks.bits[is_used]), strict=True)
    )


def start(
    new_rows: list[NewRow], token_ids: list[int], draft_ids: list[list[int]], *, num_entries: int = 30
) -> Constraints:
    """Returns constraints after a step that sampled `token_ids` and proposed `draft_ids`."""
    constraints = Constraints(len(new_rows), VOCAB, CPU, num_entries)
    begin_step_and_fill_masks(constraints, make_plan(range(len(new_rows)), new_rows))
    constraints.end_step(ScriptedStepHandle(token_ids, None, draft_ids))
    return constraints


def test_entries_after_a_forbidden_draft_have_no_mask():
    # `CountingGrammar` allows token 1, then 2, then 3.
    constraints = start([make_new_row(0, CountingGrammar())], [0], [[1, 9, 3]])
    assert begin_step_and_fill_masks(constraints, make_plan([0], num_drafts=[3])) == (4, {0: [1], 1: [2]})
    constraints.end_step(ScriptedStepHandle([1, 2], [2], [[3, 4, 0]]))
    assert begin_step_and_fill_masks(constraints, make_plan([0], num_drafts=[2])) == (3, {0: [3], 1: [4], 2: [5]})


def test_no_mask_follows_a_draft_that_violates_allowed_ids_or_a_forced_token():
    allowed = make_new_row(0, CountingGrammar(), [0], allowed_token_ids=(1, 2, 4))
    forced = make_new_row(1, reasoning_budget=ReasoningBudget(2, (7, 8)))
    constraints = start([allowed, forced], [1, 1], [[2, 3, 4], [6, 6, 7]])
    num_masks, masks = begin_step_and_fill_masks(constraints, make_plan([0, 1], num_drafts=[3, 3]))
    assert num_masks == 8
    # After draft 2, the grammar of row 0 allows only token 3. Token 3 is not an allowed id.
    assert masks == {0: [2], 5: [7]}
    reason = "allowed_token_ids has no token that the grammar allows after the output so far"
    assert constraints.failures == [GrammarFailure(0, 1, reason)]


def test_matchers_are_called_once_per_entry_for_all_rows():
    calls: list[int] = []
    rows = [make_new_row(row, CountingGrammar(calls)) for row in range(3)]
    constraints = start([*rows, make_new_row(3)], [0] * 4, [[1, 2, 3]] * 2 + [[1, 7, 7]] + [[0] * 3])
    calls.clear()
    num_masks, masks = begin_step_and_fill_masks(constraints, make_plan(range(4), num_drafts=[1, 3, 3, 0]))
    assert num_masks == 10
    assert masks == {0: [1], 1: [2], 2: [1], 3: [2], 4: [3], 5: [4], 6: [1], 7: [2]}
    # From the third entry on, row 1 is alone and needs no batch calls.
    assert calls == [3, 3, 3, 3]


def test_end_token_among_the_drafts_ends_the_grammar_but_not_the_allowed_ids():
    rows = [
        make_new_row(0, CountingGrammar(), [0, 1, 2]),
        make_new_row(1, CountingGrammar(), [0, 1, 2], allowed_token_ids=(3, 4)),
    ]
    constraints = start(rows, [3, 3], [[4, END, 6, 6]] * 2)
    plan = make_plan([0, 1], num_drafts=[4, 4])
    with_end = [3, 4, END]
    assert begin_step_and_fill_masks(constraints, plan) == (
        10,
        {0: [4], 1: [END], 5: [4], 6: [END], 7: with_end, 8: with_end, 9: with_end},
    )
    constraints.end_step(ScriptedStepHandle([4, 4], [1, 1], [[END, 0, 0, 0]] * 2))
    assert begin_step_and_fill_masks(constraints, make_plan([0, 1])) == (2, {0: [END], 1: [END]})
    constraints.end_step(ScriptedStepHandle([END, END], None, [[0, 0, 0, 0]] * 2))
    assert begin_step_and_fill_masks(constraints, make_plan([0, 1])) == (2, {1: with_end})


def test_budget_is_forced_after_drafts():
    row = make_new_row(0, reasoning_budget=ReasoningBudget(3, (7, 8)))
    constraints = start([row], [1], [[1, 7, 8, 9]])
    assert begin_step_and_fill_masks(constraints, make_plan([0], num_drafts=[4])) == (5, {2: [8]})
    constraints.end_step(ScriptedStepHandle([1, 2], [2], [[7, 9, 9, 9]]))
    assert begin_step_and_fill_masks(constraints, make_plan([0], num_drafts=[2])) == (3, {0: [7], 1: [8]})
    constraints.end_step(ScriptedStepHandle([7, 8], [2], [[9, 9, 9, 9]]))
    assert begin_step_and_fill_masks(constraints, make_plan([0], num_drafts=[2])) == (3, {})
    assert constraints.begin_step(make_plan([0])) == 0


@pytest.mark.parametrize("num_output_tokens", [1, 3])
def test_budget_that_can_not_be_forced_after_drafts_is_dropped_only_if_the_drafts_are_accepted(num_output_tokens):
    # After 3 tokens, the budget would force the end token 4, but the grammar allows only token 3.
    row = make_new_row(0, CountingGrammar(), reasoning_budget=ReasoningBudget(3, (4,)))
    constraints = start([row], [0], [[1, 2, 3]])
    assert begin_step_and_fill_masks(constraints, make_plan([0], num_drafts=[3])) == (
        4,
        {0: [1], 1: [2], 2: [3], 3: [4]},
    )
    assert constraints._constraint_by_row[0].budget is not None
    constraints.end_step(ScriptedStepHandle([1, 2, 3][:num_output_tokens], [num_output_tokens], [[3] * 3]))
    begin_step_and_fill_masks(constraints, make_plan([0]))
    assert (constraints._constraint_by_row[0].budget is None) == (num_output_tokens == 3)


def test_number_of_masks_assumes_accepted_drafts_until_the_result_is_known():
    row = make_new_row(0, reasoning_budget=ReasoningBudget(6, (7,)))
    constraints = start([row], [1], [[1] * 5])
    assert constraints.begin_step(make_plan([0], num_drafts=[4])) == 0
    step = ScriptedStepHandle([2], [1], [[1] * 5])
    constraints.end_step(step)
    assert constraints.begin_step(make_plan([0], num_drafts=[1])) == 2
    assert constraints.fill_masks(np.zeros(1, np.int64)) is None
    assert step.num_waits == 1
    constraints.end_step(ScriptedStepHandle([2], None, [[1] * 5]))
    constraints._steps_in_flight[0].handle.is_finished = True
    constraints.end_step(ScriptedStepHandle([2]))
    assert constraints._constraint_by_row[0].num_launched_outputs == 3


@pytest.mark.parametrize("num_rows", [1, 2])
def test_grammar_that_fails_after_drafts_fails_only_a_request_that_accepts_them(num_rows):
    reason = "the grammar can't be followed further: too deep"
    calls: list[int] = []
    rows = [make_new_row(0, CountingGrammar(calls, max_tokens=3)), make_new_row(1, CountingGrammar(calls))][:num_rows]
    constraints = start(rows, [0] * num_rows, [[1, 2, 3, 4]] * num_rows)
    plan, masks = make_plan(range(num_rows), num_drafts=[4] * num_rows), {0: [1], 1: [2], 2: [3]}
    other_masks = {5: [1], 6: [2], 7: [3], 8: [4], 9: [5]} if num_rows == 2 else {}
    for _ in range(2):
        calls.clear()
        assert begin_step_and_fill_masks(constraints, plan) == (5 * num_rows, masks | other_masks)
        assert constraints.failures == [GrammarFailure(0, 3, reason)]
        assert constraints._constraint_by_row[0].failure is None
        # Try the same position again, as if the step had not been launched.
        constraints._constraint_by_row[0].num_launched_outputs = 1
    assert calls == []
    accepted = [1] if num_rows == 2 else []
    constraints.end_step(ScriptedStepHandle([1, 2, *accepted], [2, *accepted], [[3, 4, 5, 6]] * num_rows))
    assert begin_step_and_fill_masks(constraints, make_plan(range(num_rows)))[1] == dict(
        [(0, [3]), (1, [2])][:num_rows]
    )
    assert constraints.failures == []
    constraints.end_step(ScriptedStepHandle([3, 2][:num_rows], None, [[4, 5, 6, 7]] * num_rows))
    begin_step_and_fill_masks(constraints, make_plan(range(num_rows), num_drafts=[2] * num_rows))
    assert constraints.failures == [GrammarFailure(0, 0, reason)]


def test_failure_after_accepted_drafts_lasts():
    row = make_new_row(0, CountingGrammar(), [0], allowed_token_ids=(1, 2, 4))
    constraints = start([row], [1], [[2, 3, 4]])
    begin_step_and_fill_masks(constraints, make_plan([0], num_drafts=[3]))
    (failure,) = constraints.failures
    assert failure.num_drafts == 1
    # Token 60 was sampled without a mask. After this token, the grammar allows token 4.
    constraints.end_step(ScriptedStepHandle([2, 60], [2], [[4, 4, 4]]))
    begin_step_and_fill_masks(constraints, make_plan([0], num_drafts=[3]))
    assert constraints.failures == [GrammarFailure(0, 0, failure.reason)]


def test_grammar_that_is_too_slow_for_drafts_fails_after_the_drafts(monkeypatch):
    constraints = start([make_new_row(0, CountingGrammar())], [0], [[1, 2, 3]])
    begin_step_and_fill_masks(constraints, make_plan([0]))
    constraints.end_step(ScriptedStepHandle([1], None, [[2, 3, 4]]))
    fill_mask = CountingMatcher.fill_mask

    def fill_slowly(matcher: CountingMatcher, masks: np.ndarray, index: int) -> None:
        if matcher.count == 3:
            monkeypatch.setattr(row_constraint, "_MAX_MATCH_S", -1e9)
        fill_mask(matcher, masks, index)

    monkeypatch.setattr(CountingMatcher, "fill_mask", fill_slowly)
    assert begin_step_and_fill_masks(constraints, make_plan([0], num_drafts=[3])) == (4, {0: [2]})
    reason = "the grammar takes too long to follow: make its rules less ambiguous"
    assert constraints.failures == [GrammarFailure(0, 1, reason)]
    assert constraints._constraint_by_row[0].failure is None


def test_allowed_ids_alone_restrict_all_entries_without_waiting():
    constraints = start([make_new_row(0, allowed_token_ids=(3, 40))], [3], [[1, 2, 3]])
    assert begin_step_and_fill_masks(constraints, make_plan([0], num_drafts=[3])) == (
        4,
        {entry: [3, 40] for entry in range(4)},
    )
    assert len(constraints._steps_in_flight) == 1


def test_more_drafts_than_the_previous_step_proposed_raise():
    constraints = start([make_new_row(0, CountingGrammar())], [0], [[1]])
    with pytest.raises(RuntimeError, match="a step has 2 drafts for row 0, but .* previous step has 1"):
        begin_step_and_fill_masks(constraints, make_plan([0], num_drafts=[2]))


@pytest.mark.parametrize("num_output_tokens", [1, 3, 5])
def test_string_that_repeats_itself_ends_after_drafts(num_output_tokens):
    """The drafts reach the limit of repetitions, close the string and open another string."""
    tokens = [*(bytes((byte,)) for byte in range(256)), b""]
    grammar = Compiler(tokens, [256], len(tokens)).compile(
        GrammarSpec("json_schema", json.dumps({"type": "array", "items": {"type": "string"}}))
    )
    output = [*b'["', *b"a" * (json_termination.MIN_REPEATED_TOKENS - 2)]
    target = [*b'aa", "', *b"b" * 10]
    plain, masks, later_masks = RowWithoutDrafts({"grammar": grammar, "output_ids": output}, len(tokens)), [], []
    for position, token in enumerate(target):
        (masks if position < 5 else later_masks).append(plain.next_mask()[0])
        plain.append(token)
    constraints = Constraints(1, len(tokens), CPU, 5)
    constraints.begin_step(make_plan([0], [make_new_row(0, grammar, output[:-1])]))
    constraints.fill_masks(np.zeros(1, np.int64))
    constraints.end_step(ScriptedStepHandle(output[-1:], None, [target[:4]]))
    constraints.begin_step(make_plan([0], num_drafts=[4]))
    _, bits = constraints.fill_masks(np.zeros(1, np.int64))
    assert [mask.numpy().tobytes() for mask in bits] == masks
    assert np.flatnonzero(unpack(masks[2], len(tokens))).tolist() == [ord('"')]
    constraints.end_step(
        ScriptedStepHandle(target[:num_output_tokens], [num_output_tokens], [target[num_output_tokens:][:4]])
    )
    constraints.begin_step(make_plan([0], num_drafts=[4]))
    _, bits = constraints.fill_masks(np.zeros(1, np.int64))
    assert [mask.numpy().tobytes() for mask in bits] == [*masks, *later_masks][num_output_tokens:][:5]
