"""Defines the type of JSON values, and writes values as comparison keys and as short texts for errors."""

from typing import TypeAlias

import orjson

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"

MAX_SHOWN_CHARACTERS = 80  # Maximum number of characters of a value in an error message.


def describe_value(value: JSON) -> str:
    """Describe `value` for an error message."""
    match value:
        case dict() if value:
            return "an object"
        # Arrays of arrays or objects are not written, because they may be deeper than orjson can write.
        case list() if len(value) > 4 or any(isinstance(item, dict | list) for item in value):
            return f"an array of {len(value)} {'items' if len(value) > 1 else 'item'}"
        case str() if len(value) > MAX_SHOWN_CHARACTERS:
            text = orjson.dumps(value[:MAX_SHOWN_CHARACTERS]).decode()
            return f'{text[:-1]}..." ({len(value)} characters)'
        case _:
            text = orjson.dumps(value).decode()
            return text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "..."


def equality_key(value: JSON) -> str:
    """A text that two values share if and only if they are equal. 1 and 1.0 are equal; 1 and true differ."""
    match value:
        case dict():
            return "{" + ",".join(f"{equality_key(name)}:{equality_key(value[name])}" for name in sorted(value)) + "}"
        case list():
            return "[" + ",".join(equality_key(item) for item in value) + "]"
        case float() if value.is_integer():
            return str(int(value))
        case int() if not isinstance(value, bool):
            return str(value)
        case _:
            return orjson.dumps(value).decode()
