"""Places with the same next element share one whitespace rule."""

import json

import numpy as np
import pytest
import xgrammar

from nanovllm_core.grammar.whitespace_rules import WHITESPACE_BODY, merge_whitespace_rules

SCHEMA = {
    "type": "object",
    "properties": {
        'text | ("x': {"type": "string"},
        "é": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"enum": ["a", "b b", None]}]}},
        "inner": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}},
            "additionalProperties": {"type": "string", "pattern": "^x{0,5}$"},
        },
    },
    "required": ["inner"],
    "additionalProperties": False,
}
TEXTS = [
    '{"inner":{}}',
    '{ "inner" : { "yes" : true } }',
    '{"text | (\\"x": "a" ,"inner":{"yes":false,"z":"xx"}}',
    '{"é": [ 1 ,"b b", null ] ,\n"inner":{\t} }',
    '{"é":[],"inner":{"q": "x" }}',
]
WRONG_TEXTS = ['{"inner":{}  }', '{"inner" "', '{"é":[1,,', '{"inner":{"yes":"', "{ , ", '{"inner"  :']


def write_rules(schema: dict) -> str:
    return str(xgrammar.Grammar.from_json_schema(json.dumps(schema), max_whitespace_cnt=1))


def accepts(compiled: xgrammar.CompiledGrammar, text: str) -> bool:
    return xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True).accept_string(text)


def masks_along(compiled: xgrammar.CompiledGrammar, tokens: list[int], num_words: int) -> list[bytes]:
    matcher, masks = xgrammar.GrammarMatcher(compiled), []
    for token in tokens:
        mask = np.zeros((1, num_words), np.int32)
        matcher.fill_next_token_bitmask(mask, 0)
        masks.append(mask.tobytes())
        assert matcher.accept_token(token)
    return masks


@pytest.fixture(scope="module")
def compilers() -> tuple[xgrammar.GrammarCompiler, list[bytes]]:
    words = [bytes([byte]) for byte in range(256)]
    words += [b" " + word for word in (b'"', b":", b",", b"}", b"]", b'" :', b', "', b'"inner"', b"true", b"1,")]
    words += [b'":', b'": ', b'",', b'"}', b"}}", b" }}", b" ]", b'{"', b'{ "', b"[ ", b", ", b'":"', b'\n"inner']
    info = xgrammar.TokenizerInfo([*words, b""], xgrammar.VocabType.RAW, stop_token_ids=[len(words)])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False), words


@pytest.mark.parametrize("schema", [SCHEMA, {}, {"type": "array", "items": SCHEMA}], ids=["object", "any", "array"])
def test_merged_rules_allow_the_same_tokens(compilers, schema):
    compiler, words = compilers
    rules = write_rules(schema)
    merged_rules = merge_whitespace_rules(rules)
    assert merged_rules.count(WHITESPACE_BODY) < rules.count(WHITESPACE_BODY) / 2
    before, after = compiler.compile_grammar(rules), compiler.compile_grammar(merged_rules)
    for sample in TEXTS:
        answer = f"[{sample}, {sample}]" if schema.get("type") == "array" else sample
        longest_first = sorted(range(len(words)), key=lambda index: -len(words[index]))
        for order in (range(256), longest_first):
            tokens, rest = [], answer.encode()
            while rest:
                tokens.append(next(index for index in order if rest.startswith(words[index])))
                rest = rest[len(words[tokens[-1]]) :]
            num_words = -(-(len(words) + 1) // 32)
            assert masks_along(before, tokens, num_words) == masks_along(after, tokens, num_words)


def test_merged_rules_refuse_the_same_texts(compilers):
    compiler, _ = compilers
    before, after = (
        compiler.compile_grammar(rules) for rules in (write_rules(SCHEMA), merge_whitespace_rules(write_rules(SCHEMA)))
    )
    for text in WRONG_TEXTS:
        assert not accepts(before, text)
        assert not accepts(after, text)


@pytest.mark.parametrize(
    ("body", "shared"),
    [
        ('w "a"', '"a"'),
        (r'w "\""', r'"\""'),
        ("w b", '"1"'),
        ("w c", "c"),
        ("w d", "d"),
        (r'w "\n"', None),
        ("w b{0, -1}", None),
        ("w [a]", None),
        ("b w", None),
    ],
)
def test_shared_rule_looks_ahead_to_the_next_element(body, shared):
    other_rules = 'b ::= (("1" "x") | ("12"))\nc ::= (("1") | "")\nd ::= Regex("1")'
    rules = f"w ::= {WHITESPACE_BODY}\nroot ::= (({body}))\n{other_rules}"
    merged = merge_whitespace_rules(rules)
    expected = f"whitespace0 ::= {WHITESPACE_BODY} (=({shared}))" if shared else f"\nw ::= {WHITESPACE_BODY}"
    assert expected in merged
    assert f"(({body.replace('w', 'whitespace0') if shared else body}))" in merged
