"""Random walks through grammars: what xgrammar permits, token by token, with a real tokenizer.

Used by the tests beside it and by `python tests/structured/prove.py`.
"""

import json
import random
from dataclasses import dataclass

import numpy as np
import xgrammar

# Walks that are this long are steered to their end; those that are `MAX_TOKENS` long never end.
STEER_AFTER = 60
MAX_TOKENS = 6_000
ENDING = ('"', "}", "]", '"}', '"]', "}}", '"}}', "0", "1", "null", "true")


@dataclass(frozen=True, slots=True)
class Walk:
    """What was written, and whether it ended by itself within the limit."""

    text: str
    num_tokens: int
    ended: bool


class Walker:
    """Walks through the grammars of one tokenizer. vocabulary: the bytes of each token; end: the id that ends."""

    def __init__(self, vocabulary: list[bytes], end: int):
        info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[end], vocab_size=len(vocabulary))
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.vocabulary = vocabulary
        self.end = end
        self.closing = [vocabulary.index(word.encode()) for word in ENDING if word.encode() in vocabulary]
        self.short = np.array([len(token) for token in vocabulary])
        self.mask = xgrammar.allocate_token_bitmask(1, len(vocabulary))

    def compile(self, schema, *, tag: bool = False, any_whitespace: bool = False) -> xgrammar.CompiledGrammar:
        """The grammar of a schema from check_schema, alone or inside of a structural tag."""
        if tag:
            inner = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 2}
            return self.compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": inner}))
        return self.compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=any_whitespace, max_whitespace_cnt=2 if any_whitespace else None
        )

    def walk(self, grammar: xgrammar.CompiledGrammar, rng: random.Random) -> Walk:
        """One walk. Every token is one that the mask allows; after a while those that close are preferred."""
        matcher = xgrammar.GrammarMatcher(grammar)
        written: list[int] = []
        while len(written) < MAX_TOKENS:
            matcher.fill_next_token_bitmask(self.mask)
            packed = self.mask.numpy().view(np.uint8)[0]
            allowed = np.flatnonzero(np.unpackbits(packed, bitorder="little", count=len(self.vocabulary)))
            if not len(allowed):
                raise AssertionError(f"no token is allowed after {self.text(written)[-200:]!r}")
            token = self._choose(allowed, len(written), rng)
            if not matcher.accept_token(token):
                raise AssertionError(f"{self.vocabulary[token]!r} was allowed and is not accepted")
            if token == self.end:
                return Walk(self.text(written), len(written), True)
            written.append(token)
        return Walk(self.text(written), len(written), False)

    def _choose(self, allowed: np.ndarray, done: int, rng: random.Random) -> int:
        if self.end in allowed and (done > STEER_AFTER or rng.random() < 0.7):
            return self.end
        if rng.random() < (0.25 if done < STEER_AFTER else 0.9):
            closing = [token for token in self.closing if token in allowed]
            if closing:
                return rng.choice(closing)
        if done >= STEER_AFTER and rng.random() < 0.5:
            lengths = self.short[allowed]
            return int(rng.choice(allowed[lengths == lengths.min()]))
        if rng.random() < 0.3:
            # Whole characters outside ASCII, bytes of them and control characters are few among many tokens.
            odd = [
                token
                for token in allowed
                if (b := self.vocabulary[token]) and (b[0] >= 0x80 or b[0] < 0x20 or b"\\" in b)
            ]
            if odd:
                return int(rng.choice(odd))
        return int(rng.choice(allowed))

    def text(self, tokens: list[int]) -> str:
        """What these tokens say."""
        return b"".join(self.vocabulary[token] for token in tokens).decode("utf-8", errors="replace")
