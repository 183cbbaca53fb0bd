import json
import random
import re

import numpy as np
import pytest

from nanovllm_core import GrammarSpec
from nanovllm_core.grammar.bounded_strings import (
    BLOCK_LENGTH,
    HALF_BLOCK_LENGTH,
    MIN_AUTOMATON_LOW,
    MIN_TAIL_LENGTH,
    BoundedString,
    parse_bounded_pattern,
)
from nanovllm_core.grammar.compiler import Compiler, Grammar

pytestmark = pytest.mark.background

ANY = r"[ -!#-\[\]-\u{7ff}]|[\u{800}-\u{d7ff}\u{e000}-\u{ffff}]|[\u{10000}-\u{10ffff}]"
CHARACTERS = ("a", " ", "\x7f", "é", "\u07ff", "\u0800", "\ud7ff", "\uffff", "😀", "\U0010ffff")
BYTES = [bytes((byte,)) for byte in range(256)]
WORDS = [
    *("a" * length for length in (2, 3, 5, 8, BLOCK_LENGTH, BLOCK_LENGTH + 1, MIN_TAIL_LENGTH, 60)),
    *("éé", "a😀", "€" * 9, 'a"', 'aaa"', '"}', 'a"}', '","b', 'aa","b":"a', '""', "a\n", "\\n"),
]
# Each of these tokens begins or ends within a character.
PARTS = [b"a\xc3", b"\xa9a", b"\x98\x80aa", b'\xa9"', b"\x80\x80"]
END = 256
TOKENS = [*BYTES, b"", *(word.encode() for word in WORDS), *PARTS]
TOKEN_IDS = {token: index for index, token in enumerate(TOKENS) if token}


@pytest.fixture(scope="module")
def compiler():
    return Compiler(TOKENS, (END,), len(TOKENS))


def bounded_string_schema(low: int, high: int | None, characters: str = ANY) -> dict:
    return {"type": "string", "pattern": f"^(?:{characters}){{{low},{'' if high is None else high}}}$"}


def accepts(grammar: Grammar, text: str | bytes) -> bool:
    matcher = grammar.start()
    data = text.encode() if isinstance(text, str) else text
    return all(matcher.accept(byte) for byte in data) and matcher.inner.is_completed()


BOUNDS = sorted(
    {
        (low, high)
        for high in (0, 1, 15, 31, 32, 47, 48, 49, 64, 96, 127, 200, 500)
        for low in (0, 1, 3, 16, 17, 41, 100, high)
    }
)


@pytest.mark.parametrize(("low", "high"), [(low, high) for low, high in BOUNDS if low <= high])
def test_strings_within_their_bounds_and_no_others_are_accepted(compiler, low, high):
    grammar = compiler.compile(GrammarSpec("json_schema", json.dumps(bounded_string_schema(low, high))))
    for length in range(high + 3):
        assert accepts(grammar, '"' + "a" * length + '"') == (low <= length <= high)
    for length in {low - 1, low, high - 1, high, high + 1} - {-1}:
        for character in CHARACTERS:
            assert accepts(grammar, '"' + character * length + '"') == (low <= length <= high)
    for wrong in (b"\x80", b"\xc1\xbf", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x8f\xbf\xbf", b"\n", b"\x01", b"\\"):
        assert not accepts(grammar, b'"' + b"a" * low + wrong + b'"')


def test_large_bounds_are_exact(compiler):
    grammar = compiler.compile(GrammarSpec("json_schema", json.dumps(bounded_string_schema(2, 50_000))))
    for length in (1, 2, 1_000, 49_999, 50_000, 50_001):
        assert accepts(grammar, '"' + "a" * length + '"') == (2 <= length <= 50_000)
    grammar = compiler.compile(GrammarSpec("json_schema", json.dumps(bounded_string_schema(3_000, None))))
    for length in (0, 2_999, 3_000, 3_001, 60_000):
        assert accepts(grammar, '"' + "a" * length + '"') == (length >= 3_000)


def fits(written: bytes, low: int, high: int | None) -> bool:
    """Whether `written` is a valid object or the beginning of one."""
    text = written.decode(errors="ignore")
    try:
        written.decode()
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return False
        text += "é"
    limit = "" if high is None else high
    inner, space, rest = r"[^\"\\\x00-\x1f]", r"[ \n\r\t]?", ""
    for part in reversed((",", space, '"', "b", '"', space, ":", space, '"', f"{inner}{{0,3}}", '"', space, "}")):
        rest = f"(?:{part}{rest})?"
    first = rf'{{"a":"{inner}{{{low},{limit}}}"{space}'
    return any(
        re.fullmatch(pattern, text) for pattern in (f'{{"a":"{inner}{{0,{limit}}}', f"{first}}}?", f"{first}{rest}")
    )


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 40), (2, 48), (0, 63), (5, 130), (0, 200), (20, 20), (24, 40), (41, 60), (40, 130), (2, None), (45, None)],
)
def test_masks_allow_exactly_the_tokens_that_fit(compiler, low, high):
    """A mask may lack a token that fits only if the token has more than `always_allowed_length` bytes."""
    always_allowed_length = HALF_BLOCK_LENGTH if low > BLOCK_LENGTH else MIN_TAIL_LENGTH - BLOCK_LENGTH
    schema = {
        "type": "object",
        "properties": {"a": bounded_string_schema(low, high), "b": bounded_string_schema(0, 3)},
        "required": ["a"],
        "additionalProperties": False,
    }
    part = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    tag = json.dumps({"type": "structural_tag", "format": part})
    grammar = compiler.compile(GrammarSpec("structural_tag", tag))
    rng = random.Random(str(high))
    mask = np.zeros((1, len(grammar.usable_token_mask)), np.int32)
    for turn in range(6):
        # `inner` has no terminator. A terminator would end strings that repeat themselves.
        matcher, written = grammar.start().inner, b'{"a":"'
        assert all(matcher.accept_token(byte) for byte in written)
        while not matcher.is_completed():
            matcher.fill_next_token_bitmask(mask, 0)
            bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
            for token, token_id in TOKEN_IDS.items():
                if bits[token_id] or len(token) <= always_allowed_length:
                    assert bool(bits[token_id]) == fits(written + token, low, high), (written, token)
            allowed = [token_id for token_id in TOKEN_IDS.values() if bits[token_id]]
            if turn % 2 and len(written) < low + 500:
                allowed = [token_id for token_id in allowed if b'"' not in TOKENS[token_id]] or allowed
            chosen_id = rng.choice(allowed)
            assert matcher.accept_token(chosen_id)
            written += TOKENS[chosen_id]
        length = len(json.loads(written)["a"])
        assert low <= length
        assert high is None or length <= high


