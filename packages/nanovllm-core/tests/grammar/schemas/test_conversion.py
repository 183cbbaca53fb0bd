import json
import random

import jsonschema
import orjson
import pytest
import xgrammar

from nanovllm_core import GrammarSpec
from nanovllm_core.grammar.compile_cost import MAX_COMPILE_STEPS, estimate_compile_cost
from nanovllm_core.grammar.compiler import write_json_rules, write_rules
from nanovllm_core.grammar.schemas.conversion import convert_schema
from nanovllm_core.grammar.schemas.document import SchemaError
from nanovllm_core.grammar.schemas.shape_resolver import MAX_STEPS, ShapeResolver

END = 256
VOCABULARY = [bytes([byte]) for byte in range(256)] + [b"<end>"]
COMPILER = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[END]), max_threads=1)


def compile_schema(schema):
    return COMPILER.compile_grammar(
        write_json_rules(GrammarSpec("json_schema", json.dumps(convert_schema(schema, "schema"))))
    )


def permits(compiled, text: str | bytes) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled)
    data = text if isinstance(text, bytes) else text.encode()
    return all(matcher.accept_token(byte) for byte in data) and matcher.accept_token(END)


def objects(properties, *required, **more):
    return {"type": "object", "properties": properties, "required": list(required), **more}


STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
HTTP_URL = {**STRING, "format": "uri", "minLength": 1, "maxLength": 2083}
DATE_NAMES = {"propertyNames": {"format": "date"}}
NODE = objects({"v": INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/node"}, NULL]}}, "v", "next")

# Cases by name: (schema, texts that its grammar permits, texts that its grammar rejects).
CASES = {
    "anything": (True, ['{"a": [1, "x", null]}', "-0.5e3"], ["", "x", "{1}"]),
    "integer is no fraction": (INTEGER, ["-12", "0"], ["1.0", "01", '"1"']),
    "integers between fractions": ({**INTEGER, "minimum": 1.5, "exclusiveMaximum": 4}, ["2", "3"], ["1", "4", "33"]),
    "exclusive and inclusive bounds": ({**INTEGER, "exclusiveMinimum": 3, "minimum": 5}, ["5"], ["3", "4"]),
    "bounds of draft 4": ({**INTEGER, "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
    "beyond 64 bits": ({**INTEGER, "maximum": 2**70, "minimum": 5}, ["5", "9223372036854775807"], ["4", "-1"]),
    "multiples between bounds": ({**INTEGER, "minimum": 7, "maximum": 30, "multipleOf": 10}, ["10", "30"], ["7", "40"]),
    "multiples": ({**INTEGER, "multipleOf": 7}, ["-14", "0", "49"], ["8", "-15"]),
    "multiples of several": ({**INTEGER, "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}, ["12"], ["4", "6"]),
    "number that is a multiple of 1": ({"type": "number", "multipleOf": 1}, ["3"], ["3.5"]),
    "number between": ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, ["0", "0.99"], ["1", "-0.1", "1.0"]),
    "not a number": ({"type": "number", "not": {"const": 3}}, ["3.5", "2", "30"], ["3", "3.0"]),
    "length in code points": (
        {**STRING, "minLength": 2, "maxLength": 3},
        ['"é😀"', '"abc"'],
        ['"a"', '"abcd"', '"a\tb"'],
    ),
    "long length": ({**STRING, "maxLength": 5000}, [json.dumps("a" * 5000)], [json.dumps("a" * 5001)]),
    "pattern is searched": ({**STRING, "pattern": "b+"}, ['"abba"', '"b"'], ['"a"', '""']),
    "pattern with anchors": ({**STRING, "pattern": "^a|b$"}, ['"ax"', '"xb"'], ['"xa"', '"bx"']),
    "pattern beyond ASCII": ({**STRING, "pattern": "^[à-ü]{2}$"}, ['"éà"'], ['"e"', '"é"']),
    "pattern and length": ({**STRING, "pattern": "^[a-z]+$", "maxLength": 3}, ['"abc"'], ['"abcd"', '""', '"ab1"']),
    "pattern of quotes": ({**STRING, "pattern": '^[a"]+$'}, ['"aa"'], ['"a\\"a"', '"a"a"']),
    "format and pattern": ({**STRING, "format": "date", "pattern": "^2"}, ['"2024"'], ['"1999-01-01"']),
    "format": ({**STRING, "format": "date"}, ['"2024-02-29"', '"1999-12-31"'], ['"2023-02-29"', '"2024-04-31"', '"x"']),
    "format and a loose length": ({**STRING, "format": "date", "minLength": 1}, ['"2024-02-29"'], ['"x"', '"2024"']),
    "format and a length": ({**STRING, "format": "email", "maxLength": 64}, ['"bert.b@example.com"'], ['"x"', '"a@b"']),
    "HttpUrl of pydantic": (HTTP_URL, ['"https://example.com/a/b?c=d#e"', '"mailto:a@b.c"'], ['"x"', '""']),
    "format of names": (objects({}, **DATE_NAMES, additionalProperties=INTEGER), ['{"2024-02-29": 1}'], ['{"x": 1}']),
    "format without a string": ({**STRING, "format": "date", "not": {"const": ""}}, ['"2024-02-29"'], ['"x"', '""']),
    "unknown format": ({**STRING, "format": "phone"}, ['"x"'], ["1"]),
    "string without another": (
        {**STRING, "not": {"enum": ["ab", "b"]}},
        ['"a"', '"abc"', '""'],
        ['"ab"', '"b"', '"\\u0062"'],
    ),
    "enum of a type": ({**STRING, "enum": ["a", 1, None]}, ['"a"'], ["1", "null"]),
    "constants": ({"enum": [{"a": [1, None]}, "a/b", 0.5]}, ['{"a":[1,null]}', '"a/b"', "0.5"], ["{}", "0.25"]),
    "types": ({"type": ["string", "null"]}, ['"a"', "null"], ["1"]),
    "no type but properties": ({"properties": {"a": INTEGER}}, ['{"a": 1}', "{}"], ['"a"', '{"a": "1"}']),
    "declared properties are all": (
        objects({"a": INTEGER, "b": STRING}),
        ['{"b": "x"}'],
        ['{"c": 1}', '{"a": 1, "a": 2}'],
    ),
    "object of anything": ({"type": "object"}, ['{"x": {"y": 1}}'], ["[]"]),
    "required but not declared": ({"type": "object", "required": ["a"]}, ['{"a": 1}'], ["{}"]),
    "others": (
        objects({"a": INTEGER}, additionalProperties=STRING),
        ['{"a": 1, "b": "x"}', '{"ab": "x"}'],
        ['{"a": "x"}', '{"b": 1}', '{"a": 1, "a": "x"}', '{"a": 1, "\\u0061": "x"}'],
    ),
    "title as a name": (
        objects({"x": objects({"title": STRING}, "title"), "y": objects({"title": INTEGER}, "title")}, "x", "y"),
        ['{"x": {"title": "a"}, "y": {"title": 1}}'],
        ['{"x": {"title": "a"}, "y": {"title": "a"}}'],
    ),
    "default in constants": (
        {"anyOf": [objects({"a": {"const": {"default": n}}}, "a") for n in (1, 2)]},
        ['{"a": {"default":2}}'],
        [],
    ),
    "patterns of names": (
        {"type": "object", "patternProperties": {"^x-": INTEGER}},
        ['{"x-a": 1, "x-b": 2}', "{}"],
        ['{"y": 1}', '{"x-a": "b"}'],
    ),
    "names": ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, ['{"ab": 1}'], ['{"A": 1}']),
    "names of an enum": ({"type": "object", "propertyNames": {"enum": ["a"]}}, ['{"a": 1}'], ['{"b": 1}']),
    "some property": (objects({"a": INTEGER, "b": INTEGER}, minProperties=1), ['{"b": 1}', '{"a": 1, "b": 2}'], ["{}"]),
    "at most one": (objects({"a": INTEGER, "b": INTEGER}, maxProperties=1), ['{"b": 1}', "{}"], ['{"a": 1, "b": 2}']),
    "forbidden": (objects({"a": False, "b": INTEGER}), ['{"b": 1}', "{}"], ['{"a": 1}']),
    "items": (
        {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2},
        ["[1]", "[1, 2]"],
        ["[]", "[1, 2, 3]"],
    ),
    "tuple": ({"prefixItems": [STRING, INTEGER], "items": False}, ['["a", 1]', "[]"], ['["a", 1, 2]', "[1]"]),
    "tuple of draft 7": ({"items": [STRING, INTEGER], "additionalItems": False}, ['["a", 1]'], ['["a", 1, 2]']),
    "tuple cut short": ({"prefixItems": [STRING, INTEGER], "maxItems": 1}, ['["a"]'], ['["a", 1]']),
    "contains": ({"type": "array", "contains": {"const": 1}}, ["[1]", "[1, 2]"], ["[]", "[2]"]),
    "unique": (
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
        ['["b","a"]', "[]"],
        ['["a","a"]'],
    ),
    "all of": (
        {"allOf": [objects({"a": INTEGER}, "a"), objects({"b": STRING}, "b")]},
        ['{"a": 1, "b": ""}'],
        ['{"a": 1}'],
    ),
    "one of": (
        {**objects({"a": INTEGER, "b": INTEGER}), "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": 1}', '{"b": 1}'],
        ['{"a": 1, "b": 1}', "{}"],
    ),
    "one of by a discriminator": (
        {"oneOf": [objects({"k": {"const": k}, k: INTEGER}, "k") for k in "ab"]},
        ['{"k": "a", "a": 1}', '{"k": "b"}'],
        ['{"k": "c"}', "{}"],
    ),
    "conditional": (
        {
            **objects({"a": INTEGER, "b": STRING}, "a"),
            "if": {"properties": {"a": {"const": 1}}},
            "then": {"required": ["b"]},
        },
        ['{"a": 1, "b": ""}', '{"a": 2}'],
        ['{"a": 1}'],
    ),
    "dependent": (
        objects({"a": INTEGER, "b": INTEGER}, dependentRequired={"a": ["b"]}),
        ['{"b": 1}', "{}"],
        ['{"a": 1}'],
    ),
    "negated type": ({"not": {"type": ["object", "array", "number"]}}, ['"a"', "null"], ["1", "{}", "[]"]),
    "unevaluated": (
        {"allOf": [objects({"a": INTEGER})], "properties": {"b": INTEGER}, "unevaluatedProperties": False},
        ['{"b": 1}', '{"b": 1, "a": 2}'],
        ['{"c": 1}'],
    ),
    "recursion": (
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        ['{"v": 1, "next": {"v": 2, "next": null}}'],
        ['{"v": 1}', '{"v": 1, "next": 2}'],
    ),
    "pointer with escapes": ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": INTEGER}}, ["1"], ['"a"']),
    "anchor and id": (
        {"$id": "http://x/y", "$ref": "z#n", "$defs": {"z": {"$id": "z", "$defs": {"n": {"$anchor": "n", **INTEGER}}}}},
        ["1"],
        ['"a"'],
    ),
    "branches without values": ({"anyOf": [False, {"type": "string", "enum": [1]}, NULL]}, ["null"], ["1"]),
}


@pytest.mark.parametrize("name", CASES)
def test_grammar_accepts_valid_and_rejects_invalid_texts(name):
    schema, permitted, forbidden = CASES[name]
    compiled = compile_schema(schema)
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    for text in permitted:
        assert permits(compiled, text), text
    if "draft" not in name and "format" not in name:
        for text in permitted:
            assert validator(schema).is_valid(json.loads(text)), text
    for text in forbidden:
        assert not permits(compiled, text), text


@pytest.mark.parametrize(
    ("schema", "place", "keyword"),
    [
        ({"type": "array", "items": STRING, "uniqueItems": True}, "/uniqueItems", "uniqueItems"),
        (objects({"a/b": {"type": "number", "multipleOf": 0.01}}), "/properties/a~1b/multipleOf", "multipleOf"),
        ({**INTEGER, "minimum": 0, "multipleOf": 5}, "/multipleOf", "multipleOf"),
        ({**STRING, "pattern": r"(a)\1"}, "/pattern", "pattern"),
        ({**STRING, "pattern": r"\bword\b"}, "/pattern", "pattern"),
        ({**STRING, "pattern": r"\p{L}"}, "/pattern", "pattern"),
        ({"contains": INTEGER, "maxContains": 2}, "/contains", "contains"),
        ({"$ref": "http://example.org/x"}, "/$ref", "$ref"),
        ({"$ref": "#/$defs/none"}, "/$ref", "$ref"),
        ({"$ref": "#"}, "", "$ref"),
        ({"allOf": [{"anyOf": [{"$ref": "#"}]}]}, "", "$ref"),
        (objects({"a": {"$ref": "#"}}, "a"), "/properties/a", "schema"),
        ({**INTEGER, "enum": ["a"]}, "/enum", "enum"),
        ({"type": "integr"}, "/type", "type"),
        ({"type": "object", "properties": {"a": 1}}, "/properties/a", "properties"),
        ({"anyOf": []}, "/anyOf", "anyOf"),
        ({"items": {"minLength": -1}}, "/items/minLength", "minLength"),
        ({**STRING, "minLength": 2_000_000, "maxLength": 3_000_000}, "/minLength", "minLength"),
        ({**INTEGER, "minimum": 5, "maximum": 4}, "/minimum", "minimum"),
        ({"type": "number", "minimum": 1e-9, "maximum": 2e-9}, "/minimum", "minimum"),
        ({"const": 2**64}, "/const", "const"),
        ({"enum": [1, {"a": [-123456789012345678901.0]}]}, "/enum", "enum"),
        (objects({}, minProperties=2, additionalProperties=True), "/minProperties", "minProperties"),
        ({"if": {"uniqueItems": True}, "then": False}, "/if", "if"),
        ([], "", "schema"),
        (False, "", "schema"),
    ],
)
def test_unsupported_schema_names_place_and_keyword(schema, place, keyword):
    with pytest.raises(SchemaError) as caught:
        convert_schema(schema, "tools[2].function.parameters")
    assert caught.value.place == "tools[2].function.parameters" + place
    assert str(caught.value).startswith(f"{keyword} at {caught.value.place} ")


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """Arguments of all calls of `count_steps`: a measure that does not depend on the machine's load."""
    counted: list[int] = []
    count_steps = ShapeResolver.count_steps

    def count(resolver: ShapeResolver, num_steps: int = 1) -> None:
        counted.append(num_steps)
        count_steps(resolver, num_steps)

    monkeypatch.setattr(ShapeResolver, "count_steps", count)
    return counted


def nested(keyword: str, depth: int):
    schema = {}
    for _ in range(depth):
        schema = {keyword: schema} if keyword != "anyOf" else {keyword: [schema]}
    return schema


HOSTILE = {
    "deep items": nested("items", 10_000),
    "deep anyOf": nested("anyOf", 10_000),
    "deep constant": {"const": nested("x", 10_000)},
    "wide": {"anyOf": [{"const": index} for index in range(60_000)]},
    "long chain of references": {
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)},
        "$ref": "#/$defs/d0",
    },
    "many combinations": {"allOf": [{"anyOf": [objects({f"p{i}{j}": INTEGER}) for j in range(9)]} for i in range(9)]},
    "many dependencies": objects({}, dependentRequired={f"a{i}": [f"b{i}"] for i in range(200)}),
    "overlapping branches": {"oneOf": [objects({f"p{i}": INTEGER}) for i in range(60)]},
    "many patterns of which one must match": {"oneOf": [{**STRING, "pattern": f"^a{i}"} for i in range(1000)]},
    "long text and many lookaheads": {"const": "a" * 5000, "pattern": "(?=a*b)" * 500},
    "long text and nested counts": {"const": "a" * 5000, "pattern": "^((a{1,50}){1,50}){1,50}b$"},
    "overlapping patterns": {"oneOf": [{**STRING, "pattern": f"^a{i}"} for i in range(200)]},
    "overlapping objects": {"oneOf": [objects({"a": STRING, f"p{i}": INTEGER}, f"p{i}") for i in range(200)]},
    "nested counts": {**STRING, "pattern": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"},
    "deep groups": {**STRING, "pattern": "(" * 2000 + ")" * 2000},
    "slow for backtracking": {"enum": ["a" * 2000 + "!"], "pattern": "^(a+)+$"},
    "huge text": {"description": "x" * 300_000},
    "huge number": {**INTEGER, "minimum": int("9" * 1000)},
    "huge float": {"type": "number", "multipleOf": 1e-300, "maximum": 1e308},
}


@pytest.mark.timeout(60)  # A case takes about a second on an idle machine, but hours without the limit.
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_after_a_bounded_number_of_steps(name, steps):
    with pytest.raises(SchemaError) as caught:
        convert_schema(HOSTILE[name], "schema")
    # Only the last call may exceed the limit.
    assert sum(steps[:-1]) <= MAX_STEPS
    assert max(steps, default=0) <= 1000
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["long text and many lookaheads", "long text and nested counts"])
def test_long_searches_for_a_pattern_end_at_the_limit_of_steps(name):
    with pytest.raises(SchemaError, match="takes more than 120000 steps"):
        convert_schema(HOSTILE[name], "schema")


def test_100_kb_of_nested_objects_take_few_steps(steps):
    def nest(depth: int) -> dict:
        return objects({"a": nest(depth - 1), "b": STRING, "c": STRING}, "a") if depth else STRING

    schema = objects({f"k{i}": nest(20) for i in range(45)})
    assert len(json.dumps(schema)) > 100_000
    convert_schema(schema, "schema")
    assert sum(steps) < 40_000


def test_conversion_that_takes_too_many_steps_is_refused():
    with pytest.raises(SchemaError, match="^schema at here takes more than 120000 steps") as caught:
        convert_schema(HOSTILE["many patterns of which one must match"], "here")
    assert caught.value.code == "unsupported_schema"


def test_long_enumeration_by_one_of_is_converted():
    convert_schema({"oneOf": [{"const": index} for index in range(600)]}, "schema")


@pytest.mark.parametrize(
    "schema",
    [
        {
            "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1000)} | {"d1000": {}},
            "$ref": "#/$defs/d0",
        },
        objects({"n" * 20_000: INTEGER, "m" * 20_000: INTEGER}, additionalProperties=True),
        objects({f"name {i}": INTEGER for i in range(900)}, additionalProperties=STRING),
        {"enum": [f"value {i}" for i in range(2000)]},
    ],
)
def test_large_schemas_compile(schema):
    rules = write_rules(GrammarSpec("json_schema", json.dumps(convert_schema(schema, "schema"))))
    assert estimate_compile_cost(rules).total <= MAX_COMPILE_STEPS
    COMPILER.compile_grammar(rules)


def test_invalid_utf_8_is_rejected():
    for schema in ({**STRING, "maxLength": 3}, {**STRING, "pattern": "^[^a]{1,3}$"}, {**STRING, "pattern": "."}):
        compiled = compile_schema(schema)
        assert permits(compiled, '"é€😀"')
        for raw in (
            b'"\xc0\x80"',
            b'"\xe0\x80\x80"',
            b'"\xf0\x80\x80\x80"',
            b'"\xf4\x90\x80\x80"',
            b'"\x80"',
            b'"\xe2\x82"',
        ):
            assert not permits(compiled, raw), (schema, raw)


def test_permitted_numbers_and_integers_are_those_within_their_bounds():
    rng = random.Random(5)
    for _ in range(60):
        kind = rng.choice(["integer", "number"])
        scale = rng.choice([1, 10, 1000, 10**6])
        low, high = sorted(round(rng.uniform(-scale, scale), rng.choice([0, 1, 3, 8])) for _ in range(2))
        names = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
        schema = {"type": kind, names[0]: low, names[1]: high}
        try:
            compiled = compile_schema(schema)
        except SchemaError:
            continue
        validator = jsonschema.Draft202012Validator(schema)
        near = [low, high, low - 1, high + 1, low + 0.000001, high - 0.000001, 0, -0.5, (low + high) / 2]
        for value in [*near, *(rng.uniform(2 * low - high, 2 * high - low) for _ in range(20))]:
            for text in (str(int(value)), f"{value:.6f}", f"{value:.1f}"):
                if permits(compiled, text):
                    assert validator.is_valid(json.loads(text)), (schema, text)
                elif "." not in text and validator.is_valid(int(text)) and abs(int(text)) > 0:
                    raise AssertionError((schema, text, "is not permitted"))


def test_number_of_properties_is_limited():
    rng = random.Random(6)
    for _ in range(40):
        names = "abcd"[: rng.randrange(1, 5)]
        required = [name for name in names if rng.random() < 0.3]
        low, high = sorted((rng.randrange(0, 4), rng.randrange(0, 5)))
        schema = objects(dict.fromkeys(names, INTEGER), *required, minProperties=low, maxProperties=high)
        schema["additionalProperties"] = rng.choice([False, False, INTEGER]) if low < 2 else False
        try:
            compiled = compile_schema(schema)
        except SchemaError:
            assert len(required) > high or low > len(names)
            continue
        extra = "xy" if schema["additionalProperties"] else "x"
        for bits in range(2 ** (len(names) + len(extra))):
            chosen = [name for index, name in enumerate(names + extra) if bits >> index & 1]
            value = dict.fromkeys(chosen, 1)
            valid = jsonschema.Draft202012Validator(schema).is_valid(value)
            assert permits(compiled, json.dumps(value)) == valid, (schema, value)


def test_converted_schema_survives_a_json_round_trip():
    for schema, *_ in CASES.values():
        written = convert_schema(schema, "schema")
        assert orjson.loads(orjson.dumps(written)) == written


def test_integer_multiples_of_a_fraction_are_multiples_of_its_numerator():
    # 2.5 = 5 / 2
    assert convert_schema({**INTEGER, "multipleOf": 2.5}, "schema") == {"type": "integer", "multipleOf": 5}
