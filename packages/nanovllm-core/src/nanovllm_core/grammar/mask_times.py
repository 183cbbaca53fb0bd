"""Refuses grammars whose masks take too long, because a slow mask delays all requests of the engine."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import orjson

from nanovllm_core.errors import GrammarError
from nanovllm_core.grammar.bounded_strings import parse_bounded_pattern
from nanovllm_core.grammar.compiler import Compiler, Grammar
from nanovllm_core.grammar.schemas.json_values import JSON
from nanovllm_core.grammar_types import GrammarSpec

# Maximum number of tokens of a trial answer, and maximum CPU time of its masks. Common grammars take 5 ms, and
# `.{1,500}` takes 1 s with 151,000 tokens. Later, the limit in `execution/row_constraint.py` applies.
NUM_TRIAL_TOKENS = 48
MAX_TRIAL_S = 3.0
# Stop timing further patterns of a grammar after this CPU time.
MAX_PATTERNS_S = 2.0


class TrialCompiler:
    """Compiles grammars, and times the masks of trial answers. tokens: bytes by token id."""

    def __init__(self, compiler: Compiler, tokens: Sequence[bytes]):
        self._compiler = compiler
        letters = [index for index, token in enumerate(tokens) if token.strip().isalpha()]
        quotes = [index for index, token in enumerate(tokens) if token.startswith(b'"')]
        # Letters stay within strings, where ambiguous patterns are slow. Quotes lead to the next string.
        self._letters = np.array(letters, np.int64)
        self._quotes = np.array(quotes, np.int64)

    def check(self, spec: GrammarSpec, rules: str | None) -> None:
        """Compile a converted grammar, and time trial answers of the grammar and of each pattern in its source.

        A trial answer may not reach a pattern, for example behind reasoning. So each pattern has its own answer.
        rules: the result of `write_rules(spec)`.
        Raises GrammarError if the grammar can't be compiled, or if masks are slow.
        """
        self._time_answer(self._compiler.compile(spec, rules=rules), leaves_strings=True)
        if spec.kind not in ("json_schema", "structural_tag"):
            return
        deadline = time.thread_time() + MAX_PATTERNS_S
        for pattern in dict.fromkeys(_find_patterns(orjson.loads(spec.source))):
            if time.thread_time() > deadline:
                return
            if parse_bounded_pattern(pattern) is not None:
                continue  # Bounded strings have fast masks.
            # As a JSON string, the pattern's rules are in the cache of compiled rules.
            string_schema = orjson.dumps({"type": "string", "pattern": pattern}).decode()
            try:
                pattern_grammar = self._compiler.compile(GrammarSpec("json_schema", string_schema))
            except GrammarError:
                continue  # No token can begin the pattern, but the grammar may have other options.
            self._time_answer(pattern_grammar, leaves_strings=False)

    def _time_answer(self, grammar: Grammar, *, leaves_strings: bool) -> None:
        # An error of xgrammar ends the trial: such an answer fails alone, without a delay.
        with suppress(RuntimeError):
            self._run_trial(grammar, leaves_strings=leaves_strings)

    def _run_trial(self, grammar: Grammar, *, leaves_strings: bool) -> None:
        matcher, rng, seconds = grammar.start(), random.Random(0), 0.0
        mask = np.zeros((1, len(grammar.usable_token_mask)), np.int32)
        for index in range(NUM_TRIAL_TOKENS):
            start = time.thread_time()
            matcher.fill_mask(mask, 0)
            seconds += time.thread_time() - start
            if seconds > MAX_TRIAL_S:
                raise GrammarError(
                    f"the model's allowed tokens take too long to find under this grammar, more than {MAX_TRIAL_S:g} s "
                    f"for {index + 1} tokens: make its repeated parts unambiguous, or repeat them less"
                )
            bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
            bits[list(grammar.end_ids)] = 0
            preferred = self._quotes if leaves_strings and index % 4 == 3 else self._letters
            token_ids = preferred[bits[preferred] == 1]
            if not len(token_ids):
                token_ids = np.flatnonzero(bits)
            if not len(token_ids) or not matcher.accept(int(rng.choice(token_ids))):
                return


def _find_patterns(part: JSON) -> Iterator[str]:
    """Yield the patterns in a converted schema or structural tag."""
    if isinstance(part, list):
        for item in part:
            yield from _find_patterns(item)
    elif isinstance(part, dict):
        for name, item in part.items():
            if name == "pattern" and isinstance(item, str):
                yield item
            else:
                yield from _find_patterns(item)
                yield from item if name == "patternProperties" and isinstance(item, dict) else ()
