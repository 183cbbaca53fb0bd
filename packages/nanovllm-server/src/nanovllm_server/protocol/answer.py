"""Reads the fields that constrain the answer: OpenAI's `response_format`, and `structured_outputs` for all else.

The engine checks later whether schemas can be enforced and whether grammars compile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import orjson

from nanovllm_server.protocol.error import ApiError, bad_field
from nanovllm_server.protocol.field_reader import FieldReader
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.schema import require_small_schema

MAX_NAME = 64
MAX_REGEX = 16 << 10
MAX_GRAMMAR = 128 << 10
MAX_CHOICES = 1024
MAX_CHOICE = 4096
# Levels of objects and arrays in a structural tag, not counting its schemas.
MAX_TAG_DEPTH = 64
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """JSON that is valid against `schema`. In all classes here, path: path of the request's field."""

    path: str
    schema: JSON


@dataclass(frozen=True, slots=True)
class RegexAnswer:
    """Text that a regular expression matches as a whole."""

    path: str
    pattern: str


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """One of these texts."""

    path: str
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GrammarAnswer:
    """Text that matches the rule `root` of a grammar in EBNF, in the syntax of GBNF."""

    path: str
    grammar: str


@dataclass(frozen=True, slots=True)
class TagAnswer:
    """Text that matches `form`, the format of a structural tag."""

    path: str
    form: dict[str, JSON]


Answer = JsonAnswer | RegexAnswer | ChoiceAnswer | GrammarAnswer | TagAnswer


def parse_answer(body: FieldReader) -> Answer | None:
    """The constraint that a request puts on its answer; None for free text. Raises ApiError."""
    response_format = _response_format(body)
    structured = _structured_outputs(body)
    if response_format is not None and structured is not None:
        raise body.wrong("structured_outputs", "left out when there is a response_format")
    return response_format or structured


def _response_format(body: FieldReader) -> Answer | None:
    fields = body.child("response_format")
    if fields is None:
        return None
    kind = fields.one_of("type", RESPONSE_FORMATS)
    path = body.path("response_format")
    match kind:
        case "text":
            return None
        case "json_object":
            return _object(path)
        case "json_schema":
            return _json_schema(fields)
        case "structural_tag":
            return TagAnswer(fields.path("format"), _tag_format(fields))
        case _:
            raise fields.wrong("type", "one of " + ", ".join(f'"{name}"' for name in RESPONSE_FORMATS))


def _json_schema(fields: FieldReader) -> JsonAnswer:
    form = fields.child("json_schema")
    if form is None:
        raise fields.wrong("json_schema", "an object with name and schema")
    name = form.text("name", MAX_NAME)
    if not name or not NAME_CHARACTERS.issuperset(name):
        raise form.wrong("name", f"a string of 1 to {MAX_NAME} letters, digits, _ and -")
    form.text("description")
    # The answer follows the schema whether `strict` is true or not.
    form.boolean("strict")
    schema = form.raw("schema", {"type": ["object", "boolean"]})
    if not isinstance(schema, dict | bool):
        raise form.wrong("schema", "a JSON schema")
    return _json_answer(form.path("schema"), schema)


def _object(path: str) -> JsonAnswer:
    return JsonAnswer(path, {"type": "object"})


def _json_answer(path: str, schema: JSON) -> JsonAnswer:
    require_small_schema(schema, path)
    return JsonAnswer(path, schema)


def _structured_outputs(body: FieldReader) -> Answer | None:
    fields = body.child("structured_outputs")
    if fields is None:
        return None
    readers: dict[str, Callable[[FieldReader], Answer | None]] = {
        "json": _json,
        "regex": _regex,
        "choice": _choice,
        "grammar": _grammar,
        "structural_tag": _structural_tag,
        "json_object": _json_object,
    }
    answers = [answer for read in readers.values() if (answer := read(fields)) is not None]
    expected = f"an object with exactly one of {', '.join(readers)}"
    if (unknown := fields.unknown()) or len(answers) != 1:
        given = f"the field {unknown[0]}" if unknown else f"{len(answers)} of them"
        path = body.path("structured_outputs")
        raise ApiError(400, f"{path} must be {expected}, but has {given}", param=path, code="invalid_value")
    return answers[0]


