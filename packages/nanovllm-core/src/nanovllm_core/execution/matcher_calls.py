"""Calls the grammar matchers of several rows at once."""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.execution.row_constraint import Constraint
from nanovllm_core.grammar_types import GrammarMatcher

# After a call for all rows that takes longer than _MAX_BATCH_CALL_S, the next _NUM_SEPARATE_STEPS steps match each row
# in a separate call, to find the slow grammar.
_MAX_BATCH_CALL_S = 0.02
_NUM_SEPARATE_STEPS = 16


class MatcherCalls:
    """Calls the matchers of the rows of a step.

    Each call of a matcher releases the interpreter lock, and may wait milliseconds until the lock is free again. So
    one call serves all rows.
    """

    def __init__(self) -> None:
        # Number of steps, including the current step, that match each row in a separate call.
        self._num_separate_steps = 0

    def end_step(self) -> None:
        """Count a step in which masks were filled."""
        if self._num_separate_steps:
            self._num_separate_steps -= 1

    def advance(self, new_tokens: Sequence[tuple[Constraint, int]]) -> None:
        """Advance the matcher of each constraint by its new token."""
        if self._num_separate_steps or len(new_tokens) < 2:
            for constraint, token in new_tokens:
                constraint.advance_matcher(token)
            return
        matchers = _matchers_of([constraint for constraint, _ in new_tokens])
        with self._detect_long_call():
            try:
                results = matchers[0].accept_all(matchers, [token for _, token in new_tokens])
            except RuntimeError:
                # One matcher failed. Each other matcher may have advanced or not.
                for constraint, _ in new_tokens:
                    constraint.restart_matcher()
                return
        for (constraint, token), accepted in zip(new_tokens, results, strict=True):
            constraint.record_match_result(token, accepted=accepted)

    def fill_masks(self, constraints: Sequence[Constraint], masks: NDArray[np.int32]) -> None:
        """Write the mask of the grammar of `constraints[i]` to masks[i]."""
        matchers = _matchers_of(constraints)
        if not self._num_separate_steps and len(matchers) > 1:
            with self._detect_long_call():
                try:
                    matchers[0].fill_masks(matchers, masks)
                except RuntimeError:
                    self._separate_rows()
                else:
                    return
        for index, constraint in enumerate(constraints):
            constraint.fill_mask(masks, index)

    def drop_drafts(self, constraints: Sequence[Constraint]) -> None:
        """Return each constraint to its state before the drafts."""
        changed_constraints: list[Constraint] = []
        nums_tokens: list[int] = []
        for constraint in constraints:
            num_tokens = constraint.drop_drafts()
            if num_tokens is None:
                # The same draft may fail again in the next step: do not restart the matchers of other rows again.
                self._separate_rows()
            elif num_tokens:
                changed_constraints.append(constraint)
                nums_tokens.append(num_tokens)
        if matchers := _matchers_of(changed_constraints):
            matchers[0].restore_all(matchers, nums_tokens)

    def _separate_rows(self) -> None:
        self._num_separate_steps = _NUM_SEPARATE_STEPS + 1

    @contextmanager
    def _detect_long_call(self) -> Generator[None]:
        """Switch to separate calls if a call for all rows takes long."""
        start = time.perf_counter()
        yield
        if time.perf_counter() - start > _MAX_BATCH_CALL_S:
            self._separate_rows()


def _matchers_of(constraints: Sequence[Constraint]) -> list[GrammarMatcher]:
    return [constraint.matcher for constraint in constraints if constraint.matcher is not None]
