"""What some rows may sample: rows with a grammar, and rows whose budget has run out.

A row's next mask depends on the token before it. So a step that such a row samples in is launched up to its logits,
then waits for the tokens of the step before, and only then chooses: grammars are followed and masks filled while the
device computes. Steps without such rows pass by. Everything here happens on the thread that launches steps. Grammars
are followed in one call for all rows: each call gives up the interpreter's lock, and may wait milliseconds to have it
back. This room must not know how grammars are compiled.
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
from nanovllm_core.execution.sampler import Masks, StepHandle
from nanovllm_core.request import Budget, CompiledGrammar, GrammarMatcher
from nanovllm_core.scheduling.plan import NewRow, StepPlan

# What following a grammar may take, in seconds: so much at all, and for each token. All others wait meanwhile. JSON
# takes 10 us a token, and only very ambiguous rules of one's own come near.
_PATIENCE = 2.0
_PATIENCE_PER_TOKEN = 0.02
# A call for all rows that takes longer than this, in seconds, has a row in it that is to blame: for so many steps each
# row is followed by itself, to find out which.
_LONG_CALL = 0.02
_STEPS_APART = 16


@dataclass(slots=True, eq=False)
class Constraint:
    """What holds one row, whose number is `row`.

    grammar: None without one. matcher: None without a grammar, and when its end has come. budget: None without one, and
    when it is closed. num_sampled: outputs that steps were launched for. known: those of them that the host has seen.
    spent: seconds on its grammar, when that was followed by itself. failure: why there is nothing that the row could
    sample.
    """

    row: int
    grammar: CompiledGrammar | None
    matcher: GrammarMatcher | None
    budget: Budget | None
    num_sampled: int = 0
    known: list[int] = field(default_factory=list[int])
    spent: float = 0.0
    failure: str | None = None

    @classmethod
    def of(cls, new: NewRow) -> "Constraint | None":
        """What holds a new row, brought to where its output stands; None for a free one."""
        grammar, budget = new.compiled, new.sampling.budget
        if grammar is None and budget is None:
            return None
        constraint = cls(new.row, grammar, None if grammar is None else grammar.start(), budget)
        for token in new.token_ids[new.num_prompt_tokens :].tolist():
            constraint.num_sampled += 1
            if constraint.take(token):
                constraint.follow(token)
        return constraint

    @property
    def is_due(self) -> bool:
        """Whether the next token may not be free, as far as can be said before the last one is known."""
        return self.matcher is not None or (self.budget is not None and self.num_sampled >= self.budget.num_tokens)

    @property
    def is_over(self) -> bool:
        """Whether the row is free from now on."""
        return self.matcher is None and self.budget is None and self.failure is None

    def take(self, token: int) -> bool:
        """Take in a token of the row's. Whether there is a grammar to follow it in."""
        self.known.append(token)
        budget = self.budget
        if budget is not None and tuple(self.known[-len(budget.end) :]) == budget.end:
            self.budget = None
        return self.matcher is not None and self.failure is None

    def follow(self, token: int) -> None:
        """Go on in the grammar by the token that was taken in last."""
        matcher = self.matcher
        if matcher is not None:
            with self._following():
                self.followed(token, accepted=matcher.accept(token))

    def followed(self, token: int, *, accepted: bool) -> None:
        """Note what became of a token in the grammar."""
        if not accepted:
            self.failure = f"the grammar took back token {token}, which it had allowed"
        elif self.matcher is not None and token in self.matcher.end_ids:
            # The request ends with this token; what is still in flight for it is thrown away.
            self.matcher = None

    def follow_again(self) -> None:
        """Go on from the beginning, for who doesn't know where the matcher stands."""
        if self.grammar is None or self.matcher is None:
            return
        self.matcher = self.grammar.start()
        for token in self.known:
            if self.failure is None:
                self.follow(token)

    def fill(self, masks: NDArray[np.int32], index: int) -> None:
        """Write what the grammar allows to masks[index]."""
        matcher = self.matcher
        if matcher is not None:
            with self._following():
                matcher.fill(masks, index)

    def force(self, mask: NDArray[np.int32]) -> bool:
        """Leave only the token that the budget asks for, if it does and it may come. False when the mask stays."""
        forced = self._forced()
        if forced is None:
            return False
        word, bit = divmod(forced, 32)
        if not mask[word] >> bit & 1:
            self.budget = None
            return False
        mask[:] = 0
        mask[word] = np.uint32(1 << bit).view(np.int32)
        return True

    @contextmanager
    def _following(self) -> Generator[None]:
        """Count the time, and let what the matcher raises fail the request, not the engine."""
        begin = time.perf_counter()
        try:
            yield
        # The library's own limits, of which it says no more than this.
        except RuntimeError as error:
            self.failure = f"the grammar can't be followed further: {' '.join(str(error).split())}"
        self.spent += time.perf_counter() - begin
        if self.spent > _PATIENCE + _PATIENCE_PER_TOKEN * len(self.known):
            self.failure = "the grammar takes too long to follow: make its rules less ambiguous"

    def _forced(self) -> int | None:
        """The token that the budget asks for, if it has run out."""
        budget, known = self.budget, self.known
        if budget is None or len(known) < budget.num_tokens:
            return None
        sizes = range(min(len(budget.end) - 1, len(known)), -1, -1)
        return budget.end[next(size for size in sizes if tuple(known[len(known) - size :]) == budget.end[:size])]


