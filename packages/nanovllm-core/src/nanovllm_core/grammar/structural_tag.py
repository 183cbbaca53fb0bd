"""Builds grammars as JSON in the notation of xgrammar 0.2.

xgrammar calls such a grammar a structural tag. The parts of a structural tag are called formats.
"""

from collections.abc import Iterable, Sequence
from typing import cast

from nanovllm_core.grammar.schemas.json_values import JSON

# A format describes texts. It is a JSON object whose field `type` names the kind of format.
TagFormat = dict[str, JSON]
EMPTY_TEXT: TagFormat = {"type": "const_string", "value": ""}


def literal(text: str) -> TagFormat:
    """Exactly the text `text`."""
    return {"type": "const_string", "value": text}


def any_text(excludes: Iterable[str] = ()) -> TagFormat:
    """Any text, including the empty text, in which none of `excludes` occurs."""
    return {"type": "any_text", "excludes": [*excludes]}


def regex(pattern: str) -> TagFormat:
    """Text that `pattern` matches as a whole."""
    return {"type": "regex", "pattern": pattern}


def ebnf(grammar: str) -> TagFormat:
    """Text that matches the rule `root` of `grammar`."""
    return {"type": "grammar", "grammar": grammar}


def json_value(schema: JSON, excludes: Sequence[str] = ()) -> TagFormat:
    """JSON that `schema`, a result of `convert_schema`, allows.

    excludes: texts that no string may contain. Strings for which `schema` has a pattern are exempt.
    """
    return {"type": "json_schema", "json_schema": schema, "excludes": [*excludes]}


def unconverted_json_value(schema: JSON, place: str, *, objects_only: bool = False) -> TagFormat:
    """JSON that `schema` allows. xgrammar can't read this format: `convert_grammar` converts the schema first.

    place: JSON pointer to the schema, for errors.
    objects_only: exclude values other than objects.
    """
    return {"type": "json_schema", "json_schema": schema, "place": place, "objects_only": objects_only}


def sequence(*formats: TagFormat) -> TagFormat:
    """The formats one after another."""
    joined: list[TagFormat] = []
    for outer in formats:
        for element in cast("list[TagFormat]", outer["elements"]) if outer["type"] == "sequence" else [outer]:
            if element == EMPTY_TEXT:
                continue
            previous = joined[-1] if joined else None
            # Join adjacent literals, because fewer elements make a smaller grammar.
            if previous is not None and previous["type"] == element["type"] == "const_string":
                joined[-1] = literal(f"{previous['value']}{element['value']}")
            else:
                joined.append(element)
    if len(joined) < 2:
        return joined[0] if joined else EMPTY_TEXT
    return {"type": "sequence", "elements": [*joined]}


def either(formats: Sequence[TagFormat]) -> TagFormat:
    """One of the formats."""
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": [*formats]}


def optional(content: TagFormat) -> TagFormat:
    """`content` or nothing."""
    return {"type": "optional", "content": content}


def repeated(content: TagFormat, max_times: int) -> TagFormat:
    """`content`, 0 to `max_times` times."""
    return {"type": "repeat", "min": 0, "max": max_times, "content": content}
