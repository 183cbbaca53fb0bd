import itertools
import json
import random
import re

import jsonschema
import pytest
import xgrammar

from nanovllm_core.grammar.bounded_strings import parse_bounded_pattern
from nanovllm_core.grammar.schemas import regex, search
from nanovllm_core.grammar.schemas.characters import UNESCAPED_IN_JSON
from nanovllm_core.grammar.schemas.document import SchemaError
from nanovllm_core.grammar.schemas.formats import FORMATS
from nanovllm_core.grammar.schemas.pattern_writer import (
    MAX_COUNTED_REPETITIONS,
    write_json_string_pattern,
    write_pattern,
)
from nanovllm_core.grammar.schemas.shapes import StringShape
from nanovllm_core.grammar.schemas.string_patterns import exclude_strings, limit_length, string_tree

ALPHABET = "abc 1.^-${}/"
PATTERNS = [
    r"^a",
    r"b$",
    r"^a|b$",
    r"ab",
    r"(^a|b)c",
    r"^(a|b$)",
    r"^[^b]+$",
    r"a{2,}b?",
    r"^(a|bc){2,3}$",
    r"^(a|bc){2,}$",
    r"^(?:a|b)*c$",
    r"^$",
    r"^(|a)b$",
    r"a|b|",
    r"^a.c$",
    r"^[a\-c]$",
    r"^\S+$",
    r"^\w+\s\d$",
    r"^(ab?){2}$",
    r"^a(b|)c?$",
    r"^[\^b]+$",
    r"^\^$",
    r"^(?:a*b){1,2}$",
    r"^[\u00e9a]{2}$",
    r"^(a|b|c){0,2}$",
    r"(a)$|^(b)",
    r"^\$\{a\}$",
    r"^a/b\.c-$",
    r"^(?<x>a)b",
    r"^a{1,2}?b",
    r"(a*)*",
    r"^[\W]+$",
    r"^\D\d$",
    r"^(a?){3}b$",
    r"^a{,b$",
    r"^x{0}a$",
    r"^[a-c1]{120,130}$",
]


def parse_full_match(pattern: str) -> regex.Node:
    return regex.restrict_characters(regex.convert_to_full_match(regex.parse(pattern)), UNESCAPED_IN_JSON)


def make_grammar(tree: regex.Node) -> xgrammar.Grammar:
    return xgrammar.Grammar.from_json_schema(json.dumps({"type": "string", "pattern": write_pattern(tree)}))


def permits(grammar: xgrammar.Grammar, text: str) -> bool:
    return xgrammar.testing._is_grammar_accept_string(grammar, json.dumps(text, ensure_ascii=False))


def accepts_bytes(grammar: xgrammar.Grammar, text: bytes) -> bool:
    vocabulary = xgrammar.TokenizerInfo([bytes((byte,)) for byte in range(256)], stop_token_ids=[])
    matcher = xgrammar.GrammarMatcher(
        xgrammar.GrammarCompiler(vocabulary).compile_grammar(grammar), terminate_without_stop_token=True
    )
    return matcher.accept_string(text) and matcher.is_terminated()


def texts(max_length: int):
    for length in range(max_length + 1):
        for characters in itertools.product(ALPHABET, repeat=length):
            yield "".join(characters)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_grammars_of_patterns_accept_what_re_finds(pattern):
    grammar = make_grammar(parse_full_match(pattern))
    python = re.compile(pattern.replace("(?<x>", "(?P<x>"))
    for text in [*texts(2), "abc", "aab", "bca", "bcbca", "a" * 120, "a" * 131, "${a}", "a/b.c-", "1 a"]:
        assert permits(grammar, text) == bool(python.search(text)), text


def is_found(tree: regex.Node, text: str) -> bool:
    return search.is_found(tree, text, lambda num_steps: None)


