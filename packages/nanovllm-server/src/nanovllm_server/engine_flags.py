"""Derives command-line flags from the fields of `EngineConfig`."""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nanovllm_core.config import MAX_DRAFTS, EngineConfig
from nanovllm_server.flag_types import integer_in_range

# Flag value that lets the engine choose.
_AUTO = "auto"
# Flag value for None, by field. All other optional fields use `_AUTO`.
_NONE_VALUES = {"speculate": "none"}
# Smallest and largest value, by integer field.
_BOUNDS = {"num_speculative_tokens": (1, MAX_DRAFTS)}
# Fields whose default depends on other flags. Without the field's own flag, the parsed options lack the field.
_WITHOUT_DEFAULT = frozenset({"kv_offload_gib"})
_SHORT_FLAGS = {"tensor_parallel_size": ("-tp",)}
_DEFAULT_BY_FIELD = {field.name: field.default for field in fields(EngineConfig)}


def add_engine_flags(add_flag: Callable[..., object], field_names: Sequence[str]) -> None:
    """Adds one flag for each of these fields of `EngineConfig`.

    A boolean field gets the flag `--NAME` if its default is False, else `--no-NAME`. In the help text, names of other
    fields become flags.
    """
    hints = get_type_hints(EngineConfig, include_extras=True)
    for name in field_names:
        field_type, description = get_args(hints[name])
        description = re.sub(r"\w+_\w+", _to_flag, description)
        flag = name.replace("_", "-")
        value_type, is_optional = _split_optional(field_type)
        has_default = not is_optional and name not in _WITHOUT_DEFAULT
        options: dict[str, Any] = {"default": _DEFAULT_BY_FIELD[name] if has_default else argparse.SUPPRESS}
        if value_type is bool:
            turns_on = _DEFAULT_BY_FIELD[name] is False
            if not turns_on:
                flag, description = f"no-{flag}", f"do not {description}"
            options = {"default": argparse.SUPPRESS, "dest": name, "action": "store_const", "const": turns_on}
        elif get_origin(value_type) is Literal:
            choices = get_args(value_type)
            if is_optional and isinstance(choices[0], str):
                options["default"] = _NONE_VALUES.get(name, _AUTO)
                choices = (options["default"], *choices)
            options |= {"type": type(choices[0]), "choices": choices}
        elif value_type is Path:
            options |= {"type": Path, "metavar": "DIR" if name.endswith("_dir") else "FILE"}
        elif name in _BOUNDS:
            options["type"] = integer_in_range(*_BOUNDS[name])
        else:
            # Every optional integer is a size of at least 1.
            options["type"] = integer_in_range(1) if value_type is int and is_optional else value_type
        add_flag(*_SHORT_FLAGS.get(name, ()), f"--{flag}", help=description.replace("%", "%%"), **options)


def add_draft_model_flag(add_flag: Callable[..., object]) -> None:
    """Adds the flag of the draft model."""
    add_flag(
        "--draft-model",
        metavar="MODEL",
        help="draft model of --speculate draft, with the model's vocabulary: a directory, a repository, or "
        "SmolLM2-135M-Instruct, which is the default model",
    )


def find_draft_model_error(speculate: str | None, draft_model: str | None) -> str | None:
    """Returns an error message if only one of --speculate draft and --draft-model is set, else None."""
    if (speculate == "draft") == (draft_model is not None):
        return None
    if draft_model is None:
        return "--speculate draft needs a draft model: add --draft-model"
    return f"--draft-model {draft_model} is used only with --speculate draft: add that flag, or leave out --draft-model"


def make_engine_config(options: argparse.Namespace, **overrides: Any) -> EngineConfig:
    """Makes the configuration from the flags of `add_engine_flags`. overrides: field values that override flags."""
    for name, value in vars(options).items():
        if name in _DEFAULT_BY_FIELD:
            is_none = _DEFAULT_BY_FIELD[name] is None and value == _NONE_VALUES.get(name, _AUTO)
            overrides.setdefault(name, None if is_none else value)
    return EngineConfig(**overrides)


def _to_flag(match: re.Match[str]) -> str:
    """Returns the flag of the field that `match` names, or the text of `match` if it names no field."""
    return f"--{match[0].replace('_', '-')}" if match[0] in _DEFAULT_BY_FIELD else match[0]


def _split_optional(field_type: Any) -> tuple[Any, bool]:
    """Returns the type without None, and whether `field_type` allows None."""
    if get_origin(field_type) not in (Union, UnionType):
        return field_type, False
    (value_type,) = set(get_args(field_type)) - {NoneType}
    return value_type, True
