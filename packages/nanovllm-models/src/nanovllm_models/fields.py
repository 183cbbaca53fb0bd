"""Reads typed fields of JSON objects. Does not import torch, so that processes without a model start fast."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanovllm_models.errors import ModelError

# Maximum length of a value in an error message.
MAX_VALUE_CHARACTERS = 100


class JsonFields:
    """The fields of one JSON object. A null field counts as absent. source: name of the object in error messages.

    Methods that read a field raise ModelError for an invalid field, and for an absent field that has no default.
    """

    def __init__(self, values: dict[str, object], source: str):
        self.source = source
        self._values = values

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self._values.get(name) is not None

    def positive_integer(self, name: str, default: int | None = None) -> int:
        """Return an integer above 0."""
        return self._read(name, lambda value: _is_integer(value) and value > 0, "an integer above 0", default)

    def non_negative_integer(self, name: str, default: int) -> int:
        """Return an integer of at least 0."""
        return self._read(name, _is_non_negative_integer, "an integer of at least 0", default)

    def positive_number(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        return float(self._read(name, lambda value: _is_finite(value) and value > 0, "a number above 0", default))

    def non_negative_number(self, name: str) -> float:
        """Return a finite number of at least 0; 0 if the field is absent."""
        return float(self._read(name, lambda value: _is_finite(value) and value >= 0, "a number of at least 0", 0.0))

    def boolean(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        return self._read(name, lambda value: isinstance(value, bool), "true or false", default)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        return self._read(name, lambda value: isinstance(value, str), "a string", default)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings as a tuple; () if the field is absent."""
        return tuple(self._read(name, _make_list_check(lambda entry: isinstance(entry, str)), "a list of strings", ()))

    def non_negative_integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers of at least 0 as a tuple; () if the field is absent."""
        is_valid = _make_list_check(_is_non_negative_integer)
        return tuple(self._read(name, is_valid, "a list of integers of at least 0", ()))

    def positive_integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers above 0 as a tuple."""
        is_valid = _make_list_check(lambda entry: _is_integer(entry) and entry > 0)
        return tuple(self._read(name, is_valid, "a list of integers above 0"))

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return one token id or a list of token ids as a tuple; () if the field is absent."""
        if _is_non_negative_integer(self._values.get(name)):
            return (self._values[name],)
        is_valid = _make_list_check(_is_non_negative_integer)
        return tuple(self._read(name, is_valid, "a token id or a list of token ids", ()))

    def nested(self, name: str) -> "JsonFields":
        """Return an object inside this object; an empty object if the field is absent."""
        values = self._read(name, lambda value: isinstance(value, dict), "an object", {})
        return JsonFields(values, f"{name} of {self.source}")

    def string_mapping(self, name: str) -> dict[str, str]:
        """Return an object whose values are strings."""

        def is_valid(value: Any) -> bool:
            return isinstance(value, dict) and all(isinstance(entry, str) for entry in value.values())

        return self._read(name, is_valid, "an object of strings")

    def error(self, name: str, expected: str) -> ModelError:
        """Return the error for a field with an invalid value. expected: description of the valid values."""
        if not self.has(name):
            return ModelError(f"{name} of {self.source} is missing: it must be {expected}")
        value_text = json.dumps(self._values[name])
        if len(value_text) > MAX_VALUE_CHARACTERS:
            value_text = f"{value_text[: MAX_VALUE_CHARACTERS - 4]} ..."
        return ModelError(f"{name} of {self.source} is {value_text}, but must be {expected}")

    def _read(self, name: str, is_valid: Callable[[Any], bool], expected: str, default: Any = None) -> Any:
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if is_valid(value):
            return value
        raise self.error(name, expected)


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


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_non_negative_integer(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _make_list_check(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(is_valid(entry) for entry in value)
