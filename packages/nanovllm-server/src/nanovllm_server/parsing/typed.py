"""Converts parameter values that models write as plain text to JSON, by the function's schema."""

import json

import orjson

from nanovllm_server.protocol.json import JSON

# Most references that are followed in a row: they may be circular.
MAX_DEPTH = 8
# Names of JSON Schema for the types of values.
TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
# Python's spelling of these values, which some templates teach.
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def json_object(value: str | None) -> str | None:
    """The arguments of a call as JSON text: `value` if it is an object, its content if it is a string with an object.

    null is {}. Returns None for any other value.
    """
    if value is None or value == "null":
        return value and "{}"
    if value.startswith('"'):
        text = _loads(value)
        return text if isinstance(text, str) and isinstance(_loads(text), dict) else None
    return value if value.startswith("{") else None


def typed_json(value: str, schema: JSON, key: str) -> str:
    """Converts the text `value` of the parameter `key` to JSON. schema: the schema of all parameters.

    If the schema allows a string, the result is a string, or null if that is allowed too.
    Otherwise the result is `value` itself if it is JSON, else a string.
    """
    types = types_of(_property(schema, key), schema)
    word = value.strip()
    if word in PYTHON_WORDS and ({"boolean", "null"} & types) and "string" not in types:
        return PYTHON_WORDS[word]
    if "string" in types:
        return "null" if word == "null" and "null" in types else orjson.dumps(value).decode()
    return word if _is_json(word) else orjson.dumps(value).decode()


def _property(schema: JSON, key: str) -> JSON:
    if not isinstance(schema, dict):
        return None
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    return schema.get("additionalProperties")


def types_of(schema: JSON, root: JSON) -> set[str]:
    """The types that a schema within `root` names for its values; empty if it names none."""
    return _types(schema, root, MAX_DEPTH)


def resolved(schema: JSON, root: JSON) -> JSON:
    """Follows the references of a schema within `root`; returns a schema without a reference."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            break
        schema = _referred(reference, root)
    return schema


def _types(schema: JSON, root: JSON, depth: int) -> set[str]:
    """Like `types_of`. depth: remaining number of references and nested schemas."""
    if not isinstance(schema, dict) or not depth:
        return set()
    types: set[str] = set()
    match schema.get("type"):
        case str() as kind:
            types.add(kind)
        case list() as kinds:
            types.update(kind for kind in kinds if isinstance(kind, str))
        case _:
            pass
    if not types:
        values = schema.get("enum")
        constants = values if isinstance(values, list) else [schema["const"]] if "const" in schema else []
        types.update(TYPES[type(constant)] for constant in constants)
    for name in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(name)
        for part in parts if isinstance(parts, list) else []:
            types |= _types(part, root, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        types |= _types(_referred(reference, root), root, depth - 1)
    return types


def _referred(reference: str, root: JSON) -> JSON:
    if not reference.startswith("#/"):
        return None
    schema = root
    for name in reference[2:].split("/"):
        if not isinstance(schema, dict):
            return None
        schema = schema.get(name.replace("~1", "/").replace("~0", "~"))
    return schema


def _is_json(text: str) -> bool:
    # Not orjson: it rejects large numbers and lone surrogates, which JSON allows.
    try:
        json.loads(text, parse_int=float, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _loads(text: str) -> JSON:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
