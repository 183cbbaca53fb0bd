"""Builds the grammar of an answer: reasoning, followed by tool calls, text in the requested format, or both."""

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
    unconverted_json_value,
)
from nanovllm_core.grammar_types import GrammarSpec
from nanovllm_models.chat_formats import ToolCallFormat
from nanovllm_server.constraint.call_grammar import (
    MAX_CALLS,
    call_beginnings,
    calls_grammar,
    can_omit_opening_tag,
    text_and_calls_grammar,
)
from nanovllm_server.parsing.model_format import ModelFormat, ReasoningState
from nanovllm_server.parsing.parser import MAX_LINE_BREAKS_AFTER_REASONING
from nanovllm_server.protocol.answer import AnswerRule, ChoiceAnswer, GrammarAnswer, JsonAnswer, RegexAnswer, TagAnswer
from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.tools import Function, Toolbox

MAX_GRAMMAR_BYTES = 1 << 20
# Text that may separate the reasoning from the content or calls.
LINE_BREAKS = regex(rf"\n{{0,{MAX_LINE_BREAKS_AFTER_REASONING}}}")


@dataclass(frozen=True, slots=True)
class AnswerConstraint:
    """The constraint on an answer.

    spec: grammar of the whole answer.
    field_grammars: (path, grammar) of each request field that `spec` includes. If `spec` does not compile, these
        grammars show which field is at fault.
    unused_grammars: (path, grammar) of each request field that `spec` ignores. These grammars must compile too.
    calls_only_at_start: if an answer has calls, its first text after the reasoning is a call.
    """

    spec: GrammarSpec
    field_grammars: tuple[tuple[str, GrammarSpec], ...]
    unused_grammars: tuple[tuple[str, GrammarSpec], ...]
    calls_only_at_start: bool

    @property
    def path(self) -> str:
        """The request field to name in an error about the whole `spec`."""
        return self.field_grammars[0][0] if len(self.field_grammars) == 1 else "tools"


def constrain(
    answer_rule: AnswerRule | None, tools: Toolbox | None, model_format: ModelFormat, reasoning_state: ReasoningState
) -> AnswerConstraint | None:
    """Returns the constraint on the answer; None for free text. Raises ApiError (400) if a grammar is too large.

    answer_rule: format that the client requests for content; None if content is free text.
    reasoning_state: state of the reasoning at the end of the prompt.
    """
    call_format = model_format.chat_format.tool_calls if tools is not None else None
    if tools is None or call_format is None or not (tools.needs_grammar or answer_rule is not None):
        if answer_rule is None:
            return None
        spec = _content_spec(answer_rule)
        field_grammars, unused_grammars = ((answer_rule.path, spec),), ()
        if reasoning_state == "closed":
            return _with_checked_size(AnswerConstraint(spec, field_grammars, (), calls_only_at_start=False))
        content, calls_only_at_start = _content_grammar(answer_rule), False
    else:
        functions = [*tools.functions.values()]
        content, calls_only_at_start = _content_and_calls_format(answer_rule, tools, call_format, functions)
        function_grammars = tuple(
            (function.path, _json_spec(function.enforced_schema, function.path))
            for function in functions
            if function.is_enforced
        )
        answer_grammars = () if answer_rule is None else ((answer_rule.path, _content_spec(answer_rule)),)
        if tools.mode != "auto":
            field_grammars, unused_grammars = function_grammars, answer_grammars
        elif isinstance(answer_rule, TagAnswer):
            field_grammars, unused_grammars = answer_grammars, function_grammars
        else:
            field_grammars, unused_grammars = function_grammars + answer_grammars, ()
    spec = _structural_tag_spec(sequence(*_reasoning_grammars(model_format, reasoning_state, call_format), content))
    return _with_checked_size(AnswerConstraint(spec, field_grammars, unused_grammars, calls_only_at_start))


def _content_and_calls_format(
    answer_rule: AnswerRule | None, tools: Toolbox, call_format: ToolCallFormat, functions: Sequence[Function]
) -> tuple[TagFormat, bool]:
    """Returns (format of content and calls, `AnswerConstraint.calls_only_at_start`)."""
    max_calls = MAX_CALLS if tools.allows_parallel_calls else 1
    if tools.mode != "auto":
        return calls_grammar(call_format, functions, max_calls), True
    match answer_rule:
        case None:
            return text_and_calls_grammar(call_format, functions, max_calls), can_omit_opening_tag(call_format)
        case TagAnswer():
            # The client's structural tag itself defines where the answer may have calls.
            return _content_grammar(answer_rule), False
        case _:
            return either([calls_grammar(call_format, functions, max_calls), _content_grammar(answer_rule)]), True


def _reasoning_grammars(
    model_format: ModelFormat, reasoning_state: ReasoningState, call_format: ToolCallFormat | None
) -> Iterator[TagFormat]:
    reasoning_format = model_format.chat_format.reasoning
    if reasoning_format is None or reasoning_state == "closed":
        return
    # A call within reasoning would end the reasoning, and no grammar would constrain this call.
    excluded_texts = call_beginnings(call_format) if call_format is not None and call_format.ends_reasoning else ()
    body = sequence(any_text((reasoning_format.end, *excluded_texts)), literal(reasoning_format.end), LINE_BREAKS)
    yield body if reasoning_state == "open" else optional(sequence(literal(reasoning_format.begin), body))


def _content_grammar(answer_rule: AnswerRule) -> TagFormat:
    match answer_rule:
        case JsonAnswer(path, schema):
            return unconverted_json_value(schema, path)
        case RegexAnswer(pattern=pattern):
            return regex(pattern)
        case ChoiceAnswer(choices=choices):
            return either([literal(choice) for choice in choices])
        case GrammarAnswer(grammar=grammar):
            return ebnf(grammar)
        case TagAnswer(tag_format=tag_format):
            return tag_format


def _content_spec(answer_rule: AnswerRule) -> GrammarSpec:
    match answer_rule:
        case JsonAnswer(path, schema):
            return _json_spec(schema, path)
        case RegexAnswer(pattern=pattern):
            return GrammarSpec("regex", pattern)
        case GrammarAnswer(grammar=grammar):
            return GrammarSpec("ebnf", grammar)
        case ChoiceAnswer() | TagAnswer():
            return _structural_tag_spec(_content_grammar(answer_rule))


def _json_spec(schema: JSON, path: str) -> GrammarSpec:
    return GrammarSpec("json_schema", orjson.dumps(schema).decode(), path)


def _structural_tag_spec(tag_format: TagFormat) -> GrammarSpec:
    structural_tag = {"type": "structural_tag", "format": tag_format}
    return GrammarSpec("structural_tag", orjson.dumps(structural_tag).decode())


def _with_checked_size(constraint: AnswerConstraint) -> AnswerConstraint:
    """Returns `constraint` unchanged. Raises ApiError (400) if a grammar of `constraint` is too large."""
    for path, spec in (
        *constraint.field_grammars,
        *constraint.unused_grammars,
        (constraint.path, constraint.spec),
    ):
        size = len(spec.source.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise ApiError(
                400,
                f"{path} is {size} bytes long as a grammar, but at most {MAX_GRAMMAR_BYTES} are supported: make it "
                "shorter",
                param=path,
                code="invalid_value",
            )
    return constraint
