"""Structural tags for arguments in formats that have one element per parameter; `parsing.typed` reads the values.

Strings are written as they are, other values as JSON. No value may contain the tag that ends it.
"""

from nanovllm_core.grammar.schemas.characters import PLAIN, common, invert
from nanovllm_core.grammar.schemas.regex import NOTHING, Node, narrow, parse
from nanovllm_core.grammar.schemas.spelling import write, write_value
from nanovllm_models.chat_formats import XmlCalls
from nanovllm_server.constraint.structure import (
    Part,
    any_text,
    either,
    json_value,
    literal,
    optional,
    regex,
    repeated,
    sequence,
)
from nanovllm_server.parsing.source import MAX_NAME
from nanovllm_server.parsing.typed import resolved, types_of
from nanovllm_server.protocol.error import ApiError, unsupported
from nanovllm_server.protocol.json import JSON

# Most parameters of a function whose schema does not name them.
MAX_UNNAMED = 16
# Most characters of a name in an error.
MAX_SHOWN = 80
NAME = r"[a-zA-Z_][a-zA-Z0-9_]{0,63}"
# Keywords that the schema of parameters may have, as a result of `check_schema`.
KNOWN = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "$anchor"})


def parameters(form: XmlCalls, schema: JSON, path: str) -> Part:
    """The elements of all parameters, in the order of the schema. Parameters that are not required are optional.

    schema: schema of an object, as a result of `check_schema`.

    Raises ApiError (400) for parameters that such elements can't hold or can't distinguish.
    """
    root = schema if isinstance(schema, dict) else {}
    branches = root.get("anyOf")
    if isinstance(branches, list):
        return either([_parameters(form, resolved(branch, root), root, path) for branch in branches])
    return _parameters(form, root, root, path)


def _parameters(form: XmlCalls, schema: JSON, root: dict[str, JSON], path: str) -> Part:
    if not isinstance(schema, dict):
        raise _impossible(path)
    if unknown := schema.keys() - KNOWN:
        raise _impossible(f"{path}/{min(unknown)}")
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return _unnamed(form, schema, root, path)
    required = schema.get("required")
    needed = required if isinstance(required, list) else []
    parts: list[Part] = []
    for key, value in properties.items():
        where = f"{path}/properties/{key[:MAX_SHOWN]}"
        if key.strip() != key or not 0 < len(key) <= MAX_NAME or "\n" in key or form.key_end in key:
            raise _impossible(where)
        part = _element(form, literal(key), _value(form, value, root, where))
        parts.append(part if key in needed else optional(part))
    return sequence(*parts)


def _unnamed(form: XmlCalls, schema: dict[str, JSON], root: dict[str, JSON], path: str) -> Part:
    """Parameters of any names, if the schema allows any object; else no parameters."""
    value = schema.get("additionalProperties", False)
    if value is False:
        return literal("")
    part = _value(form, value, root, f"{path}/additionalProperties")
    return repeated(_element(form, regex(NAME), part), MAX_UNNAMED)


def _element(form: XmlCalls, key: Part, value: Part) -> Part:
    edge = literal("\n" if form.newlines else "")
    begin = sequence(literal(form.parameter_begin), key, literal(form.key_end), edge)
    return sequence(begin, value, edge, literal(f"{form.parameter_end}\n"))


def _value(form: XmlCalls, schema: JSON, root: dict[str, JSON], path: str) -> Part:
    types = types_of(schema, root)
    if "string" in types:
        texts = _texts(form, schema, root, path)
        if not texts:
            raise _impossible(path)
        return either([*texts, literal("null")] if "null" in types else texts)
    embedded = _without_end(form, schema, path)
    if isinstance(embedded, dict) and "$defs" in root:
        embedded = {**embedded, "$defs": _without_end(form, root["$defs"], path)}
    return json_value(embedded, (form.parameter_end,))


def _texts(form: XmlCalls, schema: JSON, root: dict[str, JSON], path: str) -> list[Part]:
    """The strings that a schema allows. Other values are left out: unquoted text could be a string or such a value."""
    schema = resolved(schema, root)
    match schema:
        case {"anyOf": list(branches)}:
            return [text for branch in branches for text in _texts(form, branch, root, path)]
        case {"enum": list(values)}:
            return [literal(text) for text in values if isinstance(text, str) and form.parameter_end not in text]
        case {"type": "string", "pattern": str(pattern)}:
            return [regex(write(_without(form, pattern, path)).removeprefix("^").removesuffix("$"))]
        case {"type": "string"}:
            return [any_text((form.parameter_end,))]
        case _:
            return []


def _without_end(form: XmlCalls, schema: JSON, path: str) -> JSON:
    """The schema with patterns that exclude the tag which ends a value. xgrammar excludes it from other strings."""
    if isinstance(schema, list):
        return [_without_end(form, item, path) for item in schema]
    if not isinstance(schema, dict):
        return schema
    match schema:
        case {"type": "string", "pattern": str(pattern)}:
            return {**schema, "pattern": write_value(_without(form, pattern, path))}
        case {"enum": list()}:
            return schema
        case {"type": "object", "patternProperties": _}:
            raise _impossible(f"{path}/patternProperties")
        case _:
            return {name: _without_end(form, value, path) for name, value in schema.items()}


def _without(form: XmlCalls, pattern: str, path: str) -> Node:
    """The pattern (a result of `check_schema`) without the first character of the tag that ends a value."""
    first = ord(form.parameter_end[0])
    tree = narrow(parse(pattern.removeprefix("^").removesuffix("$")), common(PLAIN, invert(((first, first),))))
    if tree == NOTHING:
        raise _impossible(f"{path}/pattern")
    return tree


def _impossible(path: str) -> ApiError:
    return unsupported(path, f"{path} can't be enforced in the format of this model's calls: leave it out")
