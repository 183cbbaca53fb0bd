"""Structural tags for tool calls in each format. The package `parsing` can read every call that they allow."""

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

# Most calls in one answer: without a limit, a small model may never stop.
MAX_CALLS = 16
# Most spaces and line breaks at the beginning of an answer.
MAX_LEADING = 4


@dataclass(frozen=True, slots=True)
class Callee:
    """A function that the model may call.

    schema: schema of the arguments, which must be an object.
    path: path of the schema in the request.
    """

    name: str
    schema: JSON
    path: str


def calls(form: ToolCallFormat, callees: Sequence[Callee], most: int) -> Part:
    """One to `most` calls and nothing else. Raises ApiError (400) for parameters that the format can't write."""
    match form:
        case JsonCalls():
            call = _json_call(form, callees)
            return _up_to(call, f"{form.separator} " if form.separator else "\n", most)
        case FencedCalls():
            call = _fenced_call(form, callees)
            return sequence(literal(form.begin), _up_to(call, "\n", most), literal(form.end))
        case XmlCalls():
            call = _xml_call(form, callees)
            begin, end = sequence(literal(form.begin), literal("\n")), literal(form.end)
            if form.shared:
                return sequence(begin, _up_to(call, "", most), end)
            return _up_to(sequence(begin, call, end), "\n", most)


def text_with_calls(form: ToolCallFormat, callees: Sequence[Callee], most: int) -> Part:
    """Text with up to `most` calls in it: whatever begins like a call must be one.

    In bare formats, the answer is text or calls, never both. Raises ApiError like `calls`.
    """
    if isinstance(form, JsonCalls) and form.bare:
        return either([calls(form, callees, most), optional(_text_that_begins_no_call(form))])
    text = any_text(begins(form))
    return sequence(text, repeated(sequence(calls(form, callees, 1), text), most))


def begins(form: ToolCallFormat) -> tuple[str, ...]:
    """The texts with which a call begins within other text; `parsing` looks for the same ones."""
    return (form.begin,) if isinstance(form, JsonCalls) else (form.begin, form.call_begin)


def is_bare(form: ToolCallFormat) -> bool:
    """Whether calls need no opening tag. Only an answer that begins with a call can then have calls."""
    return isinstance(form, JsonCalls) and form.bare


def _up_to(call: Part, separator: str, most: int) -> Part:
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
