"""The tables of flags in the README describe the parser of `nanovllm-server`."""

import argparse
import dataclasses
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from nanovllm_core import EngineConfig
from nanovllm_server import cli

README = Path(__file__).parent.parent / "README.md"
FLAGS_SECTION = README.read_text().split("\n## Flags\n")[1].split("\n## ")[0]
ACTIONS = {
    action.option_strings[-1]: action
    for action in cli.make_parser()._actions
    if action.option_strings and action.dest not in ("help", "version")
}
ACTIONS_WITH_CHOICES = [flag for flag, action in ACTIONS.items() if action.choices is not None]


class Row(NamedTuple):
    default: str
    meaning: str


def split_row(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n").split(" | ")]


def read_rows() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for line in FLAGS_SECTION.splitlines():
        if re.match(r"\| `--[^|]*\|[^|]*\|[^|]*\|$", line) and (flag := re.findall(r"--[a-z-]+", line)[0]) in line[:40]:
            first_cell, default, meaning = split_row(line)
            assert re.fullmatch(rf"`{flag}( [A-Z]+)?`", first_cell), f"{first_cell}: one flag per row"
            assert flag not in rows, f"{flag} has two rows"
            rows[flag] = Row(default, meaning)
    return rows


ROWS = read_rows()


def values_of_own_table(flag: str) -> set[str]:
    """Returns the first column of the table whose header starts with `flag`, or an empty set."""
    _, found, table = FLAGS_SECTION.partition(f"\n\n| `{flag}` |")
    lines = table.split("\n\n")[0].splitlines()[2:] if found else []
    return {re.findall("`([^`]+)`", line)[0] for line in lines}


def test_the_tables_have_exactly_the_flags_of_the_parser():
    assert set(ROWS) == set(ACTIONS)


def test_every_flag_has_a_help_text():
    assert all(action.help for action in cli.make_parser()._actions)


@pytest.mark.parametrize("flag", ACTIONS)
def test_the_documented_default_is_the_default_of_the_parser(flag):
    action, cell = ACTIONS[flag], ROWS[flag].default
    if action.nargs == 0:
        assert cell == "off"
    elif action.default == "auto":
        assert cell == "auto" or cell.startswith("auto: ")
    elif action.default not in (None, argparse.SUPPRESS):
        assert cell == (f"{action.default:g}" if isinstance(action.default, float) else str(action.default))


@pytest.mark.parametrize("flag", ACTIONS_WITH_CHOICES)
def test_the_documented_values_are_those_of_the_parser(flag):
    row, choices = ROWS[flag], ACTIONS[flag].choices
    assert choices is not None
    expected = {str(choice) for choice in choices}
    if isinstance(next(iter(choices)), int):
        assert set(re.findall(r"\b\d+\b", f"{row.default} {row.meaning.split(';')[0]}")) == expected
        return
    documented = values_of_own_table(flag) or set(re.findall("`([^`]+)`", row.meaning))
    # The default needs no description.
    default = ACTIONS[flag].default
    assert documented | (set() if default is None else {str(default)}) == expected


@pytest.mark.parametrize("backend", ["torch", "triton", "flash", "cutedsl", "fastest", "auto"])
def test_each_documented_attention_backend_is_accepted(backend):
    settings = cli.make_settings(cli.make_parser().parse_args(["--attention-backend", backend]))
    assert settings.engine_config.attention_backend == (None if backend == "auto" else backend)


def test_the_served_name_flag_takes_one_name_and_may_be_repeated():
    settings = cli.make_settings(cli.make_parser().parse_args(["--served-model-name", "a", "org/model"]))
    assert (settings.model, settings.model_names) == ("org/model", ("a",))
    settings = cli.make_settings(cli.make_parser().parse_args(["--served-model-name", "a", "--served-model-name", "b"]))
    assert (settings.model, settings.model_names) == (None, ("a", "b"))


def test_help_texts_name_flags_instead_of_fields():
    fields = {field.name for field in dataclasses.fields(EngineConfig) if "_" in field.name}
    help_texts = " ".join(action.help or "" for action in ACTIONS.values())
    assert not fields & set(re.findall(r"\w+", help_texts))
    assert "needs --kv-offload-gib" in help_texts


def test_help_shows_no_default_that_is_none_or_off():
    text = " ".join(cli.make_parser().format_help().split())
    assert "(default: 8000)" in text
    assert not re.findall(r"\(default: (?:None|False)\)", text)
    assert "do not use torch.compile" in text
