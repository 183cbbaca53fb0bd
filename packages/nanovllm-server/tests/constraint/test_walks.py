"""Random answers that a grammar allows have valid calls or match the requested format."""

import json
import re

import jsonschema
import pytest

from nanovllm_models.chat_formats import LLAMA, THINK, TOOL_CALL_FORMATS, ChatFormat, XmlCalls

pytestmark = pytest.mark.background

ARGUMENTS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F", "None of both"]},
        "note": {"type": ["string", "null"]},
        "mixed": {"enum": ["x", 1, None]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"$ref": "#/$defs/place"},
        "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-.+$"},
        "when": {"type": "string", "format": "date"},
        "short": {"type": "string", "minLength": 1, "maxLength": 4},
        "words": {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 6}, "maxItems": 2},
        "either": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
        "empty": {"enum": ["", "a"]},
        "any": {},
        "enum": {"type": "object", "properties": {"x": {"type": "string", "minLength": 3}}},
    },
    "required": ["city", "tags", "place", "code", "words", "short", "empty"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"inside": {"type": "boolean"}, "name": {"type": "string"}},
            "required": ["inside"],
            "additionalProperties": False,
        }
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": ARGUMENTS, "strict": True}},
    {"type": "function", "function": {"name": "ping"}},
    {"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}},
]
NAMED_TOOL_CHOICE = {"type": "function", "function": {"name": "look"}}
SCHEMAS = {"look": ARGUMENTS, "ping": {"type": "object"}, "any": {"type": "object"}}
# Keys: the state of the reasoning after the prompt. Values: (reasoning format, prompt).
PROMPTS = {"no reasoning": (None, ""), "begun": (THINK, "<think>\n"), "free": (THINK, ""), "over": (THINK, "</think>")}


def goals(form):
    tags = [
        getattr(form, name) for name in ("begin", "end", "call_begin", "parameter_end") if getattr(form, name, None)
    ]
    if isinstance(form, XmlCalls):
        # A parser might read this tag inside a value as the next parameter.
        tags.append(f"{form.parameter_begin}note{form.key_end}")
    return ("</think>", "</think>", f"\n{tags[-1]}", *tags)


def check_arguments(answer):
    for (name, _), arguments in zip(answer.calls, answer.arguments(), strict=True):
        jsonschema.validate(arguments, SCHEMAS[name], jsonschema.Draft202012Validator)


@pytest.mark.parametrize("state", PROMPTS)
@pytest.mark.parametrize("choice", ["required", "named", "auto"])
@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_arguments_of_calls_are_valid(draw_answers, name, choice, state):
    reasoning, prompt = PROMPTS[state]
    form = TOOL_CALL_FORMATS[name]
    tool_choice = NAMED_TOOL_CHOICE if choice == "named" else choice
    num_finished = 0
    for answer in draw_answers(
        ChatFormat(reasoning, form), prompt, count=10, seed=1, goals=goals(form), tools=TOOLS, tool_choice=tool_choice
    ):
        if not answer.finished:
            continue
        num_finished += 1
        check_arguments(answer)
        if choice != "auto":
            assert answer.content == ""
            assert 1 <= len(answer.calls) <= 16
        if choice == "named":
            assert [name for name, _ in answer.calls] == ["look"]
    assert num_finished


