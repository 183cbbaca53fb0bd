import asyncio
import json
import os
import subprocess
import sys

import pytest
import toy_model
from grammars import OBJECT, XML, XML_TYPES, toy_compiler

from nanovllm_core import GrammarError, GrammarSpec
from nanovllm_core.grammar import schema_enforcement
from nanovllm_core.grammar.grammars import Grammars
from nanovllm_core.grammar.schema_enforcement import convert_grammar
from nanovllm_core.grammar.schemas.declared_types import declared_types
from nanovllm_core.grammar.schemas.shape_resolver import ShapeResolver

SLOW_SCHEMA = {"oneOf": [{"type": "string", "pattern": f"^pattern{i}"} for i in range(1000)]}
UNIQUE = {"type": "array", "uniqueItems": True}


def tag(form) -> GrammarSpec:
    return GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


PROGRAM = """
import json, sys
from nanovllm_core import GrammarError, GrammarSpec
from nanovllm_core.grammar.schema_enforcement import convert_grammar
for schema in json.loads(sys.argv[1]):
    try:
        print(convert_grammar(GrammarSpec("json_schema", json.dumps(schema))).spec.source)
    except GrammarError as error:
        print(error)
"""


def test_a_schema_has_the_same_result_in_every_process():
    letters = list("abcdefgh")
    schemas = [
        # Regex engines disagree whether "\\d" matches the first constant, which "^b" excludes.
        {"type": "string", "allOf": [{"pattern": "^b"}, {"pattern": "\\d"}, {"enum": ["a\u0663", "b1"]}]},
        {"type": "string", "not": {"enum": letters}},
        {"type": "string", "not": {"not": {"enum": letters}}},
        {"type": "string", "not": {"allOf": [{"pattern": letter} for letter in letters]}},
    ]
    command = [sys.executable, "-c", PROGRAM, json.dumps(schemas)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONHASHSEED": str(seed)})
        for seed in range(4)
    ]
    results = [process.communicate()[0] for process in processes]
    assert len(results[0].splitlines()) == len(schemas)
    assert set(results) == {results[0]}


@pytest.mark.parametrize("keyword", ["$id", "$ref"])
def test_an_invalid_uri_is_refused_with_its_place(keyword):
    schema = {"type": "array", "items": {keyword: "http://[::1", "items": {"$id": "x"}}}
    with pytest.raises(GrammarError, match="must be a valid URI reference") as caught:
        convert_grammar(GrammarSpec("json_schema", json.dumps(schema)))
    assert (caught.value.place, caught.value.code) == (f"#/items/{keyword}", "invalid_schema")


@pytest.mark.parametrize("field", ["begin", "key_end", "end", "tags"])
def test_an_empty_tag_of_xml_parameters_is_refused(field):
    form = {**json.loads(XML.source)["format"], field: [""] if field == "tags" else ""}
    with pytest.raises(GrammarError, match=rf"^the format xml_parameters at #/format is wrong: .*{field}"):
        convert_grammar(tag(form))


async def test_conversion_does_not_run_in_this_process_and_does_not_block_its_loop(vetter, monkeypatch):
    vetter.use(monkeypatch)
    cache = Grammars(toy_model.toy_vocabulary, toy_model.VOCAB, (toy_model.EOS,))
    steps: list[str] = []
    monkeypatch.setattr(ShapeResolver, "count_steps", lambda *_: steps.append("step"))
    source = json.dumps(SLOW_SCHEMA)
    assert len(source) > 10_000
    try:
        # The conversion runs in another process, which the patch does not reach.
        compiling = asyncio.create_task(cache.compile(GrammarSpec("json_schema", source)))
        num_loop_turns = 0
        while not compiling.done():
            await asyncio.sleep(0.001)
            num_loop_turns += 1
        with pytest.raises(GrammarError, match="^schema at # takes more than 120000 steps"):
            await compiling
        assert num_loop_turns > 3
        grammar = await cache.compile(GrammarSpec("json_schema", json.dumps(OBJECT)))
        assert grammar.start() is not None
        assert steps == []
        convert_grammar(GrammarSpec("json_schema", json.dumps(OBJECT)))
        assert steps
    finally:
        cache.close()


