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


def calls_grammar(call_format: ToolCallFormat, functions: Sequence[Function], max_calls: int) -> TagFormat:
    """Returns the grammar of one to `max_calls` calls without other text."""
    match call_format:
        case JsonCalls():
            call = _json_call(call_format, functions)
            return _one_or_more(call, f"{call_format.separator} " if call_format.separator else "\n", max_calls)
        case FencedCalls():
            call = _fenced_call(call_format, functions)
            return sequence(literal(call_format.begin), _one_or_more(call, "\n", max_calls), literal(call_format.end))
        case XmlCalls():
            call = _xml_call(call_format, functions)
            begin, end = sequence(literal(call_format.begin), literal("\n")), literal(call_format.end)
            if call_format.has_single_block:
                return sequence(begin, _one_or_more(call, "", max_calls), end)
            return _one_or_more(sequence(begin, call, end), "\n", max_calls)


def text_and_calls_grammar(call_format: ToolCallFormat, functions: Sequence[Function], max_calls: int) -> TagFormat:
    """Returns the grammar of text with up to `max_calls` calls. Text that begins like a call must be a call.

    If calls need no opening tag, the answer is either text or calls.
    """
    if isinstance(call_format, JsonCalls) and call_format.may_omit_begin:
        return either(
            [calls_grammar(call_format, functions, max_calls), optional(_text_without_calls_grammar(call_format))]
        )
    text = any_text(call_beginnings(call_format))
    return sequence(text, repeated(sequence(calls_grammar(call_format, functions, 1), text), max_calls))


def call_beginnings(call_format: ToolCallFormat) -> tuple[str, ...]:
    """Returns the texts that begin a call within other text. The package `parsing` looks for the same texts."""
    return (call_format.begin,) if isinstance(call_format, JsonCalls) else (call_format.begin, call_format.call_begin)


def can_omit_opening_tag(call_format: ToolCallFormat) -> bool:
    """Returns whether calls need no opening tag. If True, an answer has calls only if it begins with a call."""
    return isinstance(call_format, JsonCalls) and call_format.may_omit_begin


def _one_or_more(call: TagFormat, separator: str, max_calls: int) -> TagFormat:
    return call if max_calls == 1 else sequence(call, repeated(sequence(literal(separator), call), max_calls - 1))


def _text_without_calls_grammar(call_format: JsonCalls) -> TagFormat:
    # The text may not begin with { or with the first two characters of the opening tag.
    first, second = call_format.begin[0], call_format.begin[1]
    begin = rf"[ \n]{{0,{MAX_LEADING_SPACES}}}([^{{ \t\n\v\f\r{first}]|{first}[^{second}])"
    return sequence(regex(begin), any_text())


def _json_arguments(function: Function) -> TagFormat:
    any_object: JSON = {"type": "object"}
    schema = any_object if function.enforced_schema is None else function.enforced_schema
    return unconverted_json_value(schema, function.path, objects_only=True)


def _json_call(call_format: JsonCalls, functions: Sequence[Function]) -> TagFormat:
    arguments_key = orjson.dumps(call_format.argument_keys[0]).decode()

    def build_call(function: Function) -> TagFormat:
        begin = literal(f'{{"name": "{function.name}", {arguments_key}: ')
        return sequence(begin, _json_arguments(function), literal("}"))

    call = either([build_call(function) for function in functions])
    if call_format.end is None:
        return call
    return sequence(literal(f"{call_format.begin}\n"), call, literal(f"\n{call_format.end}"))


def _fenced_call(call_format: FencedCalls, functions: Sequence[Function]) -> TagFormat:
    def build_call(function: Function) -> TagFormat:
        begin = literal(f"{function.name}\n{call_format.fence_begin}\n")
        return sequence(begin, _json_arguments(function), literal(f"\n{call_format.fence_end}"))

    return sequence(
        literal(call_format.call_begin),
        literal(call_format.kind),
        literal(call_format.name_begin),
        either([build_call(function) for function in functions]),
        literal(call_format.call_end),
    )


def _xml_call(call_format: XmlCalls, functions: Sequence[Function]) -> TagFormat:
    def build_call(function: Function) -> TagFormat:
        parameters = XmlParameters(
            begin=call_format.parameter_begin,
            key_end=call_format.key_end,
            end=call_format.parameter_end,
            # If no end tag follows, the parser ends a value before the next parameter and before the next call.
            tags=(call_format.parameter_end, call_format.parameter_begin, call_format.call_begin),
            wraps_values_in_line_breaks=call_format.wraps_values_in_line_breaks,
            json_schema=function.enforced_schema,
            place=function.path,
        )
        return sequence(literal(f"{function.name}{call_format.name_end}\n"), msgspec.to_builtins(parameters))

    call = either([build_call(function) for function in functions])
    return sequence(literal(call_format.call_begin), call, literal(call_format.call_end), literal("\n"))