def test_no_rule_loses_its_lookahead(compiler):
    """Without lookaheads, xgrammar tests thousands of tokens for every mask."""
    properties = {
        f"p{high}": bounded_string_schema(low, high)
        for low, high in ((0, 20), (3, 100), (70, 500), (0, 2000), (9, None))
    }
    source = json.dumps({"type": "object", "properties": properties, "required": [*properties]})
    rules = str(compiler.compile(GrammarSpec("json_schema", source)).inner.grammar).splitlines()
    counting = [rule for rule in rules if "ud7ff" in rule]
    assert len(counting) > MIN_TAIL_LENGTH
    assert all("(=(" in rule for rule in counting), [rule[:80] for rule in counting if "(=(" not in rule]


@pytest.mark.parametrize("style", ["json", "qwen_xml"])
def test_strings_within_a_structural_tag(compiler, style):
    schema = {"type": "object", "properties": {"a": bounded_string_schema(0, 3, "[a-z]")}, "required": ["a"]}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema, "style": style}}
    grammar = compiler.compile(GrammarSpec("structural_tag", json.dumps(tag)))
    written = '{{"a":"{}"}}' if style == "json" else "<parameter=a>{}</parameter>"
    for text in ("", "a", "aaa", "aaaa", "marked0a"):
        assert accepts(grammar, written.format(text)) == (len(text) <= 3)


def test_only_patterns_that_bound_a_length_are_parsed():
    assert parse_bounded_pattern("^(?:[a-z]){0,3}$") == BoundedString(r"[\U00000061-\U0000007a]", 0, 3)
    assert parse_bounded_pattern(r"^(?:[a\-\u{2d}]|\.){1,500}$") == BoundedString(
        r"[\U00000061-\U00000061\U0000002d-\U0000002d\U0000002d-\U0000002d\U0000002e-\U0000002e]", 1, 500
    )
    for other in (
        "^(?:[a-z])*$", "^[a-z]{0,3}$", "^(?:[^a]){0,3}$", "^(?:[a-z]){3,0}$", "^(?:[ -!]){1,}$", "^(?:ab){0,3}$",
        f"^(?:[a-z]){{{MIN_AUTOMATON_LOW},99}}$", "^(?:[a-z]){5,}$",
        r"^(?:[!-#]){0,3}$", r"^(?:\\){0,3}$", r"^(?:[\u{1}-a]){0,3}$",
        r"^(?:[\u{d000}-\u{e000}]){0,3}$", "^(?:[a-z]){0,3}$x",
    ):  # fmt: skip
        assert parse_bounded_pattern(other) is None, other


def test_text_that_resembles_patterns_is_left_unchanged(compiler):
    bounded_schema = {"type": "string", "pattern": "^(?:[a-b]){0,3}$"}
    schema = {
        "type": "object",
        "properties": {
            "enum": bounded_schema,
            "c": {"enum": [bounded_schema]},
            "marked0[ab]": bounded_schema,
            "bounded_0_tail1": {"enum": ["marked0a"]},
        },
        "required": ["enum", "c", "marked0[ab]", "bounded_0_tail1"],
        "additionalProperties": False,
    }
    grammar = compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
    value = {"enum": "aba", "c": bounded_schema, "marked0[ab]": "", "bounded_0_tail1": "marked0a"}
    assert accepts(grammar, json.dumps(value, separators=(",", ":")))
    for name in ("enum", "marked0[ab]"):
        for wrong in ("abab", "marked0a", "c"):
            assert not accepts(grammar, json.dumps({**value, name: wrong}, separators=(",", ":")))