@pytest.mark.parametrize(
    "form", [form for form in TOOL_CALL_FORMATS.values() if isinstance(form, XmlCalls)], ids=lambda form: form.name
)
def test_no_value_contains_another_call(draw_answers, form):
    """The parser would end the value at the other call."""
    properties = {"a": {"type": "string"}, "b": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"]}
    tool = {"type": "function", "function": {"name": "ping", "parameters": schema}}
    choice = {"type": "function", "function": {"name": "ping"}}
    next_call = f"{form.call_end}{form.end}{form.begin}{form.call_begin}ping{form.name_end}"
    goal_texts = (next_call, f"\n{form.parameter_end}", form.parameter_end)
    answers = draw_answers(ChatFormat(None, form), count=20, goals=goal_texts, tools=[tool], tool_choice=choice)
    finished = [answer for answer in answers if answer.finished]
    assert any(form.call_end in arguments["a"] for answer in finished for arguments in answer.arguments())
    for answer in finished:
        assert [arguments.keys() for arguments in answer.arguments()] == [properties.keys()]


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_functions_without_an_enforced_schema_may_have_arguments(draw_answers, name):
    form = ChatFormat(None, TOOL_CALL_FORMATS[name])
    parameter = getattr(form.tool_calls, "parameter_begin", '"a": ')
    goal_texts = (*goals(form.tool_calls), parameter, "any", "any")
    answers = draw_answers(form, count=40, goals=goal_texts, tools=TOOLS[2:], structured_outputs={"regex": "x"})
    assert any(arguments for answer in answers if answer.finished for arguments in answer.arguments())


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_only_one_call_is_allowed_if_calls_may_not_be_parallel(draw_answers, name):
    form = ChatFormat(None, TOOL_CALL_FORMATS[name])
    fields = {"tools": TOOLS[1:], "tool_choice": "required", "parallel_tool_calls": False}
    answers = [
        answer for answer in draw_answers(form, count=8, goals=goals(form.tool_calls), **fields) if answer.finished
    ]
    assert answers
    assert all(len(answer.calls) == 1 and not answer.content for answer in answers)


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_only_allowed_functions_are_called(draw_answers, name):
    form = ChatFormat(None, TOOL_CALL_FORMATS[name])
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "ping"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    goal_texts = (*goals(form.tool_calls), "look", "ping", '{"name": "')
    for answer in draw_answers(form, count=12, goals=goal_texts, tools=TOOLS, tool_choice=choice):
        assert {name for name, _ in answer.calls} <= {"ping"}


@pytest.mark.parametrize("state", PROMPTS)
@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_answer_is_schema_json_or_calls(draw_answers, name, state):
    reasoning, prompt = PROMPTS[state]
    form = TOOL_CALL_FORMATS[name]
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    goal_texts = (*goals(form), '{"a": "')
    for answer in draw_answers(
        ChatFormat(reasoning, form), prompt, count=8, goals=goal_texts, tools=TOOLS[:1], response_format=answer_format
    ):
        if not answer.finished:
            continue
        assert bool(answer.calls) != bool(answer.content)
        check_arguments(answer)
        if answer.content:
            jsonschema.validate(json.loads(answer.content), schema)


def test_schema_json_that_contains_a_call_is_no_call(draw_answers):
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "object"}}}, "required": ["a"]}
    answer_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answers = draw_answers(
        ChatFormat(None, LLAMA),
        count=20,
        goals=('{"a": [\n{"name": "ping", "parameters": {}}]}',),
        tools=TOOLS[1:2],
        response_format=answer_format,
    )
    contents = [answer.content for answer in answers if answer.finished and not answer.text.startswith('{"name"')]
    assert any('"ping"' in content for content in contents)
    for content in contents:
        jsonschema.validate(json.loads(content), schema)


@pytest.mark.parametrize(
    ("structured_outputs", "pattern"),
    [
        ({"regex": "(yes|no), [a-z]{3,8}"}, "(yes|no), [a-z]{3,8}"),
        ({"choice": ["red", "green", 'a (b) \\ "c"']}, re.escape("red") + "|green|" + re.escape('a (b) \\ "c"')),
        ({"choice": [" yes", "  no ", "\tmaybe\n"]}, " yes|  no |\tmaybe\n"),
        ({"grammar": 'root ::= "a" digits "b"\ndigits ::= [0-9]{1,3}'}, "a[0-9]{1,3}b"),
        (
            {
                "structural_tag": {
                    "format": {
                        "type": "tag",
                        "begin": "<",
                        "content": {"type": "regex", "pattern": "[xy]{2}"},
                        "end": ">",
                    }
                }
            },
            "<[xy]{2}>",
        ),
    ],
    ids=["regex", "choice", "whitespace", "grammar", "tag"],
)
@pytest.mark.parametrize("state", PROMPTS)
def test_text_matches_the_requested_format(draw_answers, state, structured_outputs, pattern):
    reasoning, prompt = PROMPTS[state]
    answers = draw_answers(
        ChatFormat(reasoning, None), prompt, count=6, goals=("</think>",) * 2, structured_outputs=structured_outputs
    )
    contents = [answer.content for answer in answers if answer.finished]
    assert contents
    assert all(re.fullmatch(pattern, content) for content in contents)
