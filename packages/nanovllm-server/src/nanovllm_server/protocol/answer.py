"""Reads the fields `response_format` and `structured_outputs`, which constrain the answer.

The engine checks later whether schemas can be enforced and whether grammars compile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import orjson

from nanovllm_server.protocol.body import MAX_VALUES, has_too_many_values
from nanovllm_server.protocol.error import ApiError, bad_field, unsupported
from nanovllm_server.protocol.field_reader import FieldReader
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.schema import require_small_schema

# Maximum lengths are in characters. For a structural tag, MAX_GRAMMAR_LENGTH counts bytes of JSON.
MAX_SCHEMA_NAME_LENGTH = 64
MAX_REGEX_LENGTH = 16 << 10
MAX_GRAMMAR_LENGTH = 128 << 10
MAX_CHOICE_STRINGS = 1024
MAX_CHOICE_LENGTH = 4096
# Maximum nesting depth of a structural tag. JSON schemas in the tag have their own limit.
MAX_TAG_DEPTH = 64
RESPONSE_FORMAT_TYPES = ("text", "json_object", "json_schema", "structural_tag")
SCHEMA_NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """The answer must be JSON that is valid against `schema`. path: path of the request's field, for error messages."""

    path: str
    schema: JSON


@dataclass(frozen=True, slots=True)
class RegexAnswer:
    """The whole answer must match a regular expression."""

    path: str
    pattern: str


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """The answer must be one of the strings `choices`."""

    path: str
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GrammarAnswer:
    """The answer must match the rule `root` of a grammar in GBNF."""

    path: str
    grammar: str


@dataclass(frozen=True, slots=True)
class TagAnswer:
    """The answer must match a structural tag of xgrammar. tag_format: the tag's field `format`."""

    path: str
    tag_format: dict[str, JSON]


AnswerRule = JsonAnswer | RegexAnswer | ChoiceAnswer | GrammarAnswer | TagAnswer


def parse_answer_rule(body: FieldReader) -> AnswerRule | None:
    """Returns the constraint on the answer; None if the answer is free text. Raises ApiError."""
    response_format = _read_response_format(body)
    structured_outputs = _read_structured_outputs(body)
    if response_format is not None and structured_outputs is not None:
        raise body.wrong("structured_outputs", "left out when there is a response_format")
    return response_format or structured_outputs


def _read_response_format(body: FieldReader) -> AnswerRule | None:
    fields = body.child("response_format")
    if fields is None:
        return None
    format_type = fields.one_of("type", RESPONSE_FORMAT_TYPES)
    path = body.path("response_format")
    match format_type:
        case "text":
            return None
        case "json_object":
            # llama.cpp and TGI read a schema from these fields.
            for name in ("schema", "value"):
                if fields.raw(name, {"enum": [None]}) is not None:
                    message = f'{fields.path(name)} is not supported: use the type "json_schema" for a schema'
                    raise unsupported(fields.path(name), message)
            return _any_object_answer(path)
        case "json_schema":
            return _read_json_schema(fields)
        case "structural_tag":
            return TagAnswer(fields.path("format"), _read_tag_format(fields))
        case _:
            raise fields.wrong("type", "one of " + ", ".join(f'"{name}"' for name in RESPONSE_FORMAT_TYPES))


def _read_json_schema(fields: FieldReader) -> JsonAnswer:
    json_schema_fields = fields.child("json_schema")
    if json_schema_fields is None:
        raise fields.wrong("json_schema", "an object with name and schema")
    name = json_schema_fields.text("name", MAX_SCHEMA_NAME_LENGTH)
    if not name or not SCHEMA_NAME_CHARACTERS.issuperset(name):
        raise json_schema_fields.wrong("name", f"a string of 1 to {MAX_SCHEMA_NAME_LENGTH} letters, digits, _ and -")
    json_schema_fields.text("description")
    # The schema is enforced even if `strict` is false.
    json_schema_fields.boolean("strict")
    schema = json_schema_fields.raw("schema", {"type": ["object", "boolean"]})
    if schema is None:
        return _any_object_answer(fields.path("json_schema"))
    if not isinstance(schema, dict | bool):
        raise json_schema_fields.wrong("schema", "a JSON schema")
    return _json_answer(json_schema_fields.path("schema"), schema)


def _any_object_answer(path: str) -> JsonAnswer:
    return JsonAnswer(path, {"type": "object"})


def _json_answer(path: str, schema: JSON) -> JsonAnswer:
    require_small_schema(schema, path)
    return JsonAnswer(path, schema)


def _read_structured_outputs(body: FieldReader) -> AnswerRule | None:
    fields = body.child("structured_outputs")
    if fields is None:
        return None
    readers: dict[str, Callable[[FieldReader], AnswerRule | None]] = {
        "json": _read_json,
        "regex": _read_regex,
        "choice": _read_choice,
        "grammar": _read_grammar,
        "structural_tag": _read_structural_tag,
        "json_object": _read_json_object,
    }
    answer_rules = [rule for read in readers.values() if (rule := read(fields)) is not None]
    expected = f"an object with exactly one of {', '.join(readers)}"
    if (unknown := fields.unknown_paths()) or len(answer_rules) != 1:
        actual = f"the field {unknown[0]}" if unknown else f"{len(answer_rules)} of them"
        path = body.path("structured_outputs")
        raise ApiError(400, f"{path} must be {expected}, but has {actual}", param=path, code="invalid_value")
    return answer_rules[0]


