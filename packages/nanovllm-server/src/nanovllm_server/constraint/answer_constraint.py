"""Builds the grammar of an answer: reasoning, and then tool calls, text in the requested format, or both."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson

from nanovllm_core.grammar.structural_tag import (
    TagFormat,
    any_text,
    ebnf,
    either,
    literal,
    optional,
    regex,
    sequence,
    unconverted_json,
)
from nanovllm_core.grammar_types import GrammarSpec
from nanovllm_models.chat_formats import ToolCallFormat
from nanovllm_server.constraint.call_grammar import (
    MAX_CALLS,
    call_beginnings,
    calls_format,
    is_bare,
    text_with_calls,
)
from nanovllm_server.parsing.model_format import ModelFormat, ReasoningState
from nanovllm_server.protocol.answer import Answer, ChoiceAnswer, GrammarAnswer, JsonAnswer, RegexAnswer, TagAnswer
from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.tools import Function, Toolbox

# Maximum size of the grammar of one request, in bytes.
MAX_SOURCE_BYTES = 1 << 20
# Text between reasoning and the content or calls.
LINE_BREAKS = regex(r"\n{0,2}")


@dataclass(frozen=True, slots=True)
class AnswerConstraint:
    """The constraint on an answer.

    fields: (path, grammar) of each field of the request in `spec`. If `spec` fails, they show which field is wrong.
    unused_fields: (path, grammar) of each field without effect on this answer. These grammars must be valid, too.
    calls_only_at_start: see `Parser`.
    """

    spec: GrammarSpec
    fields: tuple[tuple[str, GrammarSpec], ...]
    unused_fields: tuple[tuple[str, GrammarSpec], ...]
    calls_only_at_start: bool

    @property
    def path(self) -> str:
        """The field that errors name if no single field fails on its own."""
        return self.fields[0][0] if len(self.fields) == 1 else "tools"


def constrain(
    answer: Answer | None, tools: Toolbox | None, model_format: ModelFormat, reasoning_state: ReasoningState
) -> AnswerConstraint | None:
    """The constraint on the answer; None for a free answer. reasoning_state: see `ModelFormat.reasoning_state`.

    The engine converts the JSON schemas later. Raises ApiError (400) if a grammar is too large.
    """
    call_form = model_format.chat_format.tool_calls if tools is not None else None
    if tools is None or call_form is None or not (tools.needs_grammar or answer is not None):
        if answer is None:
            return None
        spec = _answer_spec(answer)
        fields, unused_fields = ((answer.path, spec),), ()
        if reasoning_state == "closed":
            return _with_checked_size(AnswerConstraint(spec, fields, unused_fields, calls_only_at_start=False))
        content, calls_only_at_start = _answer_format(answer), False
    else:
        functions = [*tools.functions.values()]
        content, calls_only_at_start = _content_format(answer, tools, call_form, functions)
        function_fields = tuple(
            (function.path, _json_spec(function.enforced_schema, function.path))
            for function in functions
            if function.is_enforced
        )
        answer_fields = () if answer is None else ((answer.path, _answer_spec(answer)),)
        if tools.mode != "auto":
            fields, unused_fields = function_fields, answer_fields
        elif isinstance(answer, TagAnswer):
            fields, unused_fields = answer_fields, function_fields
        else:
            fields, unused_fields = function_fields + answer_fields, ()
    answer_format = sequence(*_reasoning_formats(model_format, reasoning_state, call_form), content)
    return _with_checked_size(AnswerConstraint(_tag_spec(answer_format), fields, unused_fields, calls_only_at_start))


def _content_format(
    answer: Answer | None, tools: Toolbox, form: ToolCallFormat, functions: Sequence[Function]
) -> tuple[TagFormat, bool]:
    """Returns (format of content and calls, `AnswerConstraint.calls_only_at_start`)."""
    max_calls = MAX_CALLS if tools.allows_parallel_calls else 1
    if tools.mode != "auto":
        return calls_format(form, functions, max_calls), True
    match answer:
        case None:
            return text_with_calls(form, functions, max_calls), is_bare(form)
        case TagAnswer():
            # A structural tag itself defines the calls and their places.
            return _answer_format(answer), False
        case _:
            return either([calls_format(form, functions, max_calls), _answer_format(answer)]), True


def _reasoning_formats(
    model_format: ModelFormat, reasoning_state: ReasoningState, call_form: ToolCallFormat | None
) -> Iterator[TagFormat]:
    form = model_format.chat_format.reasoning
    if form is None or reasoning_state == "closed":
        return
    # A call within reasoning would end the reasoning and escape the constraint.
    excludes = call_beginnings(call_form) if call_form is not None and call_form.ends_reasoning else ()
    body = sequence(any_text((form.end, *excludes)), literal(form.end), LINE_BREAKS)
    yield body if reasoning_state == "open" else optional(sequence(literal(form.begin), body))


def _answer_format(answer: Answer) -> TagFormat:
    match answer:
        case JsonAnswer(path, schema):
            return unconverted_json(schema, path)
        case RegexAnswer(pattern=pattern):
            return regex(pattern)
        case ChoiceAnswer(choices=choices):
            return either([literal(choice) for choice in choices])
        case GrammarAnswer(grammar=grammar):
            return ebnf(grammar)
        case TagAnswer(tag_format=tag_format):
            return tag_format


def _answer_spec(answer: Answer) -> GrammarSpec:
    match answer:
        case JsonAnswer(path, schema):
            return _json_spec(schema, path)
        case RegexAnswer(pattern=pattern):
            return GrammarSpec("regex", pattern)
        case GrammarAnswer(grammar=grammar):
            return GrammarSpec("ebnf", grammar)
        case ChoiceAnswer() | TagAnswer():
            return _tag_spec(_answer_format(answer))


def _json_spec(schema: JSON, path: str) -> GrammarSpec:
    return GrammarSpec("json_schema", orjson.dumps(schema).decode(), path)


def _tag_spec(tag_format: TagFormat) -> GrammarSpec:
    tag = {"type": "structural_tag", "format": tag_format}
    return GrammarSpec("structural_tag", orjson.dumps(tag).decode())


def _with_checked_size(constraint: AnswerConstraint) -> AnswerConstraint:
    """`constraint` itself. Raises ApiError (400) if a grammar in it is too large."""
    for path, spec in (*constraint.fields, *constraint.unused_fields, (constraint.path, constraint.spec)):
        size = len(spec.source.encode())
        if size > MAX_SOURCE_BYTES:
            raise ApiError(
                400,
                f"{path} is {size} bytes long as a grammar, but at most {MAX_SOURCE_BYTES} are supported: make it "
                "shorter",
                param=path,
                code="invalid_value",
            )
    return constraint
