"""Restricts the tokens of rows that have a grammar, a reasoning budget or allowed token ids.

The mask of a grammar or a budget depends on the row's previous token. The host launches the forward pass, waits for the
tokens of the previous step, and fills the masks while the device computes.
"""

import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm_core.execution.inputs import MaskBuffer, Masks
from nanovllm_core.execution.row_constraint import Constraint, GrammarFailure, MatchTime, allows_token
from nanovllm_core.execution.step_handle import StepHandle
from nanovllm_core.grammar_types import GrammarMatcher
from nanovllm_core.scheduling.plan import NewRow, StepPlan

# If one call for all rows takes longer than _MAX_BATCH_CALL_S, a grammar may be slow. To find this grammar, the next
# _NUM_SEPARATE_STEPS steps match each row in a separate call.
_MAX_BATCH_CALL_S = 0.02
_NUM_SEPARATE_STEPS = 16


class ConstrainedRequest(NamedTuple):
    """A sampling request that has a constraint. request_index: index among the step's sampling requests."""

    request_index: int
    constraint: Constraint
    num_drafts: int


class _StepInFlight(NamedTuple):
    """A launched step, its constrained requests, and their failures."""

    handle: StepHandle
    requests: list[ConstrainedRequest]
    failures: list[GrammarFailure]