@pytest.mark.parametrize("pattern", [*PATTERNS, "^(?!a)b", "(?=.*1)a", "(?!^$)"])
def test_search_finds_what_re_finds(pattern):
    python = re.compile(pattern.replace("(?<x>", "(?P<x>"))
    for text in texts(2):
        for is_permissive in (False, True):
            assert is_found(regex.parse(pattern, is_permissive=is_permissive), text) == bool(python.search(text)), text


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "a)",
        "[",
        "[]",
        "[^]",
        "*a",
        "a**",
        "a{3,1}",
        r"\1",
        r"\k<a>",
        r"\b",
        "(?<=a)b",
        "(?i)a",
        r"\p{L}",
        "a\\",
        "[b-a]",
    ],
)
def test_unsupported_patterns_are_refused(pattern):
    with pytest.raises(regex.RegexError):
        regex.parse(pattern)


def test_braces_without_counts_or_with_too_large_counts_are_literal():
    assert is_found(regex.parse("^a{x}$"), "a{x}")
    assert is_found(regex.parse("^a{1,9999999}$"), "a{1,9999999}")


@pytest.mark.parametrize(
    "pattern", ["a^b", "a$b", "a^", "$a", "a(b$|c^)", "(^a)*", "a(?!b)c", "(?=^a)b", "^(?!.*a$)", "(?!.*a$).+"]
)
def test_assertions_in_the_middle_are_refused(pattern):
    with pytest.raises(regex.RegexError):
        parse_full_match(pattern)


def test_only_surrogates_of_a_pair_are_joined():
    assert permits(
        xgrammar.Grammar.from_json_schema(
            json.dumps({"pattern": write_pattern(parse_full_match(r"^\ud83d\ude00$")), "type": "string"})
        ),
        "😀",
    )
    assert parse_full_match(r"^\ud800\u0041$") == regex.NO_STRING


def test_classes_match_what_all_engines_agree_on():
    for pattern, text in ((r"^\w$", "é"), (r"^\d$", "٣"), (r"^\S$", "\x85"), (r"^.$", "\u2028"), (r"^[^\w]$", "é")):
        assert not is_found(regex.parse(pattern), text)
    assert is_found(regex.parse(r"^\S$"), "é")
    assert is_found(regex.parse(r"^\w$", is_permissive=True), "é")


def test_excluded_strings_are_not_permitted():
    rng = random.Random(3)
    for _ in range(20):
        excluded = {"".join(rng.choices("abc", k=rng.randrange(0, 4))) for _ in range(rng.randrange(1, 6))}
        grammar = make_grammar(exclude_strings(excluded, 16))
        for text in texts(2):
            assert permits(grammar, text) == (text not in excluded)
        # A limit of 1 may also exclude other strings with the first letter of an excluded string.
        grammar = make_grammar(exclude_strings(excluded, 1))
        for text in texts(2):
            if text in excluded or text[:1] not in {other[:1] for other in excluded}:
                assert permits(grammar, text) == (text not in excluded)
    long = ["x" * 500, "y" * 500 + "z"]
    grammar = make_grammar(exclude_strings(long))
    assert permits(grammar, "x")
    assert not any(permits(grammar, text) for text in long)


