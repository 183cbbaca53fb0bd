"""JSON values as a type, and how error messages show them."""

from typing import TypeAlias

import orjson

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"

SHOWN_CHARACTERS = 80


def show(value: JSON) -> str:
    """`value` as JSON, shortened to what fits into a sentence."""
    match value:
        case dict() if value:
            return "an object"
        # What lies in it may be deeper than what can be written.
        case list() if len(value) > 4 or any(isinstance(item, dict | list) for item in value):
            return f"an array of {len(value)} {'items' if len(value) > 1 else 'item'}"
        case str() if len(value) > SHOWN_CHARACTERS:
            text = orjson.dumps(value[:SHOWN_CHARACTERS]).decode()
            return f'{text[:-1]}..." ({len(value)} characters)'
        case _:
            text = orjson.dumps(value).decode()
            return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
