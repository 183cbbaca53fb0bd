"""Restricts the tokens of rows that have a grammar, a reasoning budget or allowed token ids.

The mask of a grammar or a budget depends on the row's previous token. The host launches the forward pass, waits for the
tokens of the previous step, and fills the masks while the device computes.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm_core.execution.inputs import MaskBuffer, Masks
from nanovllm_core.execution.matcher_calls import MatcherCalls
from nanovllm_core.execution.row_constraint import Constraint, GrammarFailure, allows_token
from nanovllm_core.execution.step_handle import StepHandle
from nanovllm_core.scheduling.plan import NewRow, StepPlan


class ConstrainedRequest(NamedTuple):
    """A request of a step that samples and has a constraint. request_index: among the step's sampling requests."""

    request_index: int
    constraint: Constraint
    num_drafts: int


class _DraftEffect(NamedTuple):
    """A change of a constraint by the mask of an entry after drafts. It takes effect if the drafts are accepted.

    failure: why the constraint failed; None if the mask forbade the end of the reasoning, which drops the budget.
    """

    request: ConstrainedRequest
    entry: int
    failure: str | None


class _StepInFlight(NamedTuple):
    """A launched step, its constrained requests, and the effects that its drafts may have."""

    handle: StepHandle
    requests: list[ConstrainedRequest]
    draft_effects: list[_DraftEffect]
    has_drafts: bool