def test_length_limits_of_patterns_are_exact():
    for pattern, low, high in (("^a*$", 2, 4), ("^[ab]+c$", 2, 3), ("^(a|bb)$", 2, 2), ("^ab?$", 0, 5), ("a", 3, 4)):
        tree = limit_length(parse_full_match(pattern), low, high)
        if tree is None:
            assert pattern == "a"
            continue
        grammar = make_grammar(tree)
        for text in texts(2):
            assert permits(grammar, text) == (bool(re.search(pattern, text)) and low <= len(text) <= high)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 3), (2, 3), (3, 3), (0, 128), (120, 128), (0, 129), (3, None), (128, None), (129, None)]
)
def test_length_limits_of_strings_are_exact(low, high):
    tree = limit_length(regex.restrict_characters(regex.ANY_STRING, UNESCAPED_IN_JSON), low, high)
    grammar = make_grammar(tree)
    if max(low, high or 0) <= MAX_COUNTED_REPETITIONS:
        written = write_pattern(tree)
        reparsed = regex.restrict_characters(
            regex.parse(written.removeprefix("^").removesuffix("$")), UNESCAPED_IN_JSON
        )
        assert write_pattern(reparsed) == written
    max_length = low + 10 if high is None else high
    for character in "a ~\x7f\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff":
        for length in {0, 1, low - 1, low, max_length - 1, max_length, max_length + 1} - {-1}:
            assert permits(grammar, character * length) == (low <= length <= (high or length))
    assert permits(grammar, ("aé€😀" * max_length)[:max_length])
    assert permits(grammar, ("aé€😀" * max_length)[: max_length + 1]) == (high is None)
    for wrong in (
        b"\x80",
        b"\xc1\xbf",
        b"\xe0\x9f\xbf",
        b"\xed\xa0\x80",
        b"\xf0\x8f\xbf\xbf",
        b"\xf4\x90\x80\x80",
        b"\n",
    ):
        assert not accepts_bytes(grammar, b'"' + b"a" * low + wrong + b'"')
    assert accepts_bytes(grammar, b'"' + b"a" * low + b'"')


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 40), (32, 500), (1, 100_000), (300, 400), (2, None)])
def test_length_limits_of_string_values_become_bounded_patterns(low, high):
    tree = limit_length(regex.restrict_characters(regex.ANY_STRING, UNESCAPED_IN_JSON), low, high)
    written = write_json_string_pattern(tree)
    bounded = parse_bounded_pattern(written)
    assert (bounded.low, bounded.high) == (low, high)
    reparsed = regex.restrict_characters(regex.parse(written.removeprefix("^").removesuffix("$")), UNESCAPED_IN_JSON)
    assert write_json_string_pattern(reparsed) == written


@pytest.mark.parametrize(("pattern", "low", "high"), [("^[a-z]*$", 33, 100), ("^a[a-z]*$", 0, 500), ("^a*$", 3, None)])
def test_other_length_limits_do_not_become_bounded_patterns(pattern, low, high):
    tree = limit_length(parse_full_match(pattern), low, high)
    assert parse_bounded_pattern(write_json_string_pattern(tree)) is None
    assert write_json_string_pattern(tree) == write_pattern(tree)


@pytest.mark.parametrize("name", FORMATS)
def test_strings_of_a_format_pattern_conform_to_the_format(name):
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    tree = parse_full_match(FORMATS[name])
    rng = random.Random(name)
    for _ in range(200):
        text = sample(tree, rng)
        assert re.search(FORMATS[name], text)
        assert checker.conforms(text, name), text


@pytest.mark.parametrize(
    ("name", "high"), [("uri", 2083), ("uri", 40), ("email", 254), ("email", 30), ("hostname", 253), ("duration", 9)]
)
def test_strings_of_a_shortened_format_conform_to_the_format_and_the_length(name, high):
    tree = string_tree(StringShape(low=1, high=high, format=name), "schema", lambda _: None)
    rng = random.Random(name)
    for _ in range(100):
        text = sample(tree, rng)
        assert len(text) <= high
        assert re.search(FORMATS[name], text)


@pytest.mark.parametrize(("name", "low", "high"), [("uri", 10, None), ("date-time", 0, 20)])
def test_length_that_a_format_cannot_keep_is_refused(name, low, high):
    with pytest.raises(SchemaError, match="can't be enforced together with this format"):
        string_tree(StringShape(low=low, high=high, format=name), "schema", lambda _: None)


def sample(node: regex.Node, rng: random.Random) -> str:
    match node:
        case regex.CharacterSet(ranges):
            low, high = rng.choice(ranges)
            return chr(rng.randint(low, high))
        case regex.Concatenation(parts):
            return "".join(sample(part, rng) for part in parts)
        case regex.Alternation(options):
            return sample(rng.choice(options), rng)
        case regex.Repeat(part, low, high):
            max_repetitions = low + 3 if high is None else min(high, low + 3)
            return "".join(sample(part, rng) for _ in range(rng.randint(low, max_repetitions)))
        case _:
            raise AssertionError(node)