def _json(fields: FieldReader) -> JsonAnswer | None:
    schema = _decoded(fields, "json", "object", "boolean")
    if schema is None:
        return None
    if not isinstance(schema, dict | bool):
        raise fields.wrong("json", "a JSON schema, or a string that contains one")
    return _json_answer(fields.path("json"), schema)


def _regex(fields: FieldReader) -> RegexAnswer | None:
    pattern = fields.text("regex", MAX_REGEX, {"minLength": 1})
    if pattern == "":
        raise fields.wrong("regex", "a regular expression")
    return None if pattern is None else RegexAnswer(fields.path("regex"), pattern)


def _choice(fields: FieldReader) -> ChoiceAnswer | None:
    expected = f"an array of 1 to {MAX_CHOICES} strings"
    one: dict[str, JSON] = {"type": "string", "minLength": 1, "maxLength": MAX_CHOICE}
    choices = fields.array("choice", expected, MAX_CHOICES, one)
    if choices is None:
        return None
    if not choices:
        raise fields.wrong("choice", expected)
    texts: list[str] = []
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not 0 < len(choice) <= MAX_CHOICE:
            raise bad_field(f"{fields.path('choice')}[{index}]", f"a string of 1 to {MAX_CHOICE} characters", choice)
        texts.append(choice)
    return ChoiceAnswer(fields.path("choice"), tuple(texts))


def _grammar(fields: FieldReader) -> GrammarAnswer | None:
    grammar = fields.text("grammar", MAX_GRAMMAR)
    if grammar is not None and not grammar.strip():
        raise fields.wrong("grammar", "a grammar in EBNF")
    return None if grammar is None else GrammarAnswer(fields.path("grammar"), grammar)


def _structural_tag(fields: FieldReader) -> TagAnswer | None:
    tag = _decoded(fields, "structural_tag", "object")
    if tag is None:
        return None
    if not isinstance(tag, dict):
        raise fields.wrong("structural_tag", "an object with format, or a string that contains one as JSON")
    inner = FieldReader(tag, fields.path("structural_tag"))
    inner.one_of("type", ("structural_tag",))
    return TagAnswer(inner.path("format"), _tag_format(inner))


def _json_object(fields: FieldReader) -> JsonAnswer | None:
    return _object(fields.path("json_object")) if fields.boolean("json_object") else None


def _decoded(fields: FieldReader, name: str, *kinds: str) -> JSON:
    """The value of a field that may also be a string with the value as JSON. kinds: JSON types of the value."""
    value = fields.raw(name, {"type": [*kinds, "string"]})
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        path = fields.path(name)
        message = f"{path} is a string that is not valid JSON: {error}"
        raise ApiError(400, message, param=path, code="invalid_json") from error


def _tag_format(fields: FieldReader) -> dict[str, JSON]:
    form = fields.raw("format", {"type": "object"})
    if not isinstance(form, dict):
        raise fields.wrong("format", "the format of a structural tag, an object with type")
    path = fields.path("format")
    named = _with_schema_paths(form, path, 0)
    if len(orjson.dumps(form)) > MAX_GRAMMAR:
        raise ApiError(400, f"{path} may have at most {MAX_GRAMMAR} bytes as JSON", param=path, code="invalid_value")
    return cast("dict[str, JSON]", named)


def _with_schema_paths(form: JSON, path: str, depth: int) -> JSON:
    """The format of a structural tag with the path of each JSON schema as `place`, see `convert_grammar`.

    Raises ApiError if the format or a schema is too deep or too large.
    """
    if depth > MAX_TAG_DEPTH:
        raise ApiError(400, f"{path} is nested deeper than {MAX_TAG_DEPTH}", param=path, code="invalid_value")
    if isinstance(form, list):
        return [_with_schema_paths(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(form)]
    if not isinstance(form, dict):
        return form
    schema = form.get("json_schema")
    if not isinstance(schema, dict | bool):
        return {name: _with_schema_paths(value, f"{path}.{name}", depth + 1) for name, value in form.items()}
    schema_path = f"{path}.json_schema"
    require_small_schema(schema, schema_path)
    named = {
        name: value if name == "json_schema" else _with_schema_paths(value, f"{path}.{name}", depth + 1)
        for name, value in form.items()
    }
    return {**named, "place": schema_path}
