"""JSON values: their type, a key for comparison, and a short form for error messages."""

from typing import TypeAlias

import orjson

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"

SHOWN_CHARACTERS = 80


def show(value: JSON) -> str:
    """`value` as JSON, shortened for error messages."""
    match value:
        case dict() if value:
            return "an object"
        # Nested values may be too deep to serialise.
        case list() if len(value) > 4 or any(isinstance(item, dict | list) for item in value):
            return f"an array of {len(value)} {'items' if len(value) > 1 else 'item'}"
        case str() if len(value) > SHOWN_CHARACTERS:
            text = orjson.dumps(value[:SHOWN_CHARACTERS]).decode()
            return f'{text[:-1]}..." ({len(value)} characters)'
        case _:
            text = orjson.dumps(value).decode()
            return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def key_of(value: JSON) -> str:
    """A string that is the same for equal values only. 1 and 1.0 are equal, 1 and true are not."""
    match value:
        case dict():
            return "{" + ",".join(f"{key_of(name)}:{key_of(value[name])}" for name in sorted(value)) + "}"
        case list():
            return "[" + ",".join(key_of(item) for item in value) + "]"
        case float() if value.is_integer():
            return str(int(value))
        case int() if not isinstance(value, bool):
            return str(value)
        case _:
            return orjson.dumps(value).decode()
