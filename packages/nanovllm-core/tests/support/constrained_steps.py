"""Steps and grammars for tests of constraints, without a model."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm_core import SamplingParams
from nanovllm_core.execution.constraints import Constraints
from nanovllm_core.grammar_types import CompiledGrammar
from nanovllm_core.scheduling.plan import BatchShape, DraftResults, NewBlocks, NewRow, ScheduledRows, StepPlan
from nanovllm_core.token_ids import as_token_ids

VOCAB = 70
END = 5


class ScriptedStepHandle:
    """A step handle that finishes when `Constraints` waits for it or the test sets `is_finished`."""

    def __init__(
        self, token_ids: Sequence[int], num_tokens: Sequence[int] | None = None, draft_ids: object = None
    ) -> None:
        self.token_ids = np.array(token_ids, np.int32)
        self.num_tokens = np.array([1] * len(token_ids) if num_tokens is None else num_tokens, np.int64)
        self.drafts = None
        if draft_ids is not None:
            draft_ids = np.array(draft_ids, np.int32)
            self.drafts = DraftResults(self.num_tokens, np.full(len(draft_ids), draft_ids.shape[1]), draft_ids)
        self.is_finished = False
        self.num_waits = 0

    def wait(self) -> None:
        self.is_finished = True
        self.num_waits += 1


class CountingMatcher:
    """After n tokens, the mask allows only token n. `accept` raises an error after `max_tokens` tokens."""

    end_ids = frozenset({END})

    def __init__(self, max_tokens: int, calls: list[int]):
        self.count = 0
        self.max_tokens = max_tokens
        self.calls = calls

    def accept(self, token: int) -> bool:
        if self.count == self.max_tokens:
            # The state of a real matcher may be invalid after an error.
            self.count = -1
            raise RuntimeError("too deep")
        self.count += 1
        return True

    def fill_mask(self, masks: NDArray[np.int32], index: int) -> None:
        masks[index] = 0
        masks[index, 0] = 1 << self.count

    @staticmethod
    def accept_all(matchers, tokens) -> list[bool]:
        matchers[0].calls.append(len(matchers))
        return [matcher.accept(token) for matcher, token in zip(matchers, tokens, strict=True)]

    @staticmethod
    def fill_masks(matchers, masks) -> None:
        matchers[0].calls.append(len(matchers))
        for index, matcher in enumerate(matchers):
            matcher.fill_mask(masks, index)

    def fork(self) -> "CountingMatcher":
        return copy(self)


@dataclass
class CountingGrammar:
    calls: list[int] = field(default_factory=list[int])
    max_tokens: int = 1000

    def start(self) -> CountingMatcher:
        return CountingMatcher(self.max_tokens, self.calls)


def make_new_row(
    row: int, grammar: CompiledGrammar | None = None, output_ids: Sequence[int] = (), **sampling: object
) -> NewRow:
    token_ids = as_token_ids([1, 2, *output_ids])
    return NewRow(row, token_ids, 2, 0, SamplingParams(**sampling), seed=0, stop_ids=(), compiled_grammar=grammar)


def make_plan(
    rows: Sequence[int],
    new_rows: Sequence[NewRow] = (),
    samples: Sequence[bool] | None = None,
    num_drafts: Sequence[int] | None = None,
) -> StepPlan:
    count = len(rows)
    num_tokens = np.ones(count, np.int64) + (0 if num_drafts is None else np.array(num_drafts, np.int64))
    scheduled = ScheduledRows(np.array(rows), num_tokens, np.array(samples or [True] * count))
    shape = BatchShape(count, int(num_tokens.sum()), 1, has_drafts=num_drafts is not None)
    return StepPlan(0, list(new_rows), NewBlocks(), scheduled, shape, 10)


def allowed_tokens(masks: torch.Tensor) -> list[list[int]]:
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row[:VOCAB]).tolist() for row in bits]


class RowWithoutDrafts:
    def __init__(self, options: dict[str, object], vocab_size: int):
        self._constraints = Constraints(1, vocab_size, torch.device("cpu"))
        self._new_rows = [make_new_row(0, **options)]

    def next_mask(self) -> tuple[bytes | None, str | None]:
        """Returns (mask of the next token, reason of a failure)."""
        num_masks = self._constraints.begin_step(make_plan([0], self._new_rows))
        self._new_rows = []
        masks = self._constraints.fill_masks(np.arange(1)) if num_masks else None
        failures = self._constraints.failures
        return None if masks is None else masks.bits[0].numpy().tobytes(), failures[0].reason if failures else None

    def append(self, token: int) -> None:
        self._constraints.end_step(ScriptedStepHandle([token]))


def unpack(mask: bytes | None, vocab_size: int) -> NDArray[np.bool_]:
    """Returns whether the mask allows each token, bool [vocab_size]."""
    if mask is None:
        return np.ones(vocab_size, np.bool_)
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:vocab_size].astype(np.bool_)
