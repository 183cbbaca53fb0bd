"""The fields of a JSON object in a checkpoint: each has one type, an explicit default and an error that names it.

Imports no torch, so that a process that wants only text can read them. This room must not know what any field means.
"""

import json
import math
import textwrap
from pathlib import Path

from nanovllm_models.errors import ModelError

VALUE_SHOWN = 100


class Fields:
    """The fields of one JSON object; `where` is how errors name it. A field that is null counts as absent."""

    def __init__(self, values: dict[str, object], where: str):
        self.where = where
        self._values = values

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number above 0. Raises ModelError."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise self.error(name, "an integer above 0")

    def count(self, name: str, default: int) -> int:
        """A whole number from 0 on. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        raise self.error(name, "an integer from 0 on")

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0. Raises ModelError."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        raise self.error(name, "a number above 0")

    def weight(self, name: str) -> float:
        """A number from 0 on, which it is if absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            return 0.0
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
            return float(value)
        raise self.error(name, "a number from 0 on")

    def flag(self, name: str, default: bool) -> bool:
        """True or false. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self.error(name, "true or false")

    def text(self, name: str, default: str | None = None) -> str:
        """A string. Raises ModelError."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, str):
            return value
        raise self.error(name, "a string")

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings, none if it is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            return tuple(value)
        raise self.error(name, "a list of strings")

    def indices(self, name: str) -> tuple[int, ...]:
        """A list of integers from 0 on, none if it is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(type(entry) is int and entry >= 0 for entry in value):
            return tuple(value)
        raise self.error(name, "a list of integers from 0 on")

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers above 0. Raises ModelError."""
        value = self._values.get(name)
        if isinstance(value, list) and all(type(entry) is int and entry > 0 for entry in value):
            return tuple(value)
        raise self.error(name, "a list of integers above 0")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them, none if it is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if all(isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0 for entry in values):
            return tuple(values)
        raise self.error(name, "a token id or a list of them")

    def fields(self, name: str) -> "Fields":
        """An object within this one, empty if it is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            value = {}
        if isinstance(value, dict):
            return Fields(value, f"{name} of {self.where}")
        raise self.error(name, "an object")

    def mapping(self, name: str) -> dict[str, str]:
        """An object of strings. Raises ModelError."""
        value = self._values.get(name)
        if isinstance(value, dict) and all(isinstance(entry, str) for entry in value.values()):
            return value
        raise self.error(name, "an object of strings")

    def error(self, name: str, right: str) -> ModelError:
        """What to raise about a field that is not as it should be."""
        if not self.has(name):
            return ModelError(f"{name} of {self.where} is missing: it must be {right}")
        shown = textwrap.shorten(json.dumps(self._values[name]), VALUE_SHOWN, placeholder=" ...")
        return ModelError(f"{name} of {self.where} is {shown}, but must be {right}")


def read_fields(file: Path) -> Fields:
    """The object in a JSON file. Raises ModelError when it can't be read or holds none."""
    try:
        values = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"can't read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return Fields(values, str(file))
