"""Proof by samples: each schema is refused, or the texts that its grammar permits meet the schema."""

import json
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import jsonschema
import xgrammar
from corpora import Case
from refusals import names_keyword
from walks import Walker, find_hints

from nanovllm_core.errors import GrammarError
from nanovllm_core.grammar.schemas.conversion import convert_schema
from nanovllm_core.grammar.schemas.formats import FORMATS

SLOW_COMPILE_S = 2.0


@dataclass
class Report:
    """wrong: violations of the proof."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    seconds: Counter[str] = field(default_factory=Counter)


def prove(
    walker: Walker, cases: Iterable[Case], walks: int, *, tag: bool = False, report: Report | None = None
) -> Report:
    report = report or Report()
    for case in cases:
        _prove(walker, case, walks, tag, report)
    return report


def _prove(walker: Walker, case: Case, walks: int, tag: bool, report: Report) -> None:
    begin = time.perf_counter()
    try:
        converted_schema = convert_schema(case.schema, "schema")
    except GrammarError as refusal:
        _note_refusal(case, refusal, report)
        return
    finally:
        report.seconds["check"] += time.perf_counter() - begin
    report.counts["accepted"] += 1
    begin = time.perf_counter()
    try:
        grammar = walker.compile(converted_schema, tag=tag)
    except RuntimeError as error:
        report.wrong.append(f"{case.name}: {str(error)[:300]} for {json.dumps(converted_schema)[:300]}")
        return
    compile_s = time.perf_counter() - begin
    report.seconds["compile"] += compile_s
    if compile_s > SLOW_COMPILE_S:
        report.slow.append(f"{case.name}: {compile_s:.1f} s")
    # Grammars do not enforce formats outside FORMATS.
    is_format_ignored = case.name.startswith("optional/format") and case.schema.get("format") not in FORMATS
    for value in [] if is_format_ignored else case.invalid:
        if walker.accepts(grammar, json.dumps(value, ensure_ascii=False)):
            report.wrong.append(f"{case.name}: permits {json.dumps(value)[:200]}")
    for value in case.valid:
        report.counts["valid permitted"] += walker.accepts(grammar, json.dumps(value, ensure_ascii=False))
        report.counts["valid"] += 1
    begin = time.perf_counter()
    _walk(walker, grammar, case, walks, report)
    report.seconds["walk"] += time.perf_counter() - begin


def _note_refusal(case: Case, refusal: GrammarError, report: Report) -> None:
    keyword = refusal.message.split(" ", 1)[0]
    report.counts["invalid" if refusal.code == "invalid_schema" else "refused"] += 1
    report.refused[keyword] += 1
    report.refusals.append(f"{case.name}: {refusal.message}")
    if not names_keyword(refusal.message) or not (refusal.place or "").startswith("schema"):
        report.wrong.append(f"{case.name}: refused without naming a keyword: {refusal.message[:200]}")


def _walk(walker: Walker, grammar: xgrammar.CompiledGrammar, case: Case, walks: int, report: Report) -> None:
    validator = jsonschema.validators.validator_for(case.schema, default=jsonschema.Draft202012Validator)(case.schema)
    rng = random.Random(case.name)
    texts = find_hints(case.schema)
    for _ in range(walks):
        try:
            walk = walker.walk(grammar, rng, texts)
        except AssertionError as error:
            report.wrong.append(f"{case.name}: {error}")
            return
        report.counts["walks"] += 1
        report.counts["tokens"] += walk.num_tokens
        if not walk.ended:
            report.wrong.append(f"{case.name}: does not end: {walk.text[:200]!r}")
            return
        try:
            with warnings.catch_warnings(action="ignore"):  # re warns about patterns whose meaning will change.
                problem = next(validator.iter_errors(json.loads(walk.text)), None)
        except (json.JSONDecodeError, RecursionError) as error:
            problem = error
        if problem is not None:
            report.wrong.append(f"{case.name}: {walk.text[:300]!r} is not valid: {str(problem)[:300]}")
            return
