"""Restricts the tokens of one row by its grammar, its reasoning budget and its allowed token ids."""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.grammar_types import CompiledGrammar, GrammarMatcher
from nanovllm_core.sampling_params import ReasoningBudget
from nanovllm_core.scheduling.plan import NewRow

# Limit on the CPU time of all matcher calls for one grammar: a constant plus a time per output token. A slow matcher
# delays all requests. JSON takes 10 us per token, so only very ambiguous grammars reach the limit.
_MAX_MATCH_S = 2.0
_MAX_MATCH_S_PER_TOKEN = 0.02


class GrammarFailure(NamedTuple):
    """Why a request of a step can't sample a token.

    request_index: index of the request among the step's sampling requests.
    num_drafts: number of drafts before the token. If the step rejects one of these drafts, the request does not fail.
    """

    request_index: int
    num_drafts: int
    reason: str


@dataclass(slots=True, eq=False, weakref_slot=True)
class MatchTime:
    """The matcher calls for all rows that follow one grammar.

    seconds: CPU time of the calls.
    num_tokens: number of output tokens and drafts of the rows.
    """

    seconds: float = 0.0
    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class Constraint:
    """The grammar, the reasoning budget and the allowed token ids of one row.

    matcher: None without a grammar, or after the output has completed the grammar.
    budget: None without a budget, after the reasoning has ended, or if a mask forbids a token of `budget.end`.
    allowed_mask: allows `allowed_token_ids` and tokens that end a grammar, see `make_mask`; None to allow all ids.
    num_launched_outputs: number of output tokens after all launched steps, if no draft is rejected.
    output_ids: the output tokens. In a constraint made by `fork`, drafts follow the output tokens.
    draft_ids: the drafts that the request table had for this row when the row's last step finished.
    match_time: shared by the rows of `grammar` and by forks, so that all choices of a request share one time limit.
    failure: why the row cannot sample a token; None if it can.
    """

    row: int
    grammar: CompiledGrammar | None
    matcher: GrammarMatcher | None
    budget: ReasoningBudget | None
    allowed_mask: NDArray[np.int32] | None = None
    num_launched_outputs: int = 0
    output_ids: list[int] = field(default_factory=list[int])
    draft_ids: list[int] = field(default_factory=list[int])
    match_time: MatchTime = field(default_factory=MatchTime)
    failure: str | None = None

    @classmethod
    def from_row(cls, new_row: NewRow, num_mask_words: int, match_time: MatchTime) -> "Constraint | None":
        """The constraint of a new row after its existing output tokens; None for an unconstrained row."""
        grammar, budget = new_row.compiled_grammar, new_row.sampling.reasoning_budget
        allowed_ids = new_row.sampling.allowed_token_ids
        if grammar is None and budget is None and not allowed_ids:
            return None
        matcher = None if grammar is None else grammar.start()
        constraint = cls(new_row.row, grammar, matcher, budget, match_time=match_time)
        if allowed_ids:
            # Allow end tokens too: otherwise an output that completes its grammar could not end.
            end_ids = () if matcher is None else matcher.end_ids
            constraint.allowed_mask = make_mask((*allowed_ids, *end_ids), num_mask_words)
        for token in new_row.token_ids[new_row.num_prompt_tokens :].tolist():
            constraint.num_launched_outputs += 1
            if constraint.append_token(token):
                constraint.advance_matcher(token)
        return constraint

    def may_need_mask(self, num_drafts: int) -> bool:
        """Whether the next token, or a token after up to `num_drafts` drafts, may be restricted.

        The answer does not depend on tokens of steps in flight.
        """
        max_outputs = self.num_launched_outputs + num_drafts
        may_exhaust_budget = self.budget is not None and max_outputs >= self.budget.num_tokens
        return self.matcher is not None or self.allowed_mask is not None or may_exhaust_budget

    @property
    def depends_on_output(self) -> bool:
        """Whether the next mask may depend on the previous token."""
        return self.matcher is not None or self.budget is not None

    @property
    def has_ended(self) -> bool:
        """Whether the remaining tokens of the row are unrestricted."""
        return not self.depends_on_output and self.allowed_mask is None and self.failure is None

    def append_token(self, token: int) -> bool:
        """Append a sampled token or a draft. Returns whether the matcher must advance by the token."""
        budget, required_token = self.budget, self._next_end_token()
        self.output_ids.append(token)
        self.match_time.num_tokens += 1
        # If the token is not the required token, a mask forbade the required token, so drop the budget.
        drops_budget = required_token not in (None, token)
        if budget is not None and (drops_budget or tuple(self.output_ids[-len(budget.end) :]) == budget.end):
            self.budget = None
        return self.matcher is not None and self.failure is None

    def fork(self) -> "Constraint":
        """An independent constraint in the same state, which can follow drafts."""
        matcher = None if self.matcher is None else self.matcher.fork()
        return replace(self, matcher=matcher, output_ids=[*self.output_ids])

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
        """Replace a matcher in an unknown state by a new matcher, advanced by all tokens of `output_ids`."""
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

        Returns whether the mask was changed. A mask that forbids this token stays unchanged.
        """
        required_token = self._next_end_token()
        if required_token is None or not allows_token(mask, required_token):
            return False
        word, bit = divmod(required_token, 32)
        mask[:] = 0
        mask[word] = np.uint32(1 << bit).view(np.int32)
        return True

    @contextmanager
    def _limit_time(self) -> Generator[None]:
        """Measure the time of a matcher call. An error or a timeout fails the request, not the engine."""
        start = time.thread_time()
        try:
            yield
        # xgrammar raises RuntimeError when it reaches one of its own limits.
        except RuntimeError as error:
            self.failure = f"the grammar can't be followed further: {' '.join(str(error).split())}"
        self.charge_time(time.thread_time() - start)

    def charge_time(self, seconds: float) -> None:
        """Add CPU time of a matcher call. If the grammar has used up its time, the row fails."""
        self.match_time.seconds += seconds
        if self.match_time.seconds > _MAX_MATCH_S + _MAX_MATCH_S_PER_TOKEN * self.match_time.num_tokens:
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


def allows_token(mask: NDArray[np.int32], token: int) -> bool:
    """Whether `mask` int32 [words] allows a token. Format: see `make_mask`."""
    word, bit = divmod(token, 32)
    return bool(mask[word] >> bit & 1)