@pytest.mark.parametrize(
    ("spec", "place", "code"),
    [
        (GrammarSpec("json_schema", json.dumps(UNIQUE)), "#/uniqueItems", "unsupported_schema"),
        (GrammarSpec("json_schema", json.dumps(UNIQUE), "field"), "field/uniqueItems", "unsupported_schema"),
        (GrammarSpec("json_schema", '{"type": "integr"}'), "#/type", "invalid_schema"),
        (
            tag({"type": "sequence", "elements": [{"type": "json_schema", "json_schema": UNIQUE}]}),
            "#/format/elements/0/json_schema/uniqueItems",
            "unsupported_schema",
        ),
        (
            tag({"type": "json_schema", "json_schema": UNIQUE, "place": "field"}),
            "field/uniqueItems",
            "unsupported_schema",
        ),
        (
            tag({"type": "json_schema", "json_schema": {"enum": [1]}, "objects_only": True}),
            "#/format/json_schema",
            "invalid_schema",
        ),
        (tag({"type": "xml_parameters", "begin": "<"}), None, "invalid_grammar"),
        (GrammarSpec("json_schema", "{"), None, "invalid_grammar"),
        (GrammarSpec("structural_tag", "{"), None, "invalid_grammar"),
    ],
    ids=str,
)
def test_error_names_the_place_in_the_schema(spec, place, code):
    with pytest.raises(GrammarError) as caught:
        convert_grammar(spec)
    assert (caught.value.place, caught.value.code) == (place, code)
    assert str(caught.value) == caught.value.message
    assert caught.value.message.startswith(
        ("this ", "the format xml_parameters at #/format is wrong") if place is None else ("uniqueItems", "type", place)
    )


def test_schemas_are_converted_wherever_they_stand():
    inner = {"type": "json_schema", "json_schema": {"type": "object"}, "place": "a", "objects_only": False}
    form = {"type": "optional", "content": {"type": "sequence", "elements": [{"type": "any_text"}, inner]}}
    converted = json.loads(convert_grammar(tag(form)).spec.source)["format"]
    assert converted["content"]["elements"] == [
        {"type": "any_text"},
        {"type": "json_schema", "json_schema": {"type": "object", "additionalProperties": {}}},
    ]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (True, {"type": "object", "additionalProperties": {}}),
        (OBJECT, OBJECT),
        ({"anyOf": [{"type": "string"}, OBJECT]}, {"anyOf": [OBJECT]}),
    ],
    ids=["any", "object", "object or string"],
)
def test_only_objects_are_kept(schema, expected):
    form = {"type": "json_schema", "json_schema": schema, "objects_only": True}
    converted = json.loads(convert_grammar(tag(form)).spec.source)["format"]["json_schema"]
    assert converted == expected


def test_converted_grammar_has_a_maximum_size(monkeypatch):
    monkeypatch.setattr(schema_enforcement, "MAX_CONVERTED_BYTES", 40)
    with pytest.raises(GrammarError, match="this grammar has 43 bytes, but may have at most 40"):
        convert_grammar(GrammarSpec("json_schema", '{"type": "object"}'))


def test_converted_xml_parameters_have_types_and_compile():
    enforceable = convert_grammar(XML)
    assert enforceable.parameter_types == {"#/format/json_schema": XML_TYPES}
    matcher = toy_compiler().compile(enforceable.spec).start()
    assert matcher is not None
    assert "xml_parameters" not in enforceable.spec.source


def test_types_of_different_objects_are_known_where_they_agree():
    text, number = {"type": "string"}, {"type": "integer"}
    branches = [
        {"type": "object", "properties": {"kind": {"const": "a"}, "value": text, "list": {"type": "array"}}},
        {"type": "object", "properties": {"kind": {"const": "b"}, "value": number, "more": text}},
        {"type": "object", "properties": {"kind": {"const": "c"}, "value": number}},
    ]
    form = {**json.loads(XML.source)["format"], "json_schema": {"anyOf": branches}}
    types = convert_grammar(tag(form)).parameter_types["#/format/json_schema"]["properties"]
    assert types == {
        "kind": {"type": ["string"]},
        "value": {"type": []},
        "list": {"type": ["array"]},
        "more": {"type": ["string"]},
    }


def test_search_for_types_is_bounded():
    loop = {"anyOf": [{"$ref": "#/$defs/a"}] * 1000, "type": "string"}
    root = {"$defs": {"a": {**loop, "anyOf": [{"$ref": "#/$defs/b"}] * 1000}, "b": loop}}
    assert declared_types(loop, root) == {"string"}
    wide = {"anyOf": [{"type": "integer"}] * 9_000 + [{"type": "null"}]}
    assert declared_types({"anyOf": [wide] * 100}, wide) == {"integer", "null"}
    assert declared_types({"enum": [1] * 20_000 + ["x"]}, {}) == {"integer"}