class Constraints:
    """The constraints of all rows.

    A step with drafts samples one token after a request's last token, and one after each draft. Entry j of a request is
    the token that the step samples after j drafts. Masks of entries after a draft assume that the draft will be
    accepted. If a mask forbids the draft, the entries after the draft need no masks.

    max_masks: maximum number of masks of a step; 0 means `num_rows`.
    failures: entries that have no mask because the constraint failed, set by `fill_masks`.
    mask_buffer: the masks of the current step.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, max_masks: int = 0):
        self.failures: list[GrammarFailure] = []
        self._constraint_by_row: dict[int, Constraint] = {}
        self._is_constrained = np.zeros(num_rows, np.bool_)
        self._num_mask_words = -(-vocab_size // 32)
        self.mask_buffer = MaskBuffer(max_masks or num_rows, self._num_mask_words, device)
        self._step_requests: list[ConstrainedRequest] = []
        self._mask_candidates: list[ConstrainedRequest] = []
        self._num_masks = 0
        # The key is the id of the grammar. The constraints of the grammar's rows keep the grammar and the value alive.
        self._match_time_by_grammar: WeakValueDictionary[int, MatchTime] = WeakValueDictionary()
        self._steps_in_flight: deque[_StepInFlight] = deque()
        self._matcher_calls = _MatcherCalls()

    def begin_step(self, plan: StepPlan) -> int:
        """Begin a step. Returns the number of masks; if it is not 0, call `fill_masks` before sampling.

        Each request that may need masks has one mask per entry.
        """
        for new_row in plan.new_rows:
            self._replace_constraint(new_row)
        self.failures, self._step_requests, self._mask_candidates = [], [], []
        self._num_masks = 0
        if not self._constraint_by_row:
            return 0
        rows, num_tokens, is_sampled = plan.scheduled
        sampling_rows = rows[is_sampled]
        # In a step without drafts, a request may have several tokens of its prompt. These tokens are not drafts.
        nums_drafts = (num_tokens[is_sampled] - 1) * plan.shape.has_drafts
        for index in np.flatnonzero(self._is_constrained[sampling_rows]).tolist():
            num_drafts = int(nums_drafts[index])
            constraint = self._constraint_by_row[int(sampling_rows[index])]
            request = ConstrainedRequest(index, constraint, num_drafts)
            self._step_requests.append(request)
            if constraint.may_need_mask(num_drafts):
                self._mask_candidates.append(request)
                self._num_masks += 1 + num_drafts
            constraint.num_launched_outputs += 1 + num_drafts
        return self._num_masks

    def fill_masks(self, first_entries: NDArray[np.int64]) -> Masks | None:
        """Wait for the tokens of earlier steps and fill the masks. Returns None if no row is restricted.

        first_entries: int64 [n], index of each sampling request's first entry among all entries of the step.
        """
        self._apply_results(wait=any(request.constraint.depends_on_output for request in self._mask_candidates))
        masks = self.mask_buffer.new_masks(self._num_masks)
        masked_entries: list[int] = []
        requests, entry = self._mask_candidates, 0
        while requests:
            entry_masks = masks[len(masked_entries) :][: len(requests)]
            requests, new_masked_entries = self._fill_entry(requests, entry, entry_masks, first_entries)
            masked_entries += new_masked_entries
            if len(masked_entries) == len(masks):
                break
            requests = self._append_drafts(requests, entry, entry_masks)
            entry += 1
        self._matcher_calls.end_step()
        masked_entries += [-1] * (len(masks) - len(masked_entries))
        return None if max(masked_entries) < 0 else self.mask_buffer.send(masked_entries)

    def end_step(self, handle: StepHandle) -> None:
        """Store the handle of the current step, and advance matchers by the tokens of finished steps."""
        self._apply_results(wait=False)
        if self._step_requests:
            self._steps_in_flight.append(_StepInFlight(handle, self._step_requests, self.failures))

    def _replace_constraint(self, new_row: NewRow) -> None:
        self._remove_constraint(new_row.row)
        match_time = MatchTime()
        if new_row.compiled_grammar is not None:
            match_time = self._match_time_by_grammar.setdefault(id(new_row.compiled_grammar), match_time)
        if (constraint := Constraint.from_row(new_row, self._num_mask_words, match_time)) is not None:
            self._constraint_by_row[new_row.row] = constraint
            self._is_constrained[new_row.row] = True

    def _remove_constraint(self, row: int) -> None:
        self._constraint_by_row.pop(row, None)
        self._is_constrained[row] = False

    def _fill_entry(
        self,
        requests: Sequence[ConstrainedRequest],
        entry: int,
        masks: NDArray[np.int32],
        first_entries: NDArray[np.int64],
    ) -> tuple[list[ConstrainedRequest], list[int]]:
        """Fill one mask per request, for the token after the request's output and its first `entry` drafts.

        entry: index of the masked entry among each request's own entries.
        masks: int32 [n, words], one mask per request. The given masks allow every token.
        Returns (requests in the order of their masks, index of each request's entry among all entries of the step). The
            index is -1 if the entry is not masked.
        """
        grammar_requests = [x for x in requests if x.constraint.matcher is not None and x.constraint.failure is None]
        other_requests = [x for x in requests if x.constraint.matcher is None or x.constraint.failure is not None]
        self._matcher_calls.fill_masks([request.constraint for request in grammar_requests], masks)
        has_allowed_token = np.any(masks, axis=1)
        ordered_requests, masked_entries = [*grammar_requests, *other_requests], list[int]()
        for mask_index, request in enumerate(ordered_requests):
            constraint = request.constraint
            has_mask = mask_index < len(grammar_requests)
            if has_mask and constraint.failure is None and not has_allowed_token[mask_index]:
                constraint.failure = "the grammar allows no token of the vocabulary after the output so far"
            if constraint.failure is None:
                has_mask |= constraint.apply_allowed_ids(masks[mask_index])
                has_mask |= constraint.force_budget_token(masks[mask_index])
            if constraint.failure is not None:
                has_mask = False
                self.failures.append(GrammarFailure(request.request_index, entry, constraint.failure))
            masked_entries.append(int(first_entries[request.request_index]) + entry if has_mask else -1)
        return ordered_requests, masked_entries

    def _append_drafts(
        self, requests: Sequence[ConstrainedRequest], entry: int, masks: NDArray[np.int32]
    ) -> list[ConstrainedRequest]:
        """Append draft number `entry` to each request. Returns the requests whose next entry may need a mask.

        Constraints that depend on the output are replaced by forks, which advance by the drafts.
        masks: int32 [n, words], masks of `entry`.
        """
        continued_requests: list[ConstrainedRequest] = []
        drafts_to_match: list[tuple[Constraint, int]] = []
        for request, mask in zip(requests, masks, strict=True):
            constraint = request.constraint
            if request.num_drafts <= entry or constraint.failure is not None:
                continue
            # Only a constraint that depends on the output uses drafts. If no constraint depends on the output, the host
            # has not waited for the previous step, and may not know the drafts.
            if constraint.depends_on_output:
                draft = _find_draft(request, entry)
                if not allows_token(mask, draft):
                    continue
                if entry == 0:
                    request = request._replace(constraint=constraint.fork())
                if request.constraint.append_token(draft):
                    drafts_to_match.append((request.constraint, draft))
            continued_requests.append(request)
        self._matcher_calls.advance(drafts_to_match)
        return continued_requests

    def _apply_results(self, *, wait: bool) -> None:
        """Advance constraints by the tokens of finished steps. wait: wait for all steps in flight to finish."""
        while self._steps_in_flight and (wait or self._steps_in_flight[0].handle.is_finished):
            step = self._steps_in_flight.popleft()
            step.handle.wait()
            self._append_tokens(step)
            if (drafts := step.handle.drafts) is not None:
                for index, constraint, _ in step.requests:
                    constraint.draft_ids = drafts.draft_ids[index].tolist()
            for _, constraint, _ in step.requests:
                # The row may belong to another request now.
                if constraint.has_ended and self._constraint_by_row.get(constraint.row) is constraint:
                    self._remove_constraint(constraint.row)

    def _append_tokens(self, step: _StepInFlight) -> None:
        """Append the tokens of a finished step to its constraints."""
        token_ids, num_tokens = step.handle.token_ids, step.handle.num_tokens
        failure_by_index = {failure.request_index: failure for failure in step.failures}
        token_ends = np.cumsum(num_tokens).tolist()
        remaining_tokens: list[tuple[Constraint, list[int]]] = []
        for index, constraint, num_drafts in step.requests:
            num_new_tokens, failure = int(num_tokens[index]), failure_by_index.get(index)
            if failure is not None and failure.num_drafts < num_new_tokens:
                constraint.failure = failure.reason
            constraint.num_launched_outputs -= 1 + num_drafts - num_new_tokens
            new_tokens = token_ids[token_ends[index] - num_new_tokens : token_ends[index]].tolist()
            remaining_tokens.append((constraint, new_tokens))
        while remaining_tokens:
            next_tokens = [(constraint, new_tokens.pop(0)) for constraint, new_tokens in remaining_tokens]
            self._matcher_calls.advance([pair for pair in next_tokens if pair[0].append_token(pair[1])])
            remaining_tokens = [pair for pair in remaining_tokens if pair[1]]


def _find_draft(request: ConstrainedRequest, entry: int) -> int:
    """Draft number `entry`, from the result of the row's previous step. Raises RuntimeError if it is unknown."""
    _, constraint, num_drafts = request
    if num_drafts > len(constraint.draft_ids):
        raise RuntimeError(
            f"a step has {num_drafts} drafts for row {constraint.row}, but the result of the row's previous step has "
            f"{len(constraint.draft_ids)}: plan drafts only after a step that sampled a token for the row"
        )
    return constraint.draft_ids[entry]


class _MatcherCalls:
    """Calls the matchers of the rows of a step.

    Each call of a matcher releases the interpreter lock, and may wait milliseconds until the lock is free again. So
    one call serves all rows.
    """

    def __init__(self) -> None:
        # Number of steps, including the current step, that match each row in a separate call.
        self._num_separate_steps = 0

    def end_step(self) -> None:
        """End a step in which masks were filled."""
        if self._num_separate_steps:
            self._num_separate_steps -= 1

    def advance(self, new_tokens: Sequence[tuple[Constraint, int]]) -> None:
        """Advance the matcher of each constraint by its new token."""
        if self._num_separate_steps or len(new_tokens) < 2:
            for constraint, token in new_tokens:
                constraint.advance_matcher(token)
            return
        constraints = [constraint for constraint, _ in new_tokens]
        matchers = _matchers_of(constraints)
        with self._charge_call(constraints):
            try:
                results = matchers[0].accept_all(matchers, [token for _, token in new_tokens])
            except RuntimeError:
                # One matcher failed, and may fail again in the next step. Each other matcher may have advanced or not.
                self._separate_rows()
                for constraint in constraints:
                    constraint.restart_matcher()
                return
        for (constraint, token), accepted in zip(new_tokens, results, strict=True):
            constraint.record_match_result(token, accepted=accepted)

    def fill_masks(self, constraints: Sequence[Constraint], masks: NDArray[np.int32]) -> None:
        """Write the mask of the grammar of `constraints[i]` to masks[i]."""
        matchers = _matchers_of(constraints)
        if not self._num_separate_steps and len(matchers) > 1:
            with self._charge_call(constraints):
                try:
                    matchers[0].fill_masks(matchers, masks)
                except RuntimeError:
                    self._separate_rows()
                else:
                    return
        for index, constraint in enumerate(constraints):
            constraint.fill_mask(masks, index)

    def _separate_rows(self) -> None:
        self._num_separate_steps = _NUM_SEPARATE_STEPS + 1

    @contextmanager
    def _charge_call(self, constraints: Sequence[Constraint]) -> Generator[None]:
        """Divide the CPU time of a call among its rows. If the call takes long, switch to separate calls."""
        start = time.thread_time()
        yield
        seconds = time.thread_time() - start
        for constraint in constraints:
            constraint.charge_time(seconds / len(constraints))
        if seconds > _MAX_BATCH_CALL_S:
            self._separate_rows()


def _matchers_of(constraints: Sequence[Constraint]) -> list[GrammarMatcher]:
    return [constraint.matcher for constraint in constraints if constraint.matcher is not None]
