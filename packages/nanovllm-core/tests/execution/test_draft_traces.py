import json
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import toy_model
from constrained_steps import RowWithoutDrafts, ScriptedStepHandle, make_new_row, make_plan, unpack
from grammars import EBNF, JSON, REGEX, TAG, toy_compiler

from nanovllm_core import GrammarSpec, ReasoningBudget
from nanovllm_core.execution.constraints import Constraints
from nanovllm_core.grammar import json_termination
from nanovllm_core.grammar.compiler import Grammar

CPU = torch.device("cpu")
MAX_DRAFTS = 5
VALUE = {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/value"}}]}
ENDLESS = GrammarSpec("json_schema", json.dumps({"$defs": {"value": VALUE}, "type": "array", "items": VALUE}))
SPECS = [None, None, JSON, REGEX, EBNF, TAG, ENDLESS, ENDLESS]
LOW_LIMITS = {
    "MIN_REPETITIONS": 2,
    "MIN_REPEATED_TOKENS": 5,
    "MAX_PERIOD_TOKENS": 2,
    "MAX_STRING_TOKENS": 8,
    "MAX_STUCK_TOKENS": 6,
    "MAX_NUMBER_LENGTH": 4,
    "MAX_DEPTH": 2,
}


@pytest.fixture(scope="module")
def grammars() -> dict[GrammarSpec, Grammar]:
    compiler = toy_compiler()
    return {spec: compiler.compile(spec) for spec in SPECS if spec is not None}


@dataclass
class ExpectedOutput:
    """The output of a row without drafts. masks[i] restricts tokens[i]."""

    options: dict[str, object]
    tokens: list[int] = field(default_factory=list)
    masks: list[bytes | None] = field(default_factory=list)
    failure: str | None = None
    num_known: int = 0
    draft_ids: list[int] | None = None

    def sample(self, rng: random.Random, length: int) -> None:
        row = RowWithoutDrafts(self.options, toy_model.VOCAB)
        while len(self.tokens) < length:
            mask, self.failure = row.next_mask()
            if self.failure is not None:
                return
            self.masks.append(mask)
            allowed = unpack(mask, toy_model.VOCAB)
            # Repeat tokens often, so that strings and numbers become endless.
            recent = [token for token in self.tokens[-2:] if allowed[token]]
            self.tokens.append(
                rng.choice(recent if recent and rng.random() < 0.6 else np.flatnonzero(allowed).tolist())
            )
            row.append(self.tokens[-1])

    def masks_along(self, tokens: list[int]) -> tuple[list[bytes | None], str | None]:
        """Returns the masks of `tokens` and of the next token, and the failure that ends the masks, or None."""
        row, masks = RowWithoutDrafts(self.options, toy_model.VOCAB), []
        for token in [*self.tokens[: self.num_known], *tokens, 0]:
            mask, failure = row.next_mask()
            if failure is not None:
                return masks[self.num_known :], failure
            masks.append(mask)
            row.append(token)
        return masks[self.num_known :], None


def draw_options(rng: random.Random, grammars: dict[GrammarSpec, Grammar]) -> dict[str, object]:
    options: dict[str, object] = {}
    if (spec := rng.choice(SPECS)) is not None:
        options["grammar"] = grammars[spec]
    if rng.random() < 0.4 or spec is None:
        end = tuple(rng.choices(range(20, 30), k=rng.choice([1, 1, 2, 3])))
        options["reasoning_budget"] = ReasoningBudget(rng.randrange(12), end)
    if rng.random() < 0.3:
        options["allowed_token_ids"] = tuple(rng.sample(range(toy_model.VOCAB), rng.choice([30, 90])))
    return options


def draw_drafts(rng: random.Random, expected_output: ExpectedOutput) -> list[int]:
    drafts = expected_output.tokens[expected_output.num_known :][:MAX_DRAFTS]
    drafts += rng.choices(range(toy_model.VOCAB), k=MAX_DRAFTS - len(drafts))
    for position in range(MAX_DRAFTS):
        if rng.random() < 0.15:
            drafts[position] = rng.choice([toy_model.EOS, 20, rng.randrange(toy_model.VOCAB), drafts[0]])
    return drafts


def check_entries(
    expected_output: ExpectedOutput, num_drafts: int, masks: list[bytes | None], failure: tuple[int, str] | None
) -> None:
    """Entry i samples the token after the first i drafts. failure: (entry, reason), or None."""
    drafts = (expected_output.draft_ids or [])[:num_drafts]
    expected_masks, reason = expected_output.masks_along(drafts)
    for entry, expected in enumerate(expected_masks):
        assert masks[entry] == expected
        if entry < num_drafts and not unpack(expected, toy_model.VOCAB)[drafts[entry]]:
            # Entries after a forbidden draft are unused. They have a mask only with the option `allowed_token_ids`.
            assert failure is None
            assert "allowed_token_ids" in expected_output.options or masks[entry + 1 :] == [None] * (num_drafts - entry)
            return
    assert failure == (None if reason is None else (len(expected_masks), reason))
    assert masks[len(expected_masks) :] == [None] * (num_drafts + 1 - len(expected_masks))


def run_trace(rng: random.Random, grammars: dict[GrammarSpec, Grammar], counts: dict[str, int]) -> None:
    expected_outputs = [ExpectedOutput(draw_options(rng, grammars)) for _ in range(rng.choice([1, 1, 2, 3]))]
    for expected_output in expected_outputs:
        expected_output.sample(rng, rng.randrange(4, 24))
    num_masks = len(expected_outputs) * (1 + MAX_DRAFTS)
    constraints = Constraints(len(expected_outputs), toy_model.VOCAB, CPU, num_masks)
    new_rows = [make_new_row(row, **expected_output.options) for row, expected_output in enumerate(expected_outputs)]
    running = list(range(len(expected_outputs)))
    while running:
        rows = [row for row in running if rng.random() < 0.9] or list(running)
        has_drafts = rng.random() < 0.8
        num_drafts = [
            rng.randint(0, MAX_DRAFTS) if has_drafts and expected_outputs[row].draft_ids is not None else 0
            for row in rows
        ]
        plan = make_plan(rows, new_rows, num_drafts=num_drafts if has_drafts else None)
        new_rows = []
        first_entries = np.cumsum([0, *(1 + n for n in num_drafts)])[: len(rows)].astype(np.int64)
        masks = constraints.fill_masks(first_entries) if constraints.begin_step(plan) else None
        mask_by_entry = (
            {} if masks is None else dict(zip(masks.sample_indices.tolist(), masks.bits.numpy(), strict=True))
        )
        assert len(mask_by_entry.keys() - {-1}) == (0 if masks is None else int((masks.sample_indices >= 0).sum()))
        failures = {failure.request_index: (failure.num_drafts, failure.reason) for failure in constraints.failures}
        token_ids, num_tokens, draft_ids = [], [], []
        for index, (row, n, first) in enumerate(zip(rows, num_drafts, first_entries.tolist(), strict=True)):
            expected_output = expected_outputs[row]
            entry_masks = [mask_by_entry.get(first + entry) for entry in range(n + 1)]
            packed_masks = [None if mask is None else mask.tobytes() for mask in entry_masks]
            check_entries(expected_output, n, packed_masks, failures.get(index))
            drafts, expected_tokens = (
                (expected_output.draft_ids or [])[:n],
                expected_output.tokens[expected_output.num_known :],
            )
            num_accepted = 0
            while num_accepted < min(n, len(expected_tokens)) and drafts[num_accepted] == expected_tokens[num_accepted]:
                num_accepted += 1
            # A row that accepts its whole expected output samples one more arbitrary token.
            token_ids += [*expected_tokens, 0][: num_accepted + 1]
            num_tokens.append(num_accepted + 1)
            expected_output.num_known += num_accepted + 1
            counts["accepted"] += num_accepted
            counts["failed after drafts"] += index in failures and failures[index][0] > 0
            if expected_output.num_known >= len(expected_output.tokens):
                running.remove(row)
                counts["failed"] += expected_output.failure is not None
            expected_output.draft_ids = draw_drafts(rng, expected_output)
            draft_ids.append(expected_output.draft_ids)
        step = ScriptedStepHandle(
            token_ids, num_tokens if max(num_tokens) > 1 else None, np.reshape(draft_ids, (-1, MAX_DRAFTS))
        )
        step.is_finished = rng.random() < 0.3
        constraints.end_step(step)


def test_masks_of_drafts_equal_masks_of_a_row_without_drafts(grammars, monkeypatch):
    for name, limit in LOW_LIMITS.items():
        monkeypatch.setattr(json_termination, name, limit)
    counts = dict.fromkeys(["accepted", "failed", "failed after drafts"], 0)
    for seed in range(300):
        run_trace(random.Random(seed), grammars, counts)
    assert all(counts.values())
