"""Builds the grammar (a structural tag of xgrammar) of tool calls in each format. `parsing` reads the same formats."""

from collections.abc import Sequence

import msgspec
import orjson

from nanovllm_core.grammar.structural_tag import (
    TagFormat,
    any_text,
    either,
    literal,
    optional,
    regex,
    repeated,
    sequence,
    unconverted_json_value,
)
from nanovllm_core.grammar.xml_parameters import XmlParameters
from nanovllm_models.chat_formats import FencedCalls, JsonCalls, ToolCallFormat, XmlCalls
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.tools import Function

# Maximum number of calls in one answer: without a limit, a small model may never stop.
MAX_CALLS = 16
# Maximum number of spaces and line breaks at the beginning of an answer without calls.
MAX_LEADING_SPACES = 4


def calls_grammar(form: ToolCallFormat, functions: Sequence[Function], max_calls: int) -> TagFormat:
    """Returns the grammar of one to `max_calls` calls without other text."""
    match form:
        case JsonCalls():
            call = _json_call(form, functions)
            return _one_or_more(call, f"{form.separator} " if form.separator else "\n", max_calls)
        case FencedCalls():
            call = _fenced_call(form, functions)
            return sequence(literal(form.begin), _one_or_more(call, "\n", max_calls), literal(form.end))
        case XmlCalls():
            call = _xml_call(form, functions)
            begin, end = sequence(literal(form.begin), literal("\n")), literal(form.end)
            if form.has_single_block:
                return sequence(begin, _one_or_more(call, "", max_calls), end)
            return _one_or_more(sequence(begin, call, end), "\n", max_calls)


def text_and_calls_grammar(form: ToolCallFormat, functions: Sequence[Function], max_calls: int) -> TagFormat:
    """Returns the grammar of text with up to `max_calls` calls. Text that begins like a call must be a call.

    If calls need no opening tag, the answer is either text or calls.
    """
    if isinstance(form, JsonCalls) and form.may_omit_begin:
        return either([calls_grammar(form, functions, max_calls), optional(_text_without_calls_grammar(form))])
    text = any_text(call_beginnings(form))
    return sequence(text, repeated(sequence(calls_grammar(form, functions, 1), text), max_calls))


def call_beginnings(form: ToolCallFormat) -> tuple[str, ...]:
    """Returns the texts that begin a call within other text. The package `parsing` looks for the same texts."""
    return (form.begin,) if isinstance(form, JsonCalls) else (form.begin, form.call_begin)


def can_omit_opening_tag(form: ToolCallFormat) -> bool:
    """Returns whether calls need no opening tag. If True, an answer has calls only if it begins with a call."""
    return isinstance(form, JsonCalls) and form.may_omit_begin


def _one_or_more(call: TagFormat, separator: str, max_calls: int) -> TagFormat:
    return call if max_calls == 1 else sequence(call, repeated(sequence(literal(separator), call), max_calls - 1))


def _text_without_calls_grammar(form: JsonCalls) -> TagFormat:
    # The text may not begin with { or with the first two characters of the opening tag.
    first, second = form.begin[0], form.begin[1]
    begin = rf"[ \n]{{0,{MAX_LEADING_SPACES}}}([^{{\s{first}]|{first}[^{second}])"
    return sequence(regex(begin), any_text())


def _json_arguments(function: Function) -> TagFormat:
    any_object: JSON = {"type": "object"}
    schema = any_object if function.enforced_schema is None else function.enforced_schema
    return unconverted_json_value(schema, function.path, objects_only=True)


def _json_call(form: JsonCalls, functions: Sequence[Function]) -> TagFormat:
    arguments_key = orjson.dumps(form.argument_keys[0]).decode()

    def build_call(function: Function) -> TagFormat:
        begin = literal(f'{{"name": "{function.name}", {arguments_key}: ')
        return sequence(begin, _json_arguments(function), literal("}"))

    call = either([build_call(function) for function in functions])
    if form.end is None:
        return call
    return sequence(literal(f"{form.begin}\n"), call, literal(f"\n{form.end}"))


def _fenced_call(form: FencedCalls, functions: Sequence[Function]) -> TagFormat:
    def build_call(function: Function) -> TagFormat:
        begin = literal(f"{function.name}\n{form.fence_begin}\n")
        return sequence(begin, _json_arguments(function), literal(f"\n{form.fence_end}"))

    return sequence(
        literal(form.call_begin),
        literal(form.kind),
        literal(form.name_begin),
        either([build_call(function) for function in functions]),
        literal(form.call_end),
    )


def _xml_call(form: XmlCalls, functions: Sequence[Function]) -> TagFormat:
    def build_call(function: Function) -> TagFormat:
        parameters = XmlParameters(
            begin=form.parameter_begin,
            key_end=form.key_end,
            end=form.parameter_end,
            wraps_values_in_line_breaks=form.wraps_values_in_line_breaks,
            json_schema=function.enforced_schema,
            place=function.path,
        )
        return sequence(literal(f"{function.name}{form.name_end}\n"), msgspec.to_builtins(parameters))

    call = either([build_call(function) for function in functions])
    return sequence(literal(form.call_begin), call, literal(form.call_end), literal("\n"))
