"""Tool calls as structural tags, each format's own way of writing them, so that `parsing` reads back what came.

This room must not know requests: it gets functions with the schema that their arguments are to follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from nanovllm_models.chat_formats import FencedCalls, JsonCalls, ToolCallFormat, XmlCalls
from nanovllm_server.constraint.parameters import parameters
from nanovllm_server.constraint.structure import (
    Part,
    any_text,
    either,
    json_value,
    literal,
    optional,
    regex,
    repeated,
    sequence,
)
from nanovllm_server.protocol.json import JSON

# In one answer. A small model that may go on calling may never stop.
MAX_CALLS = 16
# Spaces and line breaks with which an answer may begin.
MAX_LEADING = 4


@dataclass(frozen=True, slots=True)
class Callee:
    """A function that may be called. schema: that of an object, which its arguments are to follow. path: of it."""

    name: str
    schema: JSON
    path: str


def calls(form: ToolCallFormat, callees: Sequence[Callee], most: int) -> Part:
    """One to `most` calls and nothing else. Raises ApiError (400) for parameters that the format can't write."""
    match form:
        case JsonCalls():
            call = _json_call(form, callees)
            return _several(call, f"{form.separator} " if form.separator else "\n", most)
        case FencedCalls():
            call = _fenced_call(form, callees)
            return sequence(literal(form.begin), _several(call, "\n", most), literal(form.end))
        case XmlCalls():
            call = _xml_call(form, callees)
            begin, end = sequence(literal(form.begin), literal("\n")), literal(form.end)
            if form.shared:
                return sequence(begin, _several(call, "", most), end)
            return _several(sequence(begin, call, end), "\n", most)


def text_with_calls(form: ToolCallFormat, callees: Sequence[Callee], most: int) -> Part:
    """Text, in which what begins a call goes on as one, up to `most` times. Raises as `calls` does.

    Where any object may be a call, the answer is text or calls, never both.
    """
    if isinstance(form, JsonCalls) and form.bare:
        return either([calls(form, callees, most), optional(_text_that_begins_no_call(form))])
    text = any_text(begins(form))
    return sequence(text, repeated(sequence(calls(form, callees, 1), text), most))


def begins(form: ToolCallFormat) -> tuple[str, ...]:
    """What within a text begins a call, as `parsing` sees it."""
    return (form.begin,) if isinstance(form, JsonCalls) else (form.begin, form.call_begin)


def is_bare(form: ToolCallFormat) -> bool:
    """Whether a call may begin like any other text, so that only what an answer begins with tells the two apart."""
    return isinstance(form, JsonCalls) and form.bare


def _several(call: Part, separator: str, most: int) -> Part:
    return call if most == 1 else sequence(call, repeated(sequence(literal(separator), call), most - 1))


def _text_that_begins_no_call(form: JsonCalls) -> Part:
    first, second = form.begin[0], form.begin[1]
    begin = rf"[ \n]{{0,{MAX_LEADING}}}([^{{\s{first}]|{first}[^{second}])"
    return sequence(regex(begin), any_text())


def _json_call(form: JsonCalls, callees: Sequence[Callee]) -> Part:
    key = orjson.dumps(form.arguments[0]).decode()

    def written(callee: Callee) -> Part:
        begin = literal(f'{{"name": "{callee.name}", {key}: ')
        return sequence(begin, json_value(callee.schema), literal("}"))

    call = either([written(callee) for callee in callees])
    return (
        call
        if form.end is None
        else sequence(literal(form.begin), literal("\n"), call, literal("\n"), literal(form.end))
    )


def _fenced_call(form: FencedCalls, callees: Sequence[Callee]) -> Part:
    def written(callee: Callee) -> Part:
        begin = literal(f"{callee.name}\n{form.fence_begin}\n")
        return sequence(begin, json_value(callee.schema), literal(f"\n{form.fence_end}"))

    return sequence(
        literal(form.call_begin),
        literal(form.kind),
        literal(form.name_begin),
        either([written(callee) for callee in callees]),
        literal(form.call_end),
    )


def _xml_call(form: XmlCalls, callees: Sequence[Callee]) -> Part:
    def written(callee: Callee) -> Part:
        return sequence(literal(f"{callee.name}{form.name_end}\n"), parameters(form, callee.schema, callee.path))

    functions = either([written(callee) for callee in callees])
    return sequence(literal(form.call_begin), functions, literal(form.call_end), literal("\n"))
