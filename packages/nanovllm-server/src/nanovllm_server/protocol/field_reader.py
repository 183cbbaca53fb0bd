"""Reads a JSON object field by field. Every error names the field, its value and the allowed values.

`schema_recording.py` records the calls of these methods, to derive the API's description.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias, TypeGuard

from nanovllm_server.protocol.error import ApiError, bad_field, missing_field
from nanovllm_server.protocol.json import JSON

# A JSON schema (draft 2020-12).
Schema: TypeAlias = dict[str, JSON]
ANYTHING: Schema = {}
# Above this number, several integers have the same 64-bit float.
MAX_EXACT_FLOAT = 1 << 53


class FieldReader:
    """Reads one object's fields. Methods return None if a field is absent or null. path: "" for the request's body."""

    def __init__(self, values: dict[str, JSON], path: str = ""):
        self._values = values
        self._path = path
        self._names_read: set[str] = set()
        # Readers of nested objects, by path.
        self._nested_readers: dict[str, FieldReader] = {}

    def path(self, name: str) -> str:
        """Returns the path of the field `name`, for `param` in errors."""
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str, documented_schema: Schema = ANYTHING) -> JSON:  # noqa: ARG002
        """Reads a value without checks. documented_schema: for the API's description, see `schema_recording.py`."""
        self._names_read.add(name)
        return self._values.get(name)

    def unknown_paths(self) -> list[str]:
        """Returns the paths of the fields that no method has read, here and in the objects that were read from here."""
        paths = [self.path(name) for name in self._values if name not in self._names_read]
        return paths + [path for reader in self._nested_readers.values() for path in reader.unknown_paths()]

    def wrong(self, name: str, expected: str) -> ApiError:
        """Returns the error for a wrong or absent field. expected: text after "must be" in the message."""
        if name not in self._values:
            return missing_field(self.path(name), expected)
        return bad_field(self.path(name), expected, self._values[name])

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """Reads an integer from `low` to `high` (None for no limit). 5.0 is the integer 5; true is not an integer."""
        value = self.raw(name)
        if value is None:
            return None
        integer = as_integer(value)
        if integer is None or integer < low or (high is not None and integer > high):
            bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise self.wrong(name, f"an integer {bounds}")
        return integer

    def number(self, name: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        """Reads a number from `low` to `high`. above_low: `low` itself is not allowed."""
        value = self.raw(name)
        if value is None:
            return None
        if not is_number(value, low, high) or (above_low and value == low):
            bounds = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
            raise self.wrong(name, f"a number {bounds}")
        return float(value)

    def boolean(self, name: str) -> bool | None:
        """Reads true or false. Other values, such as 0 and "false", are errors."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, max_length: int | None = None, documented_schema: Schema = ANYTHING) -> str | None:  # noqa: ARG002
        """Reads a string of at most `max_length` characters (None: no limit)."""
        value = self.raw(name)
        if value is not None and (not isinstance(value, str) or (max_length is not None and len(value) > max_length)):
            raise self.wrong(name, "a string" + (f" of at most {max_length} characters" if max_length else ""))
        return value

    def one_of(self, name: str, choices: Sequence[str]) -> str | None:
        """Reads one of the strings `choices`."""
        value = self.raw(name)
        if value is not None and not (isinstance(value, str) and value in choices):
            raise self.wrong(name, "one of " + ", ".join(f'"{choice}"' for choice in choices))
        return value

    def array(
        self,
        name: str,
        expected: str,
        max_items: int | None = None,
        items: Schema = ANYTHING,  # noqa: ARG002
    ) -> list[JSON] | None:
        """Reads an array without checking its items. expected: text after "must be". items: schema of each item."""
        value = self.raw(name)
        if value is not None and not (isinstance(value, list) and (max_items is None or len(value) <= max_items)):
            raise self.wrong(name, expected)
        return value

    def mapping(self, name: str) -> dict[str, JSON] | None:
        """Reads an object with any fields."""
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return value

    def child(self, name: str) -> "FieldReader | None":
        """Returns a reader of the object in the field `name`."""
        value = self.mapping(name)
        return None if value is None else self._read_nested(name, value, self.path(name))

    def element(self, name: str, index: int, value: JSON, expected: str) -> "FieldReader":
        """Returns a reader of `value`, the object at `index` in the array `name`. expected: text after "must be"."""
        path = f"{self.path(name)}[{index}]"
        if not isinstance(value, dict):
            raise bad_field(path, expected, value)
        return self._read_nested(name, value, path)

    def _read_nested(self, name: str, value: dict[str, JSON], path: str) -> "FieldReader":
        return self._nested_readers.setdefault(path, self._make_reader(name, value, path))

    def _make_reader(self, name: str, value: dict[str, JSON], path: str) -> "FieldReader":  # noqa: ARG002
        return FieldReader(value, path)


def exceeds_depth(value: JSON, max_depth: int) -> bool:
    """Whether arrays and objects are nested more than `max_depth` levels deep."""
    # Not recursive, because deep values would overflow the stack.
    values_at_depth = [value]
    for _ in range(max_depth + 1):
        values_at_depth = [
            child
            for parent in values_at_depth
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
    return bool(values_at_depth)


def as_integer(value: JSON) -> int | None:
    """Returns the integer for an integer or a float such as 5.0, which some clients send. Returns None otherwise."""
    if type(value) is float and value.is_integer() and abs(value) < MAX_EXACT_FLOAT:
        return int(value)
    return value if type(value) is int else None


def is_number(value: JSON, low: float, high: float) -> TypeGuard[int | float]:
    """Whether `value` is a finite number from `low` to `high`. True and false are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return low <= value <= high and math.isfinite(value)
