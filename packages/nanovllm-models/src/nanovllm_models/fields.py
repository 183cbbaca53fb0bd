"""Reads the fields of a JSON object in a checkpoint: each with its type, its default and an error that names it.

This module does not import torch, so that a process that uses only the tokenizer can import it.
"""

import json
import math
import textwrap
from pathlib import Path

from nanovllm_models.errors import ModelError

VALUE_SHOWN = 100


class Fields:
    """The fields of one JSON object. A field that is null counts as absent.

    values: the object.
    where: name of the object in error messages.
    """

    def __init__(self, values: dict[str, object], where: str):
        self.where = where
        self._values = values

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer above 0; `default` if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise self.error(name, "an integer above 0")

    def count(self, name: str, default: int) -> int:
        """Return an integer of at least 0; `default` if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        raise self.error(name, "an integer from 0 on")

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0; `default` if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        raise self.error(name, "a number above 0")

    def weight(self, name: str) -> float:
        """Return a finite number of at least 0; 0 if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            return 0.0
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
            return float(value)
        raise self.error(name, "a number from 0 on")

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean; `default` if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self.error(name, "true or false")

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string; `default` if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, str):
            return value
        raise self.error(name, "a string")

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; an empty one if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            return tuple(value)
        raise self.error(name, "a list of strings")

    def indices(self, name: str) -> tuple[int, ...]:
        """Return a list of integers of at least 0; an empty one if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(type(entry) is int and entry >= 0 for entry in value):
            return tuple(value)
        raise self.error(name, "a list of integers from 0 on")

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers above 0, which must be present. Raises ModelError."""
        value = self._values.get(name)
        if isinstance(value, list) and all(type(entry) is int and entry > 0 for entry in value):
            return tuple(value)
        raise self.error(name, "a list of integers above 0")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return one token id or a list of token ids, as a tuple; () if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if all(isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0 for entry in values):
            return tuple(values)
        raise self.error(name, "a token id or a list of them")

    def fields(self, name: str) -> "Fields":
        """Return an object inside this object; an empty one if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            value = {}
        if isinstance(value, dict):
            return Fields(value, f"{name} of {self.where}")
        raise self.error(name, "an object")

    def mapping(self, name: str) -> dict[str, str]:
        """Return an object whose values are strings, which must be present. Raises ModelError."""
        value = self._values.get(name)
        if isinstance(value, dict) and all(isinstance(entry, str) for entry in value.values()):
            return value
        raise self.error(name, "an object of strings")

    def error(self, name: str, expected: str) -> ModelError:
        """Return the error for a field with a wrong value; `expected` says what the value must be."""
        if not self.has(name):
            return ModelError(f"{name} of {self.where} is missing: it must be {expected}")
        shown = textwrap.shorten(json.dumps(self._values[name]), VALUE_SHOWN, placeholder=" ...")
        return ModelError(f"{name} of {self.where} is {shown}, but must be {expected}")


def read_fields(file: Path) -> Fields:
    """Read the object in a JSON file. Raises ModelError if the file can't be read or holds no object."""
    try:
        values = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"can't read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return Fields(values, str(file))
