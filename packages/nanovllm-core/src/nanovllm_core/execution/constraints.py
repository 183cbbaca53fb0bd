"""Restricts the tokens of rows that have a grammar, a reasoning budget or allowed token ids.

The mask of a grammar or a budget depends on the row's previous token. The host launches the forward pass, waits for the
tokens of the previous step, and fills the masks while the device computes.
"""

import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm_core.execution.inputs import MaskBuffer, Masks
from nanovllm_core.execution.step_handle import StepHandle
from nanovllm_core.grammar_types import CompiledGrammar, GrammarMatcher
from nanovllm_core.sampling_params import ReasoningBudget
from nanovllm_core.scheduling.plan import NewRow, StepPlan

# Time limit for all calls of one request's matcher: a constant plus a time per output token. A slow matcher delays all
# requests. JSON takes 10 us per token, so only very ambiguous grammars reach the limit.
_MAX_MATCH_S = 2.0
_MAX_MATCH_S_PER_TOKEN = 0.02
# After a call for all rows that takes longer than _MAX_BATCH_CALL_S, the next _NUM_SEPARATE_STEPS steps match each row
# in a separate call, to find the slow grammar.
_MAX_BATCH_CALL_S = 0.02
_NUM_SEPARATE_STEPS = 16


@dataclass(slots=True, eq=False)
class Constraint:
    """The grammar, the reasoning budget and the allowed token ids of one row.

    matcher: None without a grammar, or after the output has completed the grammar.
    budget: None without a budget, after the reasoning has ended, or if a mask forbids a token of `budget.end`.
    allowed_mask: see `make_mask`; allows `allowed_token_ids` and tokens that end a grammar; None if all are allowed.
    num_launched_outputs: number of output tokens for which steps were launched.
    match_s: seconds spent in calls for this row alone.
    failure: why the row cannot sample a token; None if it can.
    """

    row: int
    grammar: CompiledGrammar | None
    matcher: GrammarMatcher | None
    budget: ReasoningBudget | None
    allowed_mask: NDArray[np.int32] | None = None
    num_launched_outputs: int = 0
    output_ids: list[int] = field(default_factory=list[int])
    match_s: float = 0.0
    failure: str | None = None

    @classmethod
    def from_row(cls, new: NewRow, num_mask_words: int) -> "Constraint | None":
        """The constraint of a new row after its existing output tokens; None for an unconstrained row."""
        grammar, budget = new.compiled_grammar, new.sampling.reasoning_budget
        allowed_ids = new.sampling.allowed_token_ids
        if grammar is None and budget is None and not allowed_ids:
            return None
        matcher = None if grammar is None else grammar.start()
        constraint = cls(new.row, grammar, matcher, budget)
        if allowed_ids:
            # Allow end tokens too: otherwise an output that completes its grammar could not end.
            end_ids = () if matcher is None else matcher.end_ids
            constraint.allowed_mask = make_mask((*allowed_ids, *end_ids), num_mask_words)
        for token in new.token_ids[new.num_prompt_tokens :].tolist():
            constraint.num_launched_outputs += 1
            if constraint.append_token(token):
                constraint.advance_matcher(token)
        return constraint

    @property
    def may_need_mask(self) -> bool:
        """Whether the next token may be restricted. The answer does not depend on the previous token."""
        is_exhausted = self.budget is not None and self.num_launched_outputs >= self.budget.num_tokens
        return self.matcher is not None or self.allowed_mask is not None or is_exhausted

    @property
    def depends_on_output(self) -> bool:
        """Whether the next mask may depend on the previous token."""
        return self.matcher is not None or self.budget is not None

    @property
    def has_ended(self) -> bool:
        """Whether the remaining tokens of the row are unrestricted."""
        return not self.depends_on_output and self.allowed_mask is None and self.failure is None

    def append_token(self, token: int) -> bool:
        """Append a sampled token. Returns whether the matcher must advance by the token."""
        self.output_ids.append(token)
        budget = self.budget
        if budget is not None and tuple(self.output_ids[-len(budget.end) :]) == budget.end:
            self.budget = None
        return self.matcher is not None and self.failure is None

    def advance_matcher(self, token: int) -> None:
        """Advance the matcher by the token that was appended last."""
        if (matcher := self.matcher) is not None:
            with self._limit_time():
                self.record_match_result(token, accepted=matcher.accept(token))

    def record_match_result(self, token: int, *, accepted: bool) -> None:
        """Record whether the matcher accepted a token."""
        if not accepted:
            self.failure = f"the grammar rejected token {token}, which its mask had allowed"
        elif self.matcher is not None and token in self.matcher.end_ids:
            self.matcher = None

    def restart_matcher(self) -> None:
        """Replace a matcher in an unknown state by a new matcher, advanced by all output tokens."""
        if self.grammar is None or self.matcher is None:
            return
        self.matcher = self.grammar.start()
        for token in self.output_ids:
            if self.failure is None:
                self.advance_matcher(token)

    def fill_mask(self, masks: NDArray[np.int32], index: int) -> None:
        """Set the bits of the tokens that the grammar allows in masks[index]."""
        if (matcher := self.matcher) is not None:
            with self._limit_time():
                matcher.fill_mask(masks, index)

    def apply_allowed_ids(self, mask: NDArray[np.int32]) -> bool:
        """Restrict `mask` to the allowed token ids. Returns False if all token ids are allowed."""
        if self.allowed_mask is None:
            return False
        mask &= self.allowed_mask
        if not np.any(mask):
            self.failure = "allowed_token_ids has no token that the grammar allows after the output so far"
        return True

    def force_budget_token(self, mask: NDArray[np.int32]) -> bool:
        """If the budget is exhausted, restrict `mask` to the next token of `ReasoningBudget.end`.

        If `mask` forbids this token, the budget is dropped. Returns whether the mask was changed.
        """
        required_token = self._next_end_token()
        if required_token is None:
            return False
        word, bit = divmod(required_token, 32)
        if not mask[word] >> bit & 1:
            self.budget = None
            return False
        mask[:] = 0
        mask[word] = np.uint32(1 << bit).view(np.int32)
        return True

    @contextmanager
    def _limit_time(self) -> Generator[None]:
        """Measure the time of a matcher call. An error or a timeout fails the request, not the engine."""
        start = time.perf_counter()
        try:
            yield
        # xgrammar raises RuntimeError when it reaches one of its own limits.
        except RuntimeError as error:
            self.failure = f"the grammar can't be followed further: {' '.join(str(error).split())}"
        self.match_s += time.perf_counter() - start
        if self.match_s > _MAX_MATCH_S + _MAX_MATCH_S_PER_TOKEN * len(self.output_ids):
            self.failure = "the grammar takes too long to follow: make its rules less ambiguous"

    def _next_end_token(self) -> int | None:
        """The next token that closes the reasoning; None if the budget is not exhausted."""
        budget, output_ids = self.budget, self.output_ids
        if budget is None or len(output_ids) < budget.num_tokens:
            return None
        # Number of leading tokens of `budget.end` with which the output already ends.
        num_matched = min(len(budget.end) - 1, len(output_ids))
        while tuple(output_ids[len(output_ids) - num_matched :]) != budget.end[:num_matched]:
            num_matched -= 1
        return budget.end[num_matched]


