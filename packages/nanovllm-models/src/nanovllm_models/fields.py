"""Reads typed fields of a JSON object in a checkpoint. Errors name the field.

This module does not import torch, so that processes that use only the tokenizer start fast.
"""

import json
import math
import textwrap
from pathlib import Path

from nanovllm_models.errors import ModelError

MAX_SHOWN_LENGTH = 100


class JsonFields:
    """The fields of one JSON object. A field with the value null counts as absent.

    values: the object.
    source: name of the object in error messages.
    """

    def __init__(self, values: dict[str, object], source: str):
        self.source = source
        self._values = values

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self._values.get(name) is not None

    def positive_integer(self, name: str, default: int | None = None) -> int:
        """Return an integer above 0; `default` if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise self.error(name, "an integer above 0")

    def non_negative_integer(self, name: str, default: int) -> int:
        """Return an integer of at least 0; `default` if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        raise self.error(name, "an integer from 0 on")

    def positive_number(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0; `default` if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        raise self.error(name, "a number above 0")

    def non_negative_number(self, name: str) -> float:
        """Return a finite number of at least 0; 0 if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            return 0.0
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
            return float(value)
        raise self.error(name, "a number from 0 on")

    def boolean(self, name: str, default: bool) -> bool:
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

    def non_negative_integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers of at least 0; an empty one if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(type(entry) is int and entry >= 0 for entry in value):
            return tuple(value)
        raise self.error(name, "a list of integers from 0 on")

    def positive_integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers above 0; the field must be present. Raises ModelError."""
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

    def nested(self, name: str) -> "JsonFields":
        """Return an object inside this object; an empty one if the field is absent. Raises ModelError."""
        value = self._values.get(name)
        if value is None:
            value = {}
        if isinstance(value, dict):
            return JsonFields(value, f"{name} of {self.source}")
        raise self.error(name, "an object")

    def string_mapping(self, name: str) -> dict[str, str]:
        """Return an object whose values are strings; the field must be present. Raises ModelError."""
        value = self._values.get(name)
        if isinstance(value, dict) and all(isinstance(entry, str) for entry in value.values()):
            return value
        raise self.error(name, "an object of strings")

    def error(self, name: str, expected: str) -> ModelError:
        """Return the error for a field with an invalid value. expected: description of the valid values."""
        if not self.has(name):
            return ModelError(f"{name} of {self.source} is missing: it must be {expected}")
        value_text = textwrap.shorten(json.dumps(self._values[name]), MAX_SHOWN_LENGTH, placeholder=" ...")
        return ModelError(f"{name} of {self.source} is {value_text}, but must be {expected}")


def read_fields(file: Path) -> JsonFields:
    """Read the object in a JSON file. Raises ModelError if the file can't be read or holds no object."""
    try:
        values = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"can't read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return JsonFields(values, str(file))
