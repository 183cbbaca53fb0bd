"""Constructors for the parts of a structural tag (xgrammar 0.2, `xgrammar.structural_tag`), as JSON."""

from collections.abc import Iterable, Sequence
from typing import cast

from nanovllm_server.protocol.json import JSON

# A part of a structural tag: an object with `type`.
Part = dict[str, JSON]
EMPTY: Part = {"type": "const_string", "value": ""}


def literal(text: str) -> Part:
    """Exactly that text."""
    return {"type": "const_string", "value": text}


def any_text(excludes: Iterable[str] = ()) -> Part:
    """Any text, including the empty one, in which none of `excludes` occurs."""
    return {"type": "any_text", "excludes": [*excludes]}


def regex(pattern: str) -> Part:
    """Text that the pattern matches as a whole."""
    return {"type": "regex", "pattern": pattern}


def ebnf(grammar: str) -> Part:
    """Text of a grammar's rule `root`."""
    return {"type": "grammar", "grammar": grammar}


def json_value(schema: JSON, excludes: Sequence[str] = ()) -> Part:
    """JSON of a schema. excludes: texts that must not occur in strings without a pattern, format or length."""
    part: Part = {"type": "json_schema", "json_schema": schema}
    if excludes:
        part["excludes"] = [*excludes]
    return part


def sequence(*parts: Part) -> Part:
    """The parts one after another."""
    joined: list[Part] = []
    for part in parts:
        for each in cast("list[Part]", part["elements"]) if part["type"] == "sequence" else [part]:
            if each == EMPTY:
                continue
            last = joined[-1] if joined else None
            # Fewer parts make a smaller grammar.
            if last is not None and last["type"] == each["type"] == "const_string":
                joined[-1] = literal(f"{last['value']}{each['value']}")
            else:
                joined.append(each)
    if len(joined) < 2:
        return joined[0] if joined else EMPTY
    return {"type": "sequence", "elements": [*joined]}


def either(parts: Sequence[Part]) -> Part:
    """One of the parts."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": [*parts]}


def optional(part: Part) -> Part:
    """The part or nothing."""
    return {"type": "optional", "content": part}


def repeated(part: Part, most: int) -> Part:
    """The part, 0 to `most` times."""
    return {"type": "repeat", "min": 0, "max": most, "content": part}