class Constraints:
    """The constraints of all rows, and the steps in flight whose tokens they wait for.

    failed: which of the requests that the step at hand samples have nothing to sample, and why; there after `masks`.
    buffer: where the masks of the step at hand are.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.failed: list[tuple[int, str]] = []
        # By row; and whether a row has one, as a column.
        self._constraints: dict[int, Constraint] = {}
        self._is_held = np.zeros(num_rows, np.bool_)
        self.buffer = MaskBuffer(num_rows, -(-vocab_size // 32), device)
        # Of the step at hand: which of the requests that sample are held and by what, and of those whose mask is due.
        self._held: list[tuple[int, Constraint]] = []
        self._due: list[tuple[int, Constraint]] = []
        self._in_flight: deque[tuple[StepHandle, list[tuple[int, Constraint]]]] = deque()
        # How many more steps each row is followed by itself.
        self._apart = 0

    def begin(self, plan: StepPlan) -> bool:
        """Take up a step that is about to be launched; True when it must ask for `masks` before it chooses tokens."""
        for new in plan.new_rows:
            self._replace(new)
        self.failed, self._held, self._due = [], [], []
        if not self._constraints:
            return False
        rows, _, samples = plan.scheduled
        sampling = rows[samples]
        for index in np.flatnonzero(self._is_held[sampling]).tolist():
            constraint = self._constraints[int(sampling[index])]
            self._held.append((index, constraint))
            if constraint.is_due:
                self._due.append((index, constraint))
            constraint.num_sampled += 1
        return bool(self._due)

    def masks(self, sampled: NDArray[np.int64]) -> Masks | None:
        """What the step at hand may choose, after waiting for the tokens of those before it; None when anything.

        sampled: int64, which of its requests sample.
        """
        self._take_in(wait=True)
        held = [each for each in self._due if each[1].matcher is not None and each[1].failure is None]
        others = [each for each in self._due if each[1].matcher is None or each[1].failure is not None]
        masks = self.buffer.draft(len(self._due))
        self._fill([constraint for _, constraint in held], masks)
        leads_on = np.any(masks, axis=1)
        which: list[int] = []
        for at, (_, constraint) in enumerate(held):
            if constraint.failure is None and not leads_on[at]:
                constraint.failure = "the grammar has come to a place that no token of the model leads on from"
        for at, (index, constraint) in enumerate([*held, *others]):
            is_held = False
            if constraint.failure is not None:
                self.failed.append((index, constraint.failure))
            else:
                is_held = constraint.force(masks[at]) or at < len(held)
            which.append(int(sampled[index]) if is_held else -1)
        if max(which) < 0:
            return None
        self.buffer.send(which)
        return Masks(self.buffer.which[: len(which)], self.buffer.bits[: len(which)])

    def launched(self, handle: StepHandle) -> None:
        """Remember the step at hand, for the tokens that it will have made, and take in what others have made."""
        self._take_in(wait=False)
        if self._held:
            self._in_flight.append((handle, self._held))

    def _replace(self, new: NewRow) -> None:
        self._drop(new.row)
        constraint = Constraint.of(new)
        if constraint is not None:
            self._constraints[new.row] = constraint
            self._is_held[new.row] = True

    def _drop(self, row: int) -> None:
        self._constraints.pop(row, None)
        self._is_held[row] = False

    def _take_in(self, *, wait: bool) -> None:
        while self._in_flight and (wait or self._in_flight[0][0].ready):
            handle, held = self._in_flight.popleft()
            handle.wait()
            tokens = handle.token_ids
            taken = [(constraint, int(tokens[index])) for index, constraint in held]
            self._follow([each for each in taken if each[0].take(each[1])])
            for constraint, _ in taken:
                # The row may be another request's by now.
                if constraint.is_over and self._constraints.get(constraint.row) is constraint:
                    self._drop(constraint.row)

    def _follow(self, taken: list[tuple[Constraint, int]]) -> None:
        """Go on in the grammars of all that have taken in a token."""
        if self._apart or len(taken) < 2:
            for constraint, token in taken:
                constraint.follow(token)
            return
        matchers = [constraint.matcher for constraint, _ in taken if constraint.matcher is not None]
        with self._timed():
            try:
                accepted = matchers[0].accept_all(matchers, [token for _, token in taken])
            except RuntimeError:
                # Of one of them, and nobody knows how far the others have come.
                for constraint, _ in taken:
                    constraint.follow_again()
                return
        for (constraint, token), each in zip(taken, accepted, strict=True):
            constraint.followed(token, accepted=each)

    def _fill(self, held: list[Constraint], masks: NDArray[np.int32]) -> None:
        """Write what the grammar of each allows to the first of `masks`."""
        matchers = [constraint.matcher for constraint in held if constraint.matcher is not None]
        if not self._apart and len(matchers) > 1:
            with self._timed():
                try:
                    matchers[0].fill_all(matchers, masks)
                except RuntimeError:
                    self._apart = _STEPS_APART
                else:
                    return
        for at, constraint in enumerate(held):
            constraint.fill(masks, at)
        self._apart = max(self._apart - 1, 0)

    @contextmanager
    def _timed(self) -> Generator[None]:
        """Notice when a call for all rows takes long."""
        begin = time.perf_counter()
        yield
        if time.perf_counter() - begin > _LONG_CALL:
            self._apart = _STEPS_APART
