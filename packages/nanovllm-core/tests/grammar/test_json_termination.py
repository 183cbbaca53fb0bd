import json
import random

import numpy as np
import pytest

from nanovllm_core import GrammarSpec
from nanovllm_core.grammar.compiler import Compiler, Grammar
from nanovllm_core.grammar.json_termination import (
    MAX_DEPTH,
    MAX_INTEGER_LENGTH,
    MAX_NUMBER_LENGTH,
    MAX_STRING_TOKENS,
    MAX_STUCK_TOKENS,
    MIN_REPEATED_TOKENS,
    JsonTerminator,
    JsonTokenClasses,
)

END = 256
WORDS = [b'", "', b'\\"', b"0, ", b"12"]
TOKENS = [*(bytes((byte,)) for byte in range(256)), b"", *WORDS]


@pytest.fixture(scope="module")
def compiler():
    return Compiler(TOKENS, [END], len(TOKENS))


def make_schema_spec(value) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


def write(grammar: Grammar, begin: str, repeated: list[bytes], max_tokens: int) -> bytes:
    """Write `begin`, then repeat `repeated` while the grammar allows it, then end the JSON text."""
    matcher, mask = grammar.start(), np.zeros((1, -(-len(TOKENS) // 32)), np.int32)
    written: list[int] = []

    def try_token(token: int) -> bool:
        matcher.fill_mask(mask, 0)
        if not np.unpackbits(mask[0].view(np.uint8), bitorder="little")[token]:
            return False
        assert matcher.accept(token)
        written.append(token)
        return True

    assert all(try_token(byte) for byte in begin.encode())
    while len(written) < max_tokens and try_token(TOKENS.index(repeated[(len(written) - len(begin)) % len(repeated)])):
        pass
    for token in b'"]}':
        try_token(token)
    return b"".join(TOKENS[token] for token in written)


@pytest.mark.parametrize(
    "repeated", [[b"a"], [b"-", b"2", b"0"], [b'\\"'], [*b"It is so. "], [bytes((i,)) for i in range(40, 80)]], ids=str
)
def test_a_string_that_repeats_itself_is_closed(compiler, repeated):
    repeated = [bytes((each,)) if isinstance(each, int) else each for each in repeated]
    grammar = compiler.compile(make_schema_spec({"type": "object", "additionalProperties": {"type": "string"}}))
    text = write(grammar, '{"a":"', repeated, 1000)
    json.loads(text)
    assert MIN_REPEATED_TOKENS <= len(text) <= 4 * MIN_REPEATED_TOKENS


def test_any_string_is_closed_at_the_maximum_number_of_tokens(compiler):
    repeated = [bytes((97 + index * index % 101 % 26,)) for index in range(997)]
    text = write(compiler.compile(make_schema_spec({"type": "string"})), '"', repeated, 2 * MAX_STRING_TOKENS)
    assert MAX_STRING_TOKENS - 2 <= len(text) <= MAX_STRING_TOKENS + 2
    json.loads(text)


def test_a_string_has_the_length_that_its_schema_asks_for(compiler):
    grammar = compiler.compile(make_schema_spec({"type": "string", "minLength": 300, "maxLength": 500}))
    assert len(write(grammar, '"', [b"a"], 1000)) == 302


@pytest.mark.parametrize(
    ("kind", "begin", "max_length"),
    [
        ("integer", "7", MAX_INTEGER_LENGTH),
        ("integer", "-7", MAX_INTEGER_LENGTH),
        ("number", "7", MAX_INTEGER_LENGTH),
        ("number", "-0.7", MAX_NUMBER_LENGTH),
        ("number", "7.5e-7", len("7.5e-77")),
    ],
)
@pytest.mark.parametrize("container", ["[]", "{}"])
def test_a_number_ends_at_the_maximum_length(compiler, kind, begin, max_length, container):
    inner = {"type": kind}
    object_of_one = {"properties": {"a": inner}, "required": ["a"], "type": "object", "additionalProperties": False}
    grammar = compiler.compile(
        make_schema_spec({"type": "array", "items": inner} if container == "[]" else object_of_one)
    )
    before = "[" if container == "[]" else '{"a":'
    text = write(grammar, before + begin, [b"7"], 200)
    assert max_length - 1 <= len(text) - len(before) - 1 <= max_length
    json.loads(text)


def test_a_number_between_bounds_has_all_its_digits(compiler):
    maximum = 2**63 - 1
    grammar = compiler.compile(make_schema_spec({"type": "array", "items": {"type": "integer", "maximum": maximum}}))
    json.loads(write(grammar, f"[{maximum}", [b"0"], 60))


@pytest.mark.parametrize(
    ("items", "begin", "repeated"),
    [
        ({"type": "integer"}, "[", [b"0, "]),
        ({"type": "array", "items": {"type": "number"}}, "[[0, 0", [b"]", b",", b"[", b"0", b",", b"0"]),
        ({"type": "string"}, '["ab', [b'", "', b"a", b"b"]),
        ({}, "[", [b"0, "]),
    ],
    ids=["numbers", "rows", "strings", "anything"],
)
def test_an_array_may_repeat_its_items(compiler, items, begin, repeated):
    grammar = compiler.compile(make_schema_spec({"type": "array", "items": items}))
    assert write(grammar, begin, repeated, 700).count(repeated[0]) >= 90


@pytest.mark.parametrize(
    "form", [{}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], ids=["free", "optional", "required"]
)
def test_nesting_ends_unless_the_schema_requires_more(compiler, form):
    value = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "additionalProperties": False}
    required = {"type": "object", "properties": {"b": {"enum": [0]}}, "required": ["b"], "additionalProperties": False}
    for _ in range(40):
        required = {"type": "object", "properties": {"b": required}, "required": ["b"], "additionalProperties": False}
    defs = {"a": {"anyOf": [value, {"type": "null"}]}, "b": required}
    grammar = compiler.compile(make_schema_spec({**form, "$defs": defs}))
    name = "b" if form.get("$ref", "").endswith("b") else "a"
    text = write(grammar, "", [b"{", b'"', name.encode(), b'"', b":"], 600)
    assert text.count(b"{") == (41 if name == "b" else MAX_DEPTH)


def test_free_text_and_custom_grammars_are_not_terminated(compiler):
    tagged = {
        "type": "sequence",
        "elements": [{"type": "any_text", "excludes": ["#"]}, {"type": "const_string", "value": "#"}],
    }
    tag = json.dumps({"type": "structural_tag", "format": tagged})
    for spec in (
        GrammarSpec("structural_tag", tag),
        GrammarSpec("regex", '"[a-z0-9]*"'),
        GrammarSpec("ebnf", 'root ::= "\\"" [a-z]* "\\""'),
    ):
        assert len(write(compiler.compile(spec), '"', [b"a"], 800)) >= 800


def test_a_resumed_row_has_the_same_masks(compiler):
    grammar = compiler.compile(make_schema_spec({"type": "string"}))
    masks = np.zeros((2, -(-len(TOKENS) // 32)), np.int32)
    tokens = [*b'"' + b"ab" * 60]
    first, second = grammar.start(), grammar.start()
    for token in tokens:
        first.fill_mask(masks, 0)
        assert first.accept(token) == second.accept(token)
    first.fill_mask(masks, 0)
    second.fill_mask(masks, 1)
    assert (masks[0] == masks[1]).all()
    assert np.unpackbits(masks[0].view(np.uint8)).sum() == 1


def test_a_string_that_may_not_end_yet_stops_repeating_itself(compiler):
    grammar = compiler.compile(make_schema_spec({"type": "string", "pattern": "^[^=]+=x$"}))
    text = write(grammar, '"', [b"a"], 1000)
    assert text.count(b"a") == MAX_STUCK_TOKENS


def test_fork_of_a_terminator_and_its_origin_are_independent():
    rng, classes = random.Random(2), JsonTokenClasses(TOKENS, -(-len(TOKENS) // 32))
    choices = [*b'"\\[]{}0123a', *range(END + 1, len(TOKENS))]
    terminator, expected = JsonTerminator(classes), JsonTerminator(classes)
    for _ in range(300):
        fork, tokens = terminator.fork(), rng.choices(choices, k=rng.randrange(6))
        for token in tokens:
            fork.accept(token)
        assert vars(terminator) == vars(expected)
        for token in tokens[: rng.randrange(4)]:
            terminator.accept(token)
            expected.accept(token)
        for token in tokens[::-1]:
            fork.accept(token)
        assert vars(terminator) == vars(expected)
