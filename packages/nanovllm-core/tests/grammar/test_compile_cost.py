import json
import random
import string
from itertools import pairwise

import numpy as np
import pytest
import toy_model
import xgrammar
from grammars import toy_compiler

from nanovllm_core import GrammarError, GrammarSpec
from nanovllm_core.grammar.compile_cost import MAX_COMPILE_STEPS, CompileCost, estimate_compile_cost
from nanovllm_core.grammar.compiler import Compiler, write_rules
from nanovllm_core.grammar.schema_enforcement import convert_grammar
from nanovllm_core.grammar.schemas import shape_resolver
from nanovllm_core.grammar.schemas.shape_resolver import MAX_STEPS, ShapeResolver
from nanovllm_core.grammar.value_lookaheads import shorten_value_lookaheads

INTEGER = {"type": "integer"}


def object_schema(properties: dict, **keywords) -> dict:
    return {"type": "object", "properties": properties, "additionalProperties": False, **keywords}


def words(number: int, length: int = 8) -> list[str]:
    rng = random.Random(number)
    return ["".join(rng.choices(string.ascii_lowercase, k=length)) for _ in range(number)]


def nested_schema(depth: int, name: str) -> dict:
    leaf = {"type": "string"}
    properties = {f"{name}a{depth}": nested_schema(depth - 1, name), f"{name}b{depth}": leaf} if depth else {}
    return object_schema(properties) if depth else leaf


def bounded_strings_schema(number: int, low: int, step: int = 1) -> dict:
    return object_schema(
        {
            name: {"type": "string", "minLength": low + step * index, "maxLength": 100 + 2 * step * index}
            for index, name in enumerate(words(number))
        }
    )


def rules_of(schema: dict) -> str:
    rules = write_rules(convert_grammar(GrammarSpec("json_schema", json.dumps(schema))).spec)
    assert rules is not None
    return rules


def cost_of(schema: dict) -> CompileCost:
    return estimate_compile_cost(rules_of(schema))


ACCEPTED = {
    "800 fields": object_schema(
        {f"object{i}": object_schema({f"field{j}": {"type": "string"} for j in range(20)}) for i in range(40)}
    ),
    "700 optional fields": object_schema(dict.fromkeys(words(700), INTEGER)),
    "100 bounded strings": bounded_strings_schema(100, 0),
    "long minLength": object_schema({"text": {"type": "string", "minLength": 5_000, "maxLength": 90_000}}),
    "enum of 700 long values": {"enum": words(700, 100)},
    "100 alternatives": {"anyOf": [object_schema(dict.fromkeys(words(8 + i)[:8], INTEGER)) for i in range(100)]},
    "30 open objects": object_schema(
        {name: object_schema({"id": INTEGER, name: INTEGER}, additionalProperties=True) for name in words(30)}
    ),
}  # fmt: skip
REFUSED = {
    "nested objects": (
        object_schema({name: nested_schema(18, name) for name in words(60, 2)}), "rules: use fewer properties"
    ),
    "enum of 2,000 long values": ({"enum": words(2_000, 100)}, "when written out: use fewer or shorter ones"),
    "different narrow bounds": (
        object_schema({f"p{i}": {"type": "string", "minLength": i + 16, "maxLength": 2 * i + 16} for i in range(40)}),
        "for strings: .*use fewer different values of pattern, minLength and maxLength",
    ),
    "different patterns": (
        object_schema({f"p{i}": {"type": "string", "pattern": f"^[^{chr(97 + i)}]{{0,50}}$"} for i in range(20)}),
        "for strings: .*use fewer different values of pattern",
    ),
    "2,000 fields": (object_schema(dict.fromkeys(words(2_000), INTEGER)), "grammar rules: use fewer properties"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_large_schemas_of_users_are_within_the_limit(name):
    assert cost_of(ACCEPTED[name]).total <= MAX_COMPILE_STEPS


@pytest.mark.parametrize("name", REFUSED)
def test_expensive_schemas_are_refused_with_advice_before_they_are_compiled(name):
    schema, advice = REFUSED[name]
    with pytest.raises(
        GrammarError, match=r"^this JSON schema can't be compiled: it takes about \d+ steps, .*" + advice
    ):
        rules_of(schema)


@pytest.mark.parametrize(
    ("make", "sizes", "factor"),
    [
        (lambda n: object_schema(dict.fromkeys(words(n), INTEGER)), (100, 200, 400), 3),
        (lambda n: object_schema(dict.fromkeys(words(n), INTEGER), required=words(n)), (100, 200, 400), 2.5),
        (
            lambda n: object_schema({name: {"enum": [name, 1]} for name in words(n)}, required=words(n)[:1]),
            (100, 200),
            3,
        ),
        (lambda n: {"enum": words(n, 50)}, (100, 200, 400), 2.1),
        (lambda n: bounded_strings_schema(n, 1), (20, 40, 80), 2),
        (lambda n: bounded_strings_schema(n, 20, 17), (20, 40, 80), 2),
    ],
    ids=["optional", "required", "enums", "enum values", "bounded", "long bounds"],
)
def test_cost_does_not_explode_with_size(make, sizes, factor):
    costs = [cost_of(make(size)).total for size in sizes]
    assert all(larger <= factor * smaller for smaller, larger in pairwise(costs)), costs


def test_equal_strings_cost_as_much_as_one():
    pattern = {"type": "string", "pattern": "^[^a]x[^b]{3,9}$"}
    costs = [cost_of(object_schema(dict.fromkeys(words(number), pattern))).string_steps for number in (1, 50)]
    assert costs[0] >= 6_500
    assert costs[1] <= 1.1 * costs[0]


@pytest.fixture
def steps(monkeypatch):
    counted: list[int] = []
    count_steps = ShapeResolver.count_steps

    def record(self, num_steps=1):
        counted.append(num_steps)
        count_steps(self, num_steps)

    monkeypatch.setattr(shape_resolver.ShapeResolver, "count_steps", record)
    return counted


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (lambda n: {"oneOf": [{"const": i} for i in range(n)]}, 2.1),
        (lambda n: {"oneOf": [{"type": "string", "const": name} for name in words(n)]}, 2.1),
        (lambda n: object_schema(dict.fromkeys(words(n), INTEGER), additionalProperties=INTEGER), 2.1),
    ],
    ids=["constants", "strings", "properties"],
)
def test_steps_of_the_conversion_grow_with_the_size(steps, make, factor):
    sums = []
    for number in (100, 200, 400):
        steps.clear()
        convert_grammar(GrammarSpec("json_schema", json.dumps(make(number))))
        sums.append(sum(steps))
    assert all(larger <= factor * smaller for smaller, larger in pairwise(sums)), sums


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string", "pattern": f"^a{i}"} for i in range(200)]},
        {"oneOf": [object_schema({f"p{i}": INTEGER}, required=[f"p{i}"], additionalProperties={}) for i in range(200)]},
        {"const": "a" * 5000, "pattern": "(?=a*b)" * 500},
        {"const": "a" * 2000, "pattern": "^" + "(a?b?c?)" * 2000 + "$"},
    ],
    ids=["patterns", "objects", "lookaheads", "long pattern"],
)  # fmt: skip
def test_conversion_of_hostile_schemas_ends_at_the_limit(steps, schema):
    with pytest.raises(GrammarError):
        convert_grammar(GrammarSpec("json_schema", json.dumps(schema)))
    # The last call may count up to 2,000 steps.
    assert sum(steps) <= MAX_STEPS + 2_000


