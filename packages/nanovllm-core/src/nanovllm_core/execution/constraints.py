"""Restricts the tokens of rows that have a grammar or an exhausted budget.

The mask of such a row depends on its previous token. So the step is launched up to its logits; the host then waits for
the previous step's tokens and fills the masks while the device computes.
"""

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm_core.execution.inputs import MaskBuffer
from nanovllm_core.execution.sampler import Masks
from nanovllm_core.execution.step_handle import StepHandle
from nanovllm_core.grammar_types import CompiledGrammar, GrammarMatcher
from nanovllm_core.sampling_params import Budget
from nanovllm_core.scheduling.plan import NewRow, StepPlan

# Limit on the seconds that matching may take for one request: a constant plus a part per token. All requests wait
# meanwhile. JSON takes 10 us per token; only very ambiguous grammars reach the limit.
_TIME_LIMIT = 2.0
_TIME_LIMIT_PER_TOKEN = 0.02
# If one call for all rows takes longer than this, in seconds, the next steps match each row in a call of its own, to
# find the slow grammar.
_LONG_CALL = 0.02
_SEPARATE_STEPS = 16


@dataclass(slots=True, eq=False)
class Constraint:
    """The grammar and the budget of one row.

    row: the row's index in the request table.
    grammar: None for a request without a grammar.
    matcher: None without a grammar, and after the grammar has ended.
    budget: None without a budget, and after it was closed or given up.
    num_sampled: outputs for which steps were launched.
    known: the outputs that the host knows.
    match_s: seconds spent on this grammar in calls of its own.
    failure: why the row cannot sample any token; None if it can.
    """

    row: int
    grammar: CompiledGrammar | None
    matcher: GrammarMatcher | None
    budget: Budget | None
    num_sampled: int = 0
    known: list[int] = field(default_factory=list[int])
    match_s: float = 0.0
    failure: str | None = None

    @classmethod
    def of(cls, new: NewRow) -> "Constraint | None":
        """The constraint of a new row, advanced by the outputs that it already has; None for an unconstrained row."""
        grammar, budget = new.compiled_grammar, new.sampling.budget
        if grammar is None and budget is None:
            return None
        constraint = cls(new.row, grammar, None if grammar is None else grammar.start(), budget)
        for token in new.token_ids[new.num_prompt_tokens :].tolist():
            constraint.num_sampled += 1
            if constraint.append(token):
                constraint.advance(token)
        return constraint

    @property
    def may_need_mask(self) -> bool:
        """Whether the next token may be restricted, judged before the last token is known."""
        return self.matcher is not None or (self.budget is not None and self.num_sampled >= self.budget.num_tokens)

    @property
    def has_ended(self) -> bool:
        """Whether the row is unconstrained from now on."""
        return self.matcher is None and self.budget is None and self.failure is None

    def append(self, token: int) -> bool:
        """Append a sampled token. Returns whether the matcher must be advanced by it."""
        self.known.append(token)
        budget = self.budget
        if budget is not None and tuple(self.known[-len(budget.end) :]) == budget.end:
            self.budget = None
        return self.matcher is not None and self.failure is None

    def advance(self, token: int) -> None:
        """Advance the matcher by the token that was appended last."""
        matcher = self.matcher
        if matcher is not None:
            with self._limited_time():
                self.record_match(token, accepted=matcher.accept(token))

    def record_match(self, token: int, *, accepted: bool) -> None:
        """Record whether the matcher accepted a token."""
        if not accepted:
            self.failure = f"the grammar rejected token {token}, which its mask had allowed"
        elif self.matcher is not None and token in self.matcher.end_ids:
            # The request ends with this token; tokens still in flight for it are discarded.
            self.matcher = None

    def restart(self) -> None:
        """Advance a new matcher by all known tokens, because the state of the old one is unknown."""
        if self.grammar is None or self.matcher is None:
            return
        self.matcher = self.grammar.start()
        for token in self.known:
            if self.failure is None:
                self.advance(token)

    def fill(self, masks: NDArray[np.int32], index: int) -> None:
        """Write the tokens that the grammar allows to masks[index]."""
        matcher = self.matcher
        if matcher is not None:
            with self._limited_time():
                matcher.fill(masks, index)

    def force_budget_token(self, mask: NDArray[np.int32]) -> bool:
        """Restrict `mask` to the token that an exhausted budget requires, or give the budget up if it is forbidden.

        Returns whether the mask was changed.
        """
        required = self._required_token()
        if required is None:
            return False
        word, bit = divmod(required, 32)
        if not mask[word] >> bit & 1:
            self.budget = None
            return False
        mask[:] = 0
        mask[word] = np.uint32(1 << bit).view(np.int32)
        return True

    @contextmanager
    def _limited_time(self) -> Generator[None]:
        """Measure the time of a matcher call. Errors and excess time fail the request, not the engine."""
        begin = time.perf_counter()
        try:
            yield
        # xgrammar raises RuntimeError when it reaches one of its own limits.
        except RuntimeError as error:
            self.failure = f"the grammar can't be followed further: {' '.join(str(error).split())}"
        self.match_s += time.perf_counter() - begin
        if self.match_s > _TIME_LIMIT + _TIME_LIMIT_PER_TOKEN * len(self.known):
            self.failure = "the grammar takes too long to follow: make its rules less ambiguous"

    def _required_token(self) -> int | None:
        """The next token that closes an exhausted budget; None if the budget is not exhausted."""
        budget, known = self.budget, self.known
        if budget is None or len(known) < budget.num_tokens:
            return None
        sizes = range(min(len(budget.end) - 1, len(known)), -1, -1)
        return budget.end[next(size for size in sizes if tuple(known[len(known) - size :]) == budget.end[:size])]


