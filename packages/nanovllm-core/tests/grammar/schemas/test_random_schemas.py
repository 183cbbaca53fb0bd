"""A grammar permits no invalid value, and permits most valid values."""

import itertools
import json
import random

import jsonschema
import xgrammar

from nanovllm_core import GrammarSpec
from nanovllm_core.grammar.compiler import write_json_rules
from nanovllm_core.grammar.schemas.conversion import convert_schema
from nanovllm_core.grammar.schemas.document import SchemaError

END = 256
VOCABULARY = [bytes([byte]) for byte in range(256)] + [b"<end>"]
TEXTS = ["".join(letters) for count in range(4) for letters in itertools.product("ab", repeat=count)][:12]
SCALARS = [None, True, False, 0, 1, 2, 5, 10, 11, 12, 15, 21, 99, 100, 105, -1, -10, -12, 1.5, 0.5, -0.5, *TEXTS]
NUMBERS = [-12, -5.5, -5, 0, 1, 9, 10, 10.5, 11, 99, 100, 105]
PATTERNS = ["^a*b?$", "^(a|ab|b){1,2}$", "a", "^[ab]{2}$", "b$", "^a|b$"]
TYPES = ["integer", "null", "boolean", "string", "number", ["null", "integer"]]


def draw_scalar_schema(rng: random.Random):
    low, high = sorted(rng.choices(NUMBERS, k=2))
    integers = sorted(int(number) for number in (low, high))
    names = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
    return rng.choice(
        [
            {"enum": rng.sample(SCALARS, rng.randrange(1, 6))},
            {"type": "integer", names[0]: integers[0], names[1]: integers[1]},
            {"type": "number", names[0]: low, names[1]: high},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(2, 4)},
            {"type": rng.choice(TYPES)},
            {"const": rng.choice(SCALARS)},
        ]
    )


def draw_object_schema(rng: random.Random, depth: int):
    names = rng.sample(["a", "b", "ab", "title"], rng.randrange(4))
    schema = {"type": "object", "properties": {name: draw_schema(rng, depth - 1) for name in names}}
    keyword_makers = {
        "required": lambda: rng.sample(["a", "b", "ab"], rng.randrange(3)),
        "additionalProperties": lambda: rng.choice([False, draw_schema(rng, depth - 1)]),
        "patternProperties": lambda: {rng.choice(["^a", "b$", "^x"]): draw_schema(rng, depth - 1)},
        "propertyNames": lambda: rng.choice([{"maxLength": 1}, {"pattern": "^a"}, {"enum": ["a", "ab"]}]),
        "maxProperties": lambda: rng.randrange(3),
        "minProperties": lambda: rng.randrange(3),
        "dependentRequired": lambda: {"a": ["b"]},
        "unevaluatedProperties": lambda: rng.choice([False, {"type": "integer"}]),
        "oneOf": lambda: [{"required": ["a"]}, {"required": ["b"]}],
    }
    chances = dict(zip(keyword_makers, (0.6, 0.6, 0.2, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1), strict=True))
    return schema | {name: make() for name, make in keyword_makers.items() if rng.random() < chances[name]}


def draw_array_schema(rng: random.Random, depth: int):
    keyword_makers = {
        "prefixItems": lambda: [draw_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))],
        "items": lambda: draw_schema(rng, depth - 1) if rng.random() < 0.8 else False,
        "minItems": lambda: rng.randrange(3),
        "maxItems": lambda: rng.randrange(3),
        "contains": lambda: draw_scalar_schema(rng),
        "uniqueItems": lambda: True,
        "unevaluatedItems": lambda: False,
    }
    chances = dict(zip(keyword_makers, (0.5, 0.7, 0.3, 0.3, 0.2, 0.1, 0.1), strict=True))
    return {"type": "array"} | {name: make() for name, make in keyword_makers.items() if rng.random() < chances[name]}


def draw_schema(rng: random.Random, depth: int):
    if depth <= 0 or rng.random() < 0.2:
        return draw_scalar_schema(rng)
    subschemas = [draw_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    schema_makers = [
        lambda: draw_object_schema(rng, depth),
        lambda: draw_array_schema(rng, depth),
        lambda: {"anyOf": subschemas},
        lambda: {"oneOf": subschemas},
        lambda: {"allOf": subschemas[:2]},
        lambda: {"not": subschemas[0], **(draw_scalar_schema(rng) if rng.random() < 0.5 else {})},
        lambda: {"if": subschemas[0], "then": subschemas[-1], "else": draw_schema(rng, depth - 1)},
    ]
    schema = rng.choices(schema_makers, (5, 3, 2, 2, 2, 1, 1))[0]()
    return {**schema, "anyOf": subschemas} if rng.random() < 0.1 else schema


def draw_value(rng: random.Random, depth: int = 2):
    kind = rng.random()
    if not depth or kind < 0.5:
        return rng.choice(SCALARS)
    if kind < 0.75:
        names = rng.sample(["a", "b", "ab", "title", "x"], rng.randrange(4))
        return {name: draw_value(rng, depth - 1) for name in names}
    return [draw_value(rng, depth - 1) for _ in range(rng.randrange(3))]


def test_permitted_values_are_valid():
    rng = random.Random(11)
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[END]), max_threads=1)
    num_schemas = num_valid = num_permitted = 0
    while num_schemas < 1000:
        schema = draw_schema(rng, rng.choice([1, 2, 2, 3]))
        try:
            written = convert_schema(schema, "schema")
        except SchemaError:
            continue
        num_schemas += 1
        grammar = compiler.compile_grammar(write_json_rules(GrammarSpec("json_schema", json.dumps(written))))
        validator = jsonschema.Draft202012Validator(schema)
        for _ in range(30):
            value = draw_value(rng)
            matcher = xgrammar.GrammarMatcher(grammar)
            is_permitted = matcher.accept_string(json.dumps(value)) and matcher.accept_token(END)
            is_valid = validator.is_valid(value)
            assert is_valid or not is_permitted, (schema, value)
            num_permitted += is_permitted
            num_valid += is_valid
    # Grammars refuse some valid values, such as objects with undeclared properties.
    assert num_permitted > 0.85 * num_valid > 1000