ENUM = {"enum": ["yes", "no", 1]}
ENUM_PROPERTIES_SCHEMA = object_schema(
    {"first": ENUM, "second": ENUM, "third": {"type": "array", "items": ENUM}, "last": {"type": "boolean"}},
    required=["first"],
)
TEXTS = ('{"first": "yes"}', '{"first":1,"last":true}', '{ "first" : "no" ,\n"second":"yes","third":[1, "no" ] }')


def masks_along(grammar, text: str) -> list[bytes]:
    matcher = xgrammar.GrammarMatcher(grammar)
    masks = []
    for byte in text.encode():
        mask = np.zeros((1, -(-257 // 32)), np.int32)
        matcher.fill_next_token_bitmask(mask, 0)
        masks.append(mask.tobytes())
        assert matcher.accept_token(byte)
    return masks


def test_shortened_value_lookaheads_allow_the_same_tokens():
    token_texts = [bytes([byte]) for byte in range(256)]
    for index, word in enumerate((b'",', b'"}', b'" ', b'","', b'1,"', b"1}", b"1]", b'1, "', b'"]', b's"', b'es","s')):
        token_texts[128 + index] = word
    info = xgrammar.TokenizerInfo([*token_texts, b""], xgrammar.VocabType.RAW, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    before = str(xgrammar.Grammar.from_json_schema(json.dumps(ENUM_PROPERTIES_SCHEMA), max_whitespace_cnt=1))
    after = shorten_value_lookaheads(before)
    assert after.count("(=([ \\n\\r\\t,}]))") >= 2
    for text in TEXTS:
        assert masks_along(compiler.compile_grammar(before), text) == masks_along(compiler.compile_grammar(after), text)


def test_rules_from_the_cache_allow_the_same_tokens():
    text = {"type": "string", "minLength": 2, "maxLength": 60}
    schemas = [
        ENUM_PROPERTIES_SCHEMA,
        object_schema({"a": text, "b": {**text, "maxLength": 500}}, required=["b"]),
        object_schema({"first": ENUM, "b": text}, additionalProperties=INTEGER),
        object_schema({"b": object_schema({"first": text}, additionalProperties=True)}, additionalProperties=True),
        {"anyOf": [ENUM_PROPERTIES_SCHEMA, {"type": "array", "items": text}]},
    ]
    shared, rng = toy_compiler(), random.Random(1)
    for schema in schemas * 2:
        spec = convert_grammar(GrammarSpec("json_schema", json.dumps(schema))).spec
        alone = Compiler(toy_model.toy_vocabulary().tokens, toy_model.toy_vocabulary().end_ids, toy_model.VOCAB)
        plain = alone._xgrammar_compiler.compile_grammar(rules_of(schema))
        matchers = [shared.compile(spec).start().inner, xgrammar.GrammarMatcher(plain)]
        for _ in range(60):
            masks = [np.zeros((1, -(-toy_model.VOCAB // 32)), np.int32) for _ in matchers]
            for matcher, mask in zip(matchers, masks, strict=True):
                matcher.fill_next_token_bitmask(mask, 0)
            assert (masks[0] == masks[1]).all()
            bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")[: toy_model.VOCAB]
            token = int(rng.choice(np.flatnonzero(bits)))
            if token == toy_model.EOS:
                break
            assert [matcher.accept_token(token) for matcher in matchers] == [True, True]