def make_mask(token_ids: Sequence[int], num_words: int) -> NDArray[np.int32]:
    """An int32 mask with one bit per token id, which allows `token_ids`. Format: see `apply_masks_`."""
    bits = np.zeros(num_words * 32, np.bool_)
    bits[np.array(token_ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class Constraints:
    """The constraints of all rows.

    Each call of a matcher releases the interpreter lock, and may wait milliseconds until the lock is free again. So
    one call advances all matchers, and one call fills all masks.
    failures: pairs (index among the step's sampling requests, reason), set by `fill_masks`.
    mask_buffer: the masks of the current step.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.failures: list[tuple[int, str]] = []
        self._constraint_by_row: dict[int, Constraint] = {}
        self._is_constrained = np.zeros(num_rows, np.bool_)
        self._num_mask_words = -(-vocab_size // 32)
        self.mask_buffer = MaskBuffer(num_rows, self._num_mask_words, device)
        # Pairs (index among the step's sampling requests, constraint): all pairs, and pairs that may need a mask.
        self._step_constraints: list[tuple[int, Constraint]] = []
        self._mask_candidates: list[tuple[int, Constraint]] = []
        self._steps_in_flight: deque[tuple[StepHandle, list[tuple[int, Constraint]]]] = deque()
        # Number of coming steps that will match each row in a separate call.
        self._num_separate_steps = 0

    def begin_step(self, plan: StepPlan) -> int:
        """Begin a step. Returns the number of masks; if it is not 0, call `fill_masks` before sampling."""
        for new in plan.new_rows:
            self._replace_constraint(new)
        self.failures, self._step_constraints, self._mask_candidates = [], [], []
        if not self._constraint_by_row:
            return 0
        rows, _, is_sampled = plan.scheduled
        sampling_rows = rows[is_sampled]
        for index in np.flatnonzero(self._is_constrained[sampling_rows]).tolist():
            constraint = self._constraint_by_row[int(sampling_rows[index])]
            self._step_constraints.append((index, constraint))
            if constraint.may_need_mask:
                self._mask_candidates.append((index, constraint))
            constraint.num_launched_outputs += 1
        return len(self._mask_candidates)

    def fill_masks(self, sampling_indices: NDArray[np.int64]) -> Masks | None:
        """Wait for the tokens of earlier steps and fill the masks. Returns None if no row is restricted.

        sampling_indices: int64 [n], indices of the step's requests that sample.
        """
        candidates = self._mask_candidates
        self._advance_matchers(wait=any(constraint.depends_on_output for _, constraint in candidates))
        grammar_candidates = [pair for pair in candidates if pair[1].matcher is not None and pair[1].failure is None]
        other_candidates = [pair for pair in candidates if pair[1].matcher is None or pair[1].failure is not None]
        masks = self.mask_buffer.new_masks(len(candidates))
        self._fill_grammar_masks([constraint for _, constraint in grammar_candidates], masks)
        has_allowed_token = np.any(masks, axis=1)
        masked_indices: list[int] = []
        for mask_index, (index, constraint) in enumerate([*grammar_candidates, *other_candidates]):
            has_grammar_mask = mask_index < len(grammar_candidates)
            if has_grammar_mask and constraint.failure is None and not has_allowed_token[mask_index]:
                constraint.failure = "the grammar allows no token of the vocabulary after the output so far"
            is_masked = has_grammar_mask
            if constraint.failure is None:
                is_masked |= constraint.apply_allowed_ids(masks[mask_index])
                is_masked |= constraint.force_budget_token(masks[mask_index])
            if constraint.failure is not None:
                is_masked = False
                self.failures.append((index, constraint.failure))
            masked_indices.append(int(sampling_indices[index]) if is_masked else -1)
        return None if max(masked_indices) < 0 else self.mask_buffer.send(masked_indices)

    def end_step(self, handle: StepHandle) -> None:
        """Store the handle of the current step, and advance matchers by the tokens of finished steps."""
        self._advance_matchers(wait=False)
        if self._step_constraints:
            self._steps_in_flight.append((handle, self._step_constraints))

    def _replace_constraint(self, new: NewRow) -> None:
        self._remove_constraint(new.row)
        if (constraint := Constraint.from_row(new, self._num_mask_words)) is not None:
            self._constraint_by_row[new.row] = constraint
            self._is_constrained[new.row] = True

    def _remove_constraint(self, row: int) -> None:
        self._constraint_by_row.pop(row, None)
        self._is_constrained[row] = False

    def _advance_matchers(self, *, wait: bool) -> None:
        """Advance matchers by the tokens of finished steps. wait: wait for all steps in flight to finish."""
        while self._steps_in_flight and (wait or self._steps_in_flight[0][0].is_finished):
            handle, step_constraints = self._steps_in_flight.popleft()
            handle.wait()
            token_ids = handle.token_ids
            new_tokens = [(constraint, int(token_ids[index])) for index, constraint in step_constraints]
            self._advance_all([pair for pair in new_tokens if pair[0].append_token(pair[1])])
            for constraint, _ in new_tokens:
                # The row may belong to another request now.
                if constraint.has_ended and self._constraint_by_row.get(constraint.row) is constraint:
                    self._remove_constraint(constraint.row)

    def _advance_all(self, new_tokens: list[tuple[Constraint, int]]) -> None:
        """Advance the matcher of each constraint by its new token."""
        if self._num_separate_steps or len(new_tokens) < 2:
            for constraint, token in new_tokens:
                constraint.advance_matcher(token)
            return
        matchers = [constraint.matcher for constraint, _ in new_tokens if constraint.matcher is not None]
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

    def _fill_grammar_masks(self, constraints: list[Constraint], masks: NDArray[np.int32]) -> None:
        """Write the mask of `constraints[i]` to masks[i]."""
        matchers = [constraint.matcher for constraint in constraints if constraint.matcher is not None]
        if not self._num_separate_steps and len(matchers) > 1:
            with self._detect_long_call():
                try:
                    matchers[0].fill_masks(matchers, masks)
                except RuntimeError:
                    self._num_separate_steps = _NUM_SEPARATE_STEPS
                else:
                    return
        for index, constraint in enumerate(constraints):
            constraint.fill_mask(masks, index)
        self._num_separate_steps = max(self._num_separate_steps - 1, 0)

    @contextmanager
    def _detect_long_call(self) -> Generator[None]:
        """Switch to separate calls if a call for all rows takes long."""
        start = time.perf_counter()
        yield
        if time.perf_counter() - start > _MAX_BATCH_CALL_S:
            self._num_separate_steps = _NUM_SEPARATE_STEPS
