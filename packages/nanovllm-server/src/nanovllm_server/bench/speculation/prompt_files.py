"""Reads the prompts of the command `speculation`: one text file per kind of prompt."""

import re
from dataclasses import dataclass
from pathlib import Path

# Kinds of prompts, in the order in which tables list them. Each kind has a file in this directory.
FILE_BY_KIND = {"summary": "summaries.txt", "code edit": "code_edits.txt", "chat": "chats.txt"}
_HEADING = re.compile(r"^=== (.+) ===\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user's message. kind: a key of FILE_BY_KIND. name: unique among all prompts."""

    kind: str
    name: str
    text: str


def read_prompts(max_per_kind: int | None = None) -> list[Prompt]:
    """Reads the prompts of all kinds, in the order of the files.

    max_per_kind: maximum number of prompts of each kind, evenly spread over the file; None for all prompts.
    """
    prompts: list[Prompt] = []
    for kind in FILE_BY_KIND:
        prompts_of_kind = _read_file(kind)
        num_selected = min(max_per_kind or len(prompts_of_kind), len(prompts_of_kind))
        prompts += [prompts_of_kind[index * len(prompts_of_kind) // num_selected] for index in range(num_selected)]
    return prompts


def _read_file(kind: str) -> list[Prompt]:
    """Splits a file at its headings. A heading is a line such as `=== name ===`; the prompt follows."""
    _, *parts = _HEADING.split((Path(__file__).parent / FILE_BY_KIND[kind]).read_text(encoding="utf-8"))
    return [Prompt(kind, name, text.strip()) for name, text in zip(parts[::2], parts[1::2], strict=True)]
