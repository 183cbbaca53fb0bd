"""Tests that answers under a regular expression match the whole expression, as `re.fullmatch` defines it."""

import itertools
import json
import re

import pytest

from nanovllm_core import GrammarError, GrammarSpec
from nanovllm_core.grammar.compiler import Compiler, Grammar
from nanovllm_core.grammar.schema_enforcement import convert_grammar

END = 256
COMPILER = Compiler([*(bytes([byte]) for byte in range(256)), b""], [END], 257)
TEXTS = [
    *("".join(parts) for length in range(5) for parts in itertools.product("abc1", repeat=length)),
    *("".join(parts) for length in range(4) for parts in itertools.product("a\n\r\t .\0é😀\u2028", repeat=length)),
    *("A123Z", "123", "yesz", "yes", "hhh", "Rx", "QaE", "Answer: a\nb", "Answer: a", "a$b", "a-b", "a" * 200, "{a}"),
]


def compile_regex(pattern: str) -> Grammar:
    return COMPILER.compile(convert_grammar(GrammarSpec("regex", pattern)).spec)


def permits(grammar: Grammar, data: bytes) -> bool:
    matcher = grammar.start()
    return all(matcher.accept(byte) for byte in data) and matcher.accept(END)


# These patterns mean the same in Python and in the grammar, for all texts of TEXTS.
@pytest.mark.parametrize(
    "pattern",
    [
        "(a|b)c", "(?:ab)+", "(?P<x>a)b", "a|b|[ab]|b{1,2}", "(?:a|ab)(?:c|bcd)", "(|a)b", "()a", "^$", "^abc$",
        "^(a|b)$|^c$", "^a|b$", "a{2,3}?b*?", "a+?", "a{0}b", "a{200}", "[^a]", "[^a]{2}", "[a-c\\-]+", r"\d+|[^\s]",
        r"\S+", r"[\s\S]", r"[^\n]+", "é+", "[é-ü😀]{1,2}", r"\x61\u0062", r"\{a\}", r"\0", r"a\.", "a||b",
    ],
)  # fmt: skip
def test_answers_are_the_texts_that_the_whole_expression_matches(pattern):
    grammar = compile_regex(pattern)
    # Regex engines disagree about spaces beyond ASCII, so the grammar permits fewer texts.
    texts = [text for text in TEXTS if "\u2028" not in text]
    assert [text for text in texts if permits(grammar, text.encode())] == [
        text for text in texts if re.fullmatch(pattern, text)
    ]
    assert all(re.fullmatch(pattern, text) for text in TEXTS if permits(grammar, text.encode()))


@pytest.mark.parametrize("pattern", [".*", r"[\w.]+", "Answer: .*", ".{3}", "[^é]*", r"\D+", r"\W"])
def test_no_answer_breaks_a_line_or_the_encoding_where_an_engine_disagrees(pattern):
    grammar = compile_regex(pattern)
    permitted = [text for text in TEXTS if permits(grammar, text.encode())]
    assert permitted
    assert all(re.fullmatch(pattern, text) for text in permitted)
    for data in (b"\xc0\x80", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80"):
        assert not permits(grammar, data * 3)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\A\d{3}\Z", r"yes\z", r"\h+", r"[\h]", r"\Rx", r"\e", r"\Qa\E", "a$b", "a^b", r"a\b", "(?=a)a", "(?!a)b",
        r"(a)\1", r"\p{L}", "(?i)a", "((", "[a", "a**", "[^\\s\\S]",
    ],
)  # fmt: skip
def test_expression_that_cannot_be_enforced_is_refused(pattern):
    with pytest.raises(GrammarError, match="^this regular expression can't be enforced: .*; use only characters"):
        compile_regex(pattern)
    inner = {"type": "sequence", "elements": [{"type": "regex", "pattern": pattern}]}
    source = json.dumps({"type": "structural_tag", "format": inner})
    with pytest.raises(GrammarError, match="^the regular expression at #/format/elements/0/pattern can't be enforced"):
        convert_grammar(GrammarSpec("structural_tag", source))


def test_expression_within_a_structural_tag_is_enforced():
    form = {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "^.*$"}, "end": ">"}
    source = json.dumps({"type": "structural_tag", "format": form})
    grammar = COMPILER.compile(convert_grammar(GrammarSpec("structural_tag", source)).spec)
    assert permits(grammar, b"<ab>")
    assert not permits(grammar, b"<a\nb>")
    assert not permits(grammar, b"<a>b")


def test_longest_expression_of_a_request_is_accepted():
    pattern = "|".join(f"word{index:05}" for index in range(1630))
    assert 16_000 < len(pattern) <= 16_384
    assert permits(compile_regex(pattern), b"word01629")