def _read_json(fields: FieldReader) -> JsonAnswer | None:
    schema = _read_possibly_encoded(fields, "json", "object", "boolean")
    if schema is None:
        return None
    if not isinstance(schema, dict | bool):
        raise fields.wrong("json", "a JSON schema, or a string that contains one")
    return _json_answer(fields.path("json"), schema)


def _read_regex(fields: FieldReader) -> RegexAnswer | None:
    pattern = fields.text("regex", MAX_REGEX_LENGTH, {"minLength": 1})
    if pattern == "":
        raise fields.wrong("regex", "a regular expression")
    return None if pattern is None else RegexAnswer(fields.path("regex"), pattern)


def _read_choice(fields: FieldReader) -> ChoiceAnswer | None:
    expected = f"an array of 1 to {MAX_CHOICE_STRINGS} strings"
    choice_schema: dict[str, JSON] = {"type": "string", "minLength": 1, "maxLength": MAX_CHOICE_LENGTH}
    choices = fields.array("choice", expected, MAX_CHOICE_STRINGS, choice_schema)
    if choices is None:
        return None
    if not choices:
        raise fields.wrong("choice", expected)
    texts: list[str] = []
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not 0 < len(choice) <= MAX_CHOICE_LENGTH:
            raise bad_field(
                f"{fields.path('choice')}[{index}]", f"a string of 1 to {MAX_CHOICE_LENGTH} characters", choice
            )
        texts.append(choice)
    return ChoiceAnswer(fields.path("choice"), tuple(texts))


def _read_grammar(fields: FieldReader) -> GrammarAnswer | None:
    grammar = fields.text("grammar", MAX_GRAMMAR_LENGTH)
    if grammar is not None and not grammar.strip():
        raise fields.wrong("grammar", "a grammar in GBNF")
    return None if grammar is None else GrammarAnswer(fields.path("grammar"), grammar)


def _read_structural_tag(fields: FieldReader) -> TagAnswer | None:
    tag = _read_possibly_encoded(fields, "structural_tag", "object")
    if tag is None:
        return None
    if not isinstance(tag, dict):
        raise fields.wrong(
            "structural_tag", 'an object with the field "format", or a string that contains this object as JSON'
        )
    tag_fields = FieldReader(tag, fields.path("structural_tag"))
    tag_fields.one_of("type", ("structural_tag",))
    return TagAnswer(tag_fields.path("format"), _read_tag_format(tag_fields))


def _read_json_object(fields: FieldReader) -> JsonAnswer | None:
    return _any_object_answer(fields.path("json_object")) if fields.boolean("json_object") else None


def _read_possibly_encoded(fields: FieldReader, name: str, *types: str) -> JSON:
    """Returns the value of a field; decodes a string as JSON. types: other JSON types, for the API's description."""
    value = fields.raw(name, {"type": [*types, "string"]})
    if not isinstance(value, str):
        return value
    path, encoded = fields.path(name), value.encode()
    if has_too_many_values(encoded):
        message = f"{path} has more than {MAX_VALUES} JSON values: send fewer"
        raise ApiError(400, message, param=path, code="too_many_values")
    try:
        return orjson.loads(encoded)
    except orjson.JSONDecodeError as error:
        message = f"{path} is a string that is not valid JSON: {error}"
        raise ApiError(400, message, param=path, code="invalid_json") from error


def _read_tag_format(fields: FieldReader) -> dict[str, JSON]:
    tag_format = fields.raw("format", {"type": "object"})
    if not isinstance(tag_format, dict):
        raise fields.wrong("format", 'an object with the field "type"')
    path = fields.path("format")
    format_with_schema_paths = _add_schema_paths(tag_format, path, 0)
    if len(orjson.dumps(tag_format)) > MAX_GRAMMAR_LENGTH:
        message = f"{path} may have at most {MAX_GRAMMAR_LENGTH} bytes as JSON"
        raise ApiError(400, message, param=path, code="invalid_value")
    return cast("dict[str, JSON]", format_with_schema_paths)


def _add_schema_paths(tag_part: JSON, path: str, depth: int) -> JSON:
    """Returns a copy of `tag_part` in which each `json_schema` has a sibling `place`: the schema's path, for errors."""
    if depth > MAX_TAG_DEPTH:
        raise ApiError(400, f"{path} is nested deeper than {MAX_TAG_DEPTH}", param=path, code="invalid_value")
    if isinstance(tag_part, list):
        return [_add_schema_paths(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(tag_part)]
    if not isinstance(tag_part, dict):
        return tag_part
    has_schema = isinstance(tag_part.get("json_schema"), dict | bool)
    result = {
        name: value if name == "json_schema" and has_schema else _add_schema_paths(value, f"{path}.{name}", depth + 1)
        for name, value in tag_part.items()
    }
    if has_schema:
        schema_path = f"{path}.json_schema"
        require_small_schema(tag_part["json_schema"], schema_path)
        result["place"] = schema_path
    return result
