"""Converts parameter values from a model's plain text to JSON, as the function's schema requires."""

import json

import orjson

from nanovllm_core.grammar.schemas.declared_types import declared_types
from nanovllm_server.protocol.json import JSON

# Some chat templates show Python's words to the model.
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def to_object_json(value: str | None) -> str | None:
    """Converts the arguments of a call to the JSON text of an object.

    value: JSON text of an object, or of null, which becomes {}; or of a string that contains such a text or only
        whitespace, which becomes {}.
    Returns None for any other value.
    """
    if value is None or value.startswith("{"):
        return value
    text = _loads_or_none(value) if value.startswith('"') else value
    if not isinstance(text, str):
        return None
    if text.strip() in ("", "null"):
        return "{}"
    return text if isinstance(_loads_or_none(text), dict) else None


def to_parameter_json(value: str, schema: JSON, key: str) -> str:
    """Converts the text `value` of the parameter `key` to JSON. schema: the schema of all parameters.

    If the parameter has no schema or may be a string, the text becomes a string. Exception: "null" becomes null if the
    parameter may also be null. For other parameters, JSON text stays unchanged, and other text becomes a string.
    These parameters also accept PYTHON_WORDS if they may be a boolean or null.
    """
    parameter_schema = _find_parameter_schema(schema, key)
    if not isinstance(parameter_schema, dict):
        return orjson.dumps(value).decode()
    types = declared_types(parameter_schema, schema)
    stripped = value.strip()
    if stripped in PYTHON_WORDS and ({"boolean", "null"} & types) and "string" not in types:
        return PYTHON_WORDS[stripped]
    if "string" in types:
        return "null" if stripped == "null" and "null" in types else orjson.dumps(value).decode()
    return stripped if _is_json(stripped) else orjson.dumps(value).decode()


def list_declared_parameters(schema: JSON) -> set[str]:
    """Returns the names of the declared parameters. schema: the schema of all parameters."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return {*properties} if isinstance(properties, dict) else set()


def _find_parameter_schema(schema: JSON, key: str) -> JSON:
    if not isinstance(schema, dict):
        return None
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    return schema.get("additionalProperties")


def _is_json(text: str) -> bool:
    # Don't use orjson here: orjson rejects large numbers and lone surrogates, which JSON allows.
    try:
        json.loads(text, parse_int=float, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _loads_or_none(text: str) -> JSON:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
