import json
import random

import numpy as np
import pytest
import toy_model
from grammars import CHECKS, JSON, TAG, TAGGED, text_of, toy_compiler

from nanovllm_core import GrammarError, GrammarSpec
from nanovllm_core.grammar.compiler import MAX_WHITESPACE, Grammar, prepare_source

NUM_MASK_WORDS = -(-toy_model.VOCAB // 32)


@pytest.fixture(scope="module")
def compiler():
    return toy_compiler()


def allowed(grammar_mask: np.ndarray) -> list[int]:
    bits = np.unpackbits(grammar_mask.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def walk(grammar: Grammar, rng: random.Random, max_tokens: int) -> tuple[list[int], bool]:
    """Choose random allowed tokens. Returns the tokens, and whether the end token was chosen."""
    matcher, mask, tokens = grammar.start(), np.zeros((1, NUM_MASK_WORDS), np.int32), []
    while len(tokens) < max_tokens:
        matcher.fill_mask(mask, 0)
        choices = allowed(mask[0])
        assert choices
        assert max(choices) < toy_model.VOCAB
        token = toy_model.EOS if toy_model.EOS in choices and rng.random() < 0.5 else rng.choice(choices)
        assert matcher.accept(token)
        if token == toy_model.EOS:
            assert matcher.inner.is_terminated()
            assert token in matcher.end_ids
            return tokens, True
        tokens.append(token)
        assert not matcher.inner.is_terminated()
    return tokens, False


@pytest.mark.parametrize("spec", CHECKS, ids=lambda spec: spec.kind)
def test_allowed_outputs_match_their_grammar(compiler, spec):
    grammar, rng, num_ended = compiler.compile(spec), random.Random(1), 0
    for _ in range(60):
        tokens, has_ended = walk(grammar, rng, 150)
        num_ended += has_ended
        assert not has_ended or CHECKS[spec](text_of(tokens)), text_of(tokens)
    assert num_ended


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = grammar.start()
    return matcher.inner.accept_string(text) and matcher.inner.is_completed()


def test_usual_json_formatting_is_allowed_and_whitespace_is_bounded(compiler):
    grammar = compiler.compile(JSON)
    assert accepts(grammar, '{"a": 1, "b": "x"}')
    assert accepts(grammar, '{"a":1,"b":"x"}')
    assert accepts(grammar, json.dumps({"a": 1, "b": "x", "c": [True, False]}, indent=0))
    assert accepts(grammar, '{"a":' + " " * MAX_WHITESPACE + '1,"b":"x"}')
    assert not accepts(grammar, '{"a":' + " " * (MAX_WHITESPACE + 1) + '1,"b":"x"}')
    for padded_text in ('{"a":1,"b":"x"}\n', ' {"a":1,"b":"x"}'):
        assert not accepts(grammar, padded_text)
    tagged = compiler.compile(TAG)
    assert accepts(tagged, 'hm {"a": 1}</think>{"a": 1, "b": "x"}')
    assert not accepts(tagged, '</think>{"a": ' + " " * MAX_WHITESPACE + '1, "b": "x"}')


def test_whitespace_is_bounded_wherever_a_structural_tag_has_json():
    inner = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"type": {"const": "json_schema"}}}}
    own = {**inner, "max_whitespace_cnt": 2}
    tag = {"type": "tag", "begin": "a", "content": inner, "end": "b"}
    form = {
        "type": "or",
        "elements": [
            {"type": "triggered_tags", "triggers": ["a"], "tags": [tag]},
            {"type": "dispatch", "rules": [["a", {"type": "star", "content": inner}]]},
            own,
        ],
    }
    bounded = json.loads(prepare_source(GrammarSpec("structural_tag", json.dumps({"format": form})))[0])["format"]
    changed = {**inner, "max_whitespace_cnt": MAX_WHITESPACE}
    assert bounded["elements"][0]["tags"][0]["content"] == changed
    assert bounded["elements"][1]["rules"][0][1]["content"] == changed
    assert bounded["elements"][2] == own
    assert json.dumps(TAGGED) == TAG.source


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", "{", "this JSON schema can't be compiled: Expecting property name"),
        ("json_schema", "false", "this JSON schema can't be compiled: .*cannot accept any value"),
        ("json_schema", '{"type": "nonsense"}', "this JSON schema can't be compiled"),
        ("json_schema", '{"type":"array","items":' * 9000 + "{}" + "}" * 9000, "this JSON schema can't be compiled"),
        ("regex", "((", "this regular expression can't be compiled: .* parenthesis is not closed"),
        ("regex", "(" * 9000 + "a" + ")" * 9000, "this regular expression can't be compiled"),
        ("regex", "€", "this regular expression can't be met: no token"),
        ("ebnf", "rot ::= [a]", 'this EBNF grammar can\'t be compiled: .*"root" is not found'),
        ("structural_tag", "[]", "this structural tag can't be compiled: a structural tag must be a JSON object"),
        ("structural_tag", '{"type": "structural_tag"}', "this structural tag can't be compiled"),
        (
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "x"}}',
            "this structural tag can't be compiled: Invalid structural tag error: Format type not recognized: x$",
        ),
    ],
)
def test_grammar_that_cannot_be_compiled_has_a_one_line_error(compiler, kind, source, message):
    with pytest.raises(GrammarError, match=f"^{message}") as caught:
        compiler.compile(GrammarSpec(kind, source))
    assert "\n" not in str(caught.value)
    assert "cpp" not in str(caught.value)
    assert len(str(caught.value)) < 700