class Constraints:
    """The constraints of all rows, and the steps in flight whose tokens the matchers still need.

    All matchers advance in one call, and all masks are filled in one call: each call releases the interpreter lock, and
    getting it back may take milliseconds.
    failed: pairs (index among the step's sampling requests, reason) of requests that cannot sample; set by `masks`.
    buffer: the masks of the current step.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.failed: list[tuple[int, str]] = []
        # Constraints by row, and bool [rows]: whether a row has one.
        self._constraints: dict[int, Constraint] = {}
        self._is_constrained = np.zeros(num_rows, np.bool_)
        self.buffer = MaskBuffer(num_rows, -(-vocab_size // 32), device)
        # Constraints of the current step, by index among its sampling requests; and those that may need a mask.
        self._constrained: list[tuple[int, Constraint]] = []
        self._maybe_masked: list[tuple[int, Constraint]] = []
        self._in_flight: deque[tuple[StepHandle, list[tuple[int, Constraint]]]] = deque()
        # Steps left in which each row is matched in a call of its own.
        self._num_separate_steps = 0

    def begin(self, plan: StepPlan) -> bool:
        """Begin a step, before it is launched. Returns whether the step must call `masks` before it samples."""
        for new in plan.new_rows:
            self._replace(new)
        self.failed, self._constrained, self._maybe_masked = [], [], []
        if not self._constraints:
            return False
        rows, _, samples = plan.scheduled
        sampling = rows[samples]
        for index in np.flatnonzero(self._is_constrained[sampling]).tolist():
            constraint = self._constraints[int(sampling[index])]
            self._constrained.append((index, constraint))
            if constraint.may_need_mask:
                self._maybe_masked.append((index, constraint))
            constraint.num_sampled += 1
        return bool(self._maybe_masked)

    def masks(self, sampling_indices: NDArray[np.int64]) -> Masks | None:
        """The masks of the current step, after waiting for the tokens of earlier steps; None if no row is restricted.

        sampling_indices: int64 [n], indices of the step's requests that sample.
        """
        self._advance_matchers(wait=True)
        matched = [each for each in self._maybe_masked if each[1].matcher is not None and each[1].failure is None]
        others = [each for each in self._maybe_masked if each[1].matcher is None or each[1].failure is not None]
        masks = self.buffer.draft(len(self._maybe_masked))
        self._fill([constraint for _, constraint in matched], masks)
        allows_any = np.any(masks, axis=1)
        which: list[int] = []
        for at, (_, constraint) in enumerate(matched):
            if constraint.failure is None and not allows_any[at]:
                constraint.failure = "the grammar allows no token of the vocabulary after the output so far"
        for at, (index, constraint) in enumerate([*matched, *others]):
            is_masked = False
            if constraint.failure is not None:
                self.failed.append((index, constraint.failure))
            else:
                is_masked = constraint.force_budget_token(masks[at]) or at < len(matched)
            which.append(int(sampling_indices[index]) if is_masked else -1)
        if max(which) < 0:
            return None
        self.buffer.send(which)
        return Masks(self.buffer.which[: len(which)], self.buffer.bits[: len(which)])

    def launched(self, handle: StepHandle) -> None:
        """Record that the current step was launched, and advance matchers by the tokens of finished steps."""
        self._advance_matchers(wait=False)
        if self._constrained:
            self._in_flight.append((handle, self._constrained))

    def _replace(self, new: NewRow) -> None:
        self._drop(new.row)
        constraint = Constraint.of(new)
        if constraint is not None:
            self._constraints[new.row] = constraint
            self._is_constrained[new.row] = True

    def _drop(self, row: int) -> None:
        self._constraints.pop(row, None)
        self._is_constrained[row] = False

    def _advance_matchers(self, *, wait: bool) -> None:
        """Advance matchers by the tokens of steps in flight, in order. wait: also for steps that have not finished."""
        while self._in_flight and (wait or self._in_flight[0][0].ready):
            handle, constrained = self._in_flight.popleft()
            handle.wait()
            token_ids = handle.token_ids
            new_tokens = [(constraint, int(token_ids[index])) for index, constraint in constrained]
            self._advance([each for each in new_tokens if each[0].append(each[1])])
            for constraint, _ in new_tokens:
                # Another request may hold the row by now.
                if constraint.has_ended and self._constraints.get(constraint.row) is constraint:
                    self._drop(constraint.row)

    def _advance(self, new_tokens: list[tuple[Constraint, int]]) -> None:
        """Advance the matcher of each constraint by its new token."""
        if self._num_separate_steps or len(new_tokens) < 2:
            for constraint, token in new_tokens:
                constraint.advance(token)
            return
        matchers = [constraint.matcher for constraint, _ in new_tokens if constraint.matcher is not None]
        with self._timed():
            try:
                accepted = matchers[0].accept_all(matchers, [token for _, token in new_tokens])
            except RuntimeError:
                # One matcher failed; the others may or may not have advanced.
                for constraint, _ in new_tokens:
                    constraint.restart()
                return
        for (constraint, token), each in zip(new_tokens, accepted, strict=True):
            constraint.record_match(token, accepted=each)

    def _fill(self, constraints: list[Constraint], masks: NDArray[np.int32]) -> None:
        """Write the tokens that each grammar allows to the first of `masks`."""
        matchers = [constraint.matcher for constraint in constraints if constraint.matcher is not None]
        if not self._num_separate_steps and len(matchers) > 1:
            with self._timed():
                try:
                    matchers[0].fill_all(matchers, masks)
                except RuntimeError:
                    self._num_separate_steps = _SEPARATE_STEPS
                else:
                    return
        for at, constraint in enumerate(constraints):
            constraint.fill(masks, at)
        self._num_separate_steps = max(self._num_separate_steps - 1, 0)

    @contextmanager
    def _timed(self) -> Generator[None]:
        """Switch to separate calls per row if a call for all rows takes long."""
        begin = time.perf_counter()
        yield
        if time.perf_counter() - begin > _LONG_CALL:
            self._num_separate_steps = _SEPARATE_STEPS
