"""What some rows may sample: rows with a grammar, and rows whose budget has run out.

A row's next mask depends on the token before it. So a step that such a row samples in is launched up to its logits,
then waits for the tokens of the step before, and only then chooses: the masks are filled while the device computes.
Steps without such rows pass by. Everything here happens on the thread that launches steps. This room must not know how
grammars are compiled.
"""

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm_core.execution.inputs import upload
from nanovllm_core.execution.sampler import Masks, StepHandle
from nanovllm_core.request import Budget, GrammarMatcher
from nanovllm_core.scheduling.plan import NewRow, StepPlan

_EVERYTHING = np.int32(-1)
# What following a grammar may take, in seconds: so much at all, and for each token. All others wait meanwhile. JSON
# takes 10 us a token, and only very ambiguous rules of one's own come near.
_PATIENCE = 2.0
_PATIENCE_PER_TOKEN = 0.02


@dataclass(slots=True, eq=False)
class Constraint:
    """What holds one row, whose number is `row`.

    matcher: None without a grammar, and when its end has come. budget: None without one, and when it is closed.
    num_sampled: outputs that steps were launched for. num_known: those of them that the host has seen. last: the latest
    of these, as many as the budget's end has. spent: seconds on its grammar. failure: why there is nothing that the row
    could sample.
    """

    row: int
    matcher: GrammarMatcher | None
    budget: Budget | None
    num_sampled: int = 0
    num_known: int = 0
    last: deque[int] = field(default_factory=deque[int])
    spent: float = 0.0
    failure: str | None = None

    @classmethod
    def of(cls, new: NewRow) -> "Constraint | None":
        """What holds a new row, brought to where its output stands; None for a free one."""
        budget = new.sampling.budget
        if new.compiled is None and budget is None:
            return None
        matcher = None if new.compiled is None else new.compiled.start()
        last: deque[int] = deque(maxlen=None if budget is None else len(budget.end))
        constraint = cls(new.row, matcher, budget, last=last)
        for token in new.token_ids[new.num_prompt_tokens :]:
            constraint.num_sampled += 1
            constraint.advance(token)
        return constraint

    @property
    def is_due(self) -> bool:
        """Whether the next token may not be free, as far as can be said before the last one is known."""
        return self.matcher is not None or (self.budget is not None and self.num_sampled >= self.budget.num_tokens)

    @property
    def is_over(self) -> bool:
        """Whether the row is free from now on."""
        return self.matcher is None and self.budget is None and self.failure is None

    def advance(self, token: int) -> None:
        """Take in a token of the row's."""
        self.num_known += 1
        budget = self.budget
        if budget is not None:
            self.last.append(token)
            if tuple(self.last) == budget.end:
                self.budget = None
        matcher = self.matcher
        if matcher is None or self.failure is not None:
            return
        with self._following():
            if not matcher.accept(token):
                self.failure = f"the grammar took back token {token}, which it had allowed"
            elif matcher.terminated:
                # The request ends with this token; what is still in flight for it is thrown away.
                self.matcher = None

    def fill(self, masks: NDArray[np.int32], index: int) -> bool:
        """Write what the row may sample to masks[index]. False when it may sample anything, or has failed."""
        mask, forced = masks[index], self._forced()
        if self.failure is not None or (self.matcher is None and forced is None):
            return False
        mask[:] = _EVERYTHING
        if self.matcher is not None:
            with self._following():
                self.matcher.fill(masks, index)
                if not mask.any():
                    self.failure = "the grammar has come to a place that no token of the model leads on from"
            if self.failure is not None:
                return False
        if forced is not None:
            word, bit = divmod(forced, 32)
            if mask[word] >> bit & 1:
                mask[:] = 0
                mask[word] = np.uint32(1 << bit).view(np.int32)
            else:
                self.budget = None
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
        if self.spent > _PATIENCE + _PATIENCE_PER_TOKEN * self.num_known:
            self.failure = "the grammar takes too long to follow: make its rules less ambiguous"

    def _forced(self) -> int | None:
        """The token that the budget asks for, if it has run out."""
        budget = self.budget
        if budget is None or self.num_known < budget.num_tokens:
            return None
        last = tuple(self.last)
        sizes = range(len(budget.end) - 1, -1, -1)
        return budget.end[next(size for size in sizes if last[len(last) - size :] == budget.end[:size])]


class Constraints:
    """The constraints of all rows, and the steps in flight whose tokens they wait for.

    failed: which of the requests that the step at hand samples have nothing to sample, and why; there after `masks`.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.failed: list[tuple[int, str]] = []
        # By row; and whether a row has one, as a column.
        self._constraints: dict[int, Constraint] = {}
        self._is_held = np.zeros(num_rows, np.bool_)
        self._mask_words = -(-vocab_size // 32)
        self._device = device
        # Of the step at hand: which of the requests that sample are held and by what, and of those whose mask is due.
        self._held: list[tuple[int, Constraint]] = []
        self._due: list[tuple[int, Constraint]] = []
        self._in_flight: deque[tuple[StepHandle, list[tuple[int, Constraint]]]] = deque()

    def begin(self, plan: StepPlan) -> bool:
        """Take up a step that is about to be launched; True when it must ask for `masks` before it chooses tokens."""
        for new in plan.new_rows:
            self._replace(new)
        self.failed, self._held, self._due = [], [], []
        if not self._constraints:
            return False
        self._take_in(wait=False)
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
        which: list[int] = []
        masks = np.empty((len(self._due), self._mask_words), np.int32)
        for index, constraint in self._due:
            if constraint.fill(masks, len(which)):
                which.append(int(sampled[index]))
            elif constraint.failure is not None:
                self.failed.append((index, constraint.failure))
        if not which:
            return None
        there = upload([np.array(which, np.int32), masks[: len(which)].reshape(-1)], self._device)
        return Masks(there[0], there[1].view(len(which), self._mask_words))

    def launched(self, handle: StepHandle) -> None:
        """Remember the step at hand, for the tokens that it will have made."""
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
            for index, constraint in held:
                constraint.advance(int(tokens[index]))
                # The row may be another request's by now.
                if constraint.is_over and self._constraints.get(constraint.row) is constraint:
                    self._drop(constraint.row)
