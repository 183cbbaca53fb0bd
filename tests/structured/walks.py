"""Random walks through grammars: texts that xgrammar permits, token by token, with a real tokenizer."""

import json
import random
from dataclasses import dataclass

import numpy as np
import xgrammar
from transformers import AutoTokenizer

from nanovllm_core import GrammarSpec
from nanovllm_core.grammar.compiler import write_json_rules
from nanovllm_core.grammar.schemas import regex
from nanovllm_core.grammar.schemas.formats import FORMATS
from nanovllm_models.default_model import default_model_path

# After STEER_AFTER tokens, a walk prefers tokens that end the text. After MAX_TOKENS tokens, it counts as endless.
STEER_AFTER = 60
MAX_TOKENS = 2_000
CLOSING_TOKENS = ('"', "}", "]", '"}', '"]', "}}", '"}}', "0", "1", "null", "true")


@dataclass(frozen=True, slots=True)
class Walk:
    text: str
    num_tokens: int
    ended: bool


class Walker:
    def __init__(self, vocabulary: list[bytes], end_id: int):
        info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[end_id], vocab_size=len(vocabulary))
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.vocabulary = vocabulary
        self.end_id = end_id
        # Bytes that never occur in UTF-8 have no token.
        self.id_by_byte = {token[0]: index for index, token in enumerate(vocabulary) if len(token) == 1}
        self.closing = [vocabulary.index(word.encode()) for word in CLOSING_TOKENS if word.encode() in vocabulary]
        self.single_bytes = [index for index, token in enumerate(vocabulary) if len(token) == 1]
        # Rare tokens: non-ASCII characters, parts of them, escapes and control characters.
        self.rare = [
            index for index, token in enumerate(vocabulary) if any(b >= 0x7F or b < 0x20 or b == 92 for b in token)
        ]
        self.mask = xgrammar.allocate_token_bitmask(1, len(vocabulary))
        self.bits = self.mask.numpy().view(np.uint8)[0]

    def compile(self, schema, *, tag: bool = False) -> xgrammar.CompiledGrammar:
        part = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
        spec = GrammarSpec("structural_tag" if tag else "json_schema", json.dumps(part if tag else schema))
        return self.compiler.compile_grammar(write_json_rules(spec))

    def walk(self, grammar: xgrammar.CompiledGrammar, rng: random.Random, hints: list[str] | None = None) -> Walk:
        """hints: texts that long walks try, such as a string that a pattern needs."""
        matcher = xgrammar.GrammarMatcher(grammar)
        written: list[int] = []
        while len(written) < MAX_TOKENS:
            matcher.fill_next_token_bitmask(self.mask)
            may_end = self._allowed(self.end_id)
            if hints and not may_end and len(written) > STEER_AFTER // 2 and rng.random() < 0.2:
                for byte in rng.choice(hints).encode():
                    if not matcher.accept_token(self.id_by_byte[byte]):
                        break
                    written.append(self.id_by_byte[byte])
                continue
            token = self.end_id if may_end and (len(written) > STEER_AFTER or rng.random() < 0.7) else None
            token = self._choose(len(written), rng) if token is None else token
            if token is None:
                raise AssertionError(f"no token is allowed after {self.text(written)[-200:]!r}")
            if not matcher.accept_token(token):
                raise AssertionError(f"{self.vocabulary[token]!r} was allowed and is not accepted")
            if token == self.end_id:
                return Walk(self.text(written), len(written), True)
            written.append(token)
        return Walk(self.text(written), len(written), False)

    def _allowed(self, token: int) -> bool:
        return bool(self.bits[token >> 3] >> (token & 7) & 1)

    def _choose(self, num_written: int, rng: random.Random) -> int | None:
        late = num_written >= STEER_AFTER
        groups: list[list[int]] = []
        if rng.random() < (0.9 if late else 0.25):
            groups.append(self.closing)
        if late and rng.random() < 0.5:
            groups.append(self.single_bytes)
        if rng.random() < 0.3:
            groups.append(self.rare)
        for group in groups:
            for token in rng.sample(group, min(len(group), 20)):
                if self._allowed(token):
                    return token
        for _ in range(20):
            token = rng.randrange(len(self.vocabulary))
            if self._allowed(token) and token != self.end_id:
                return token
        allowed_ids = np.flatnonzero(np.unpackbits(self.bits, bitorder="little", count=len(self.vocabulary)))
        return int(allowed_ids[rng.randrange(len(allowed_ids))]) if len(allowed_ids) else None

    def accepts(self, grammar: xgrammar.CompiledGrammar, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar)
        return matcher.accept_string(text) and matcher.accept_token(self.end_id)

    def text(self, tokens: list[int]) -> str:
        return b"".join(self.vocabulary[token] for token in tokens).decode("utf-8", errors="replace")


def default_walker() -> Walker:
    tokenizer = AutoTokenizer.from_pretrained(default_model_path())
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    return Walker(list(info.decoded_vocab), tokenizer.eos_token_id)


def find_hints(schema) -> list[str]:
    """Returns strings that match the patterns and formats anywhere in a schema."""
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.values())
            name = value.get("format")
            format_pattern = FORMATS.get(name) if isinstance(name, str) else None
            texts = [format_pattern, value.get("pattern"), *(value.get("patternProperties") or ())]
            for text in texts:
                if isinstance(text, str):
                    try:
                        found.add(_sample(regex.parse(text)))
                    except regex.RegexError:
                        continue
        elif isinstance(value, list):
            waiting.extend(value)
    return sorted(found)


def _sample(node: regex.Node) -> str:
    match node:
        case regex.CharacterSet(ranges):
            return next((chr(low) for low, _ in ranges if low > 0x20), chr(ranges[-1][1]))
        case regex.Concatenation(parts):
            return "".join(_sample(part) for part in parts)
        case regex.Alternation(options):
            return _sample(options[0])
        case regex.Repeat(part, low):
            return _sample(part) * low
        case _:
            return ""