class Constraints:
    """The constraints of all rows.

    A step with drafts samples a token after each token of a request. Entry j of a request is the token after j drafts.
    The masks of entries after a draft assume that the draft will be accepted. So after a draft that is not allowed, no
    entry needs a mask.

    num_masks: maximum number of masks of a step; None: `num_rows`.
    failures: entries that have no mask because the constraint failed, set by `fill_masks`.
    mask_buffer: the masks of the current step.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, num_masks: int | None = None):
        self.failures: list[GrammarFailure] = []
        self._constraint_by_row: dict[int, Constraint] = {}
        self._is_constrained = np.zeros(num_rows, np.bool_)
        self._num_mask_words = -(-vocab_size // 32)
        self.mask_buffer = MaskBuffer(num_rows if num_masks is None else num_masks, self._num_mask_words, device)
        # All constrained requests of the step, and those that may need masks.
        self._step_requests: list[ConstrainedRequest] = []
        self._mask_candidates: list[ConstrainedRequest] = []
        self._num_masks = 0
        self._has_drafts = False
        self._draft_effects: list[_DraftEffect] = []
        self._steps_in_flight: deque[_StepInFlight] = deque()
        self._matcher_calls = MatcherCalls()

    def begin_step(self, plan: StepPlan) -> int:
        """Begin a step. Returns the number of masks; if it is not 0, call `fill_masks` before sampling.

        Each request that may need masks counts once, or in a step with drafts once per entry.
        """
        for new in plan.new_rows:
            self._replace_constraint(new)
        self.failures, self._step_requests, self._mask_candidates, self._draft_effects = [], [], [], []
        self._num_masks, self._has_drafts = 0, plan.shape.has_drafts
        if not self._constraint_by_row:
            return 0
        rows, num_tokens, is_sampled = plan.scheduled
        sampling_rows = rows[is_sampled]
        # Without drafts, a prompt's chunk has several tokens but one entry.
        nums_drafts = (num_tokens[is_sampled] - 1).tolist() if self._has_drafts else None
        for index in np.flatnonzero(self._is_constrained[sampling_rows]).tolist():
            num_drafts = 0 if nums_drafts is None else nums_drafts[index]
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

        first_entries: int64 [n], index of the first entry of each request that samples, among the entries of the step.
            `Masks.rows` contains such indices.
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
        if entry > 0:
            self._matcher_calls.drop_drafts([request.constraint for request in self._mask_candidates])
        self._matcher_calls.end_step()
        masked_entries += [-1] * (len(masks) - len(masked_entries))
        return None if max(masked_entries) < 0 else self.mask_buffer.send(masked_entries)

    def end_step(self, handle: StepHandle) -> None:
        """Store the handle of the current step, and advance matchers by the tokens of finished steps."""
        self._apply_results(wait=False)
        if self._step_requests:
            step = _StepInFlight(handle, self._step_requests, self._draft_effects, self._has_drafts)
            self._steps_in_flight.append(step)

    def _replace_constraint(self, new: NewRow) -> None:
        self._remove_constraint(new.row)
        if (constraint := Constraint.from_row(new, self._num_mask_words)) is not None:
            self._constraint_by_row[new.row] = constraint
            self._is_constrained[new.row] = True

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
        """Fill the masks of one entry of each request, after the output and the drafts before the entry.

        masks: int32 [n, words], which allow every token.
        Returns (requests in the order of their masks, index of the masked entry among all entries of the step or -1).
        """
        grammar_requests = [x for x in requests if x.constraint.matcher is not None and x.constraint.failure is None]
        other_requests = [x for x in requests if x.constraint.matcher is None or x.constraint.failure is not None]
        self._matcher_calls.fill_masks([request.constraint for request in grammar_requests], masks)
        has_allowed_token = np.any(masks, axis=1)
        ordered_requests, masked_entries = [*grammar_requests, *other_requests], list[int]()
        for mask_index, request in enumerate(ordered_requests):
            constraint = request.constraint
            budget = constraint.budget
            has_mask = mask_index < len(grammar_requests)
            if has_mask and constraint.failure is None and not has_allowed_token[mask_index]:
                constraint.failure = "the grammar allows no token of the vocabulary after the output so far"
            if constraint.failure is None:
                has_mask |= constraint.apply_allowed_ids(masks[mask_index])
                has_mask |= constraint.force_budget_token(masks[mask_index])
            if constraint.failure is not None:
                has_mask = False
                self.failures.append(GrammarFailure(request.request_index, entry, constraint.failure))
            if entry and (constraint.failure is not None or constraint.budget is not budget):
                self._draft_effects.append(_DraftEffect(request, entry, constraint.failure))
            masked_entries.append(int(first_entries[request.request_index]) + entry if has_mask else -1)
        return ordered_requests, masked_entries

    def _append_drafts(
        self, requests: Sequence[ConstrainedRequest], entry: int, masks: NDArray[np.int32]
    ) -> list[ConstrainedRequest]:
        """Append the draft after `entry` to each request. Returns the requests whose next entry may need a mask.

        masks: int32 [n, words], masks of `entry`.
        """
        continued_requests: list[ConstrainedRequest] = []
        matched_drafts: list[tuple[Constraint, int]] = []
        for request, mask in zip(requests, masks, strict=True):
            constraint = request.constraint
            if request.num_drafts <= entry or constraint.failure is not None:
                continue
            # The host may not know the drafts of other rows, because the step did not wait for the previous step.
            if constraint.depends_on_output:
                draft = _find_draft(request, entry)
                if not allows_token(mask, draft):
                    continue
                if constraint.append_draft(draft):
                    matched_drafts.append((constraint, draft))
            continued_requests.append(request)
        self._matcher_calls.advance(matched_drafts)
        return continued_requests

    def _apply_results(self, *, wait: bool) -> None:
        """Advance constraints by the tokens of finished steps. wait: wait for all steps in flight to finish."""
        while self._steps_in_flight and (wait or self._steps_in_flight[0].handle.is_finished):
            step = self._steps_in_flight.popleft()
            step.handle.wait()
            if step.has_drafts:
                self._append_accepted_tokens(step)
            else:
                token_ids = step.handle.token_ids
                self._append_tokens([(constraint, int(token_ids[index])) for index, constraint, _ in step.requests])
            if (draft_ids := step.handle.draft_ids) is not None:
                for index, constraint, _ in step.requests:
                    constraint.draft_ids = draft_ids[index].tolist()
            for _, constraint, _ in step.requests:
                # The row may belong to another request now.
                if constraint.has_ended and self._constraint_by_row.get(constraint.row) is constraint:
                    self._remove_constraint(constraint.row)

    def _append_tokens(self, new_tokens: list[tuple[Constraint, int]]) -> None:
        """Append a token to each constraint."""
        self._matcher_calls.advance([pair for pair in new_tokens if pair[0].append_token(pair[1])])

    def _append_accepted_tokens(self, step: _StepInFlight) -> None:
        """Append the tokens of a finished step with drafts to its constraints."""
        token_ids, num_tokens = step.handle.token_ids, step.handle.num_tokens
        if num_tokens is None:
            num_tokens = np.ones(len(token_ids), np.int64)
        for (index, constraint, _), entry, failure in step.draft_effects:
            if entry < num_tokens[index]:
                constraint.failure = constraint.failure or failure
                constraint.budget = None
        token_ends = np.cumsum(num_tokens).tolist()
        remaining_tokens: list[tuple[Constraint, list[int]]] = []
        for index, constraint, num_drafts in step.requests:
            num_new_tokens = int(num_tokens[index])
            constraint.num_launched_outputs -= 1 + num_drafts - num_new_tokens
            new_tokens = token_ids[token_ends[index] - num_new_tokens : token_ends[index]].tolist()
            remaining_tokens.append((constraint, new_tokens))
        while remaining_tokens:
            self._append_tokens([(constraint, new_tokens.pop(0)) for constraint, new_tokens in remaining_tokens])
            remaining_tokens = [pair for pair in remaining_tokens if pair[1]]


def _find_draft(request: ConstrainedRequest, entry: int) -> int:
    """The draft after `entry`, from the result of the row's previous step. Raises RuntimeError if it is unknown."""
    _, constraint, num_drafts = request
    if num_drafts > len(constraint.draft_ids):
        raise RuntimeError(
            f"a step has {num_drafts} drafts for row {constraint.row}, but the result of the row's previous step has "
            f"{len(constraint.draft_ids)}: plan drafts only after a step that sampled a token for the row"
        )
    return constraint.draft_ids[entry]
