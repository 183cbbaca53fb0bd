"""Reading a checkpoint's JSON files: every field has one type, an explicit default and an error that names it.

Parsed here rather than by transformers, whose import alone takes seconds. This room must not know any architecture,
only the fields that all of them share.
"""

import json
import math
import textwrap
from pathlib import Path

import torch

from nanovllm_core.layers.rotary import Llama3Scaling, RotaryConfig
from nanovllm_models.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What transformers assumes of a checkpoint that doesn't say.
DEFAULT_ROPE_THETA = 10000.0
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

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0. Raises ModelError."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        raise self.error(name, "a number above 0")

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


def parse_dtype(config: Fields) -> torch.dtype:
    """The dtype of the checkpoint, float32 when it doesn't say. Raises ModelError."""
    name = "dtype" if config.has("dtype") else "torch_dtype"
    dtype = DTYPES.get(config.text(name, "float32").removeprefix("torch."))
    if dtype is None:
        raise config.error(name, f"one of {', '.join(DTYPES)}")
    return dtype


def parse_eos_token_ids(path: Path, config: Fields) -> tuple[int, ...]:
    """The ids that end a sequence: of config.json, then those that generation_config.json adds. Raises ModelError."""
    generation = path / "generation_config.json"
    more = read_fields(generation).token_ids("eos_token_id") if generation.exists() else ()
    return tuple(dict.fromkeys(config.token_ids("eos_token_id") + more))


def parse_rotary(config: Fields, max_position: int) -> RotaryConfig:
    """Rotary embeddings: `rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` as before.

    Raises ModelError for a kind that is not implemented.
    """
    rope = config.fields("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    theta = rope.number("rope_theta", config.number("rope_theta", DEFAULT_ROPE_THETA))
    for fields in (config, rope):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.error("partial_rotary_factor", "1: rotating a part of each head is not supported")
    name = "rope_type" if rope.has("rope_type") else "type"
    match rope.text(name, "default"):
        case "default":
            return RotaryConfig(theta)
        case "llama3":
            original = config.integer("original_max_position_embeddings", max_position)
            return RotaryConfig(
                theta,
                Llama3Scaling(
                    factor=rope.number("factor"),
                    low_freq_factor=rope.number("low_freq_factor"),
                    high_freq_factor=rope.number("high_freq_factor"),
                    original_max_position=rope.integer("original_max_position_embeddings", original),
                ),
            )
        case _:
            raise rope.error(name, "default or llama3")
