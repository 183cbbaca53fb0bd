"""Builds the grammar of an answer: reasoning, then calls, or text in the requested format, or both."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson

from nanovllm_core.grammar_types import GrammarSpec
from nanovllm_models.chat_formats import ToolCallFormat
from nanovllm_server.constraint.call_grammar import MAX_CALLS, Callee, begins, calls, is_bare, text_with_calls
from nanovllm_server.constraint.structure import (
    Part,
    any_text,
    ebnf,
    either,
    json_value,
    literal,
    optional,
    regex,
    sequence,
)
from nanovllm_server.parsing.model_format import ModelFormat, ReasoningState
from nanovllm_server.protocol.answer import Answer, ChoiceAnswer, GrammarAnswer, JsonAnswer, RegexAnswer, TagAnswer
from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.tools import Toolbox

# Largest grammar of one request, in bytes.
MAX_SOURCE = 1 << 20
# Text between reasoning and the content or calls.
GAP = regex(r"\n{0,2}")
ANY_OBJECT: JSON = {"type": "object"}


@dataclass(frozen=True, slots=True)
class AnswerConstraint:
    """The constraint on an answer.

    parts: path and own grammar of each field of the request that contributes, to find the field of a failure.
    calls_only_at_start: see `Parser`.
    """

    spec: GrammarSpec
    parts: tuple[tuple[str, GrammarSpec], ...]
    calls_only_at_start: bool

    @property
    def path(self) -> str:
        """The field that errors name if no single part fails."""
        return self.parts[0][0] if len(self.parts) == 1 else "tools"


def constrain(
    answer: Answer | None, tools: Toolbox | None, model_format: ModelFormat, reasoning_state: ReasoningState
) -> AnswerConstraint | None:
    """The constraint on the answer; None for a free answer. reasoning_state: see `ModelFormat.reasoning_state`.

    Raises ApiError (400) for parameters that the format of calls can't write, and for too large grammars.
    """
    form = model_format.chat_format.tool_calls if tools is not None else None
    if tools is None or form is None or not (tools.constrains or answer is not None):
        if answer is None:
            return None
        if reasoning_state == "closed":
            return _checked(
                AnswerConstraint(_own_spec(answer), ((answer.path, _own_spec(answer)),), calls_only_at_start=False)
            )
        content, parts, calls_only_at_start = _part(answer), [(answer.path, _own_spec(answer))], False
    else:
        callees = [
            Callee(name, function.parameters if function.enforced else ANY_OBJECT, function.path)
            for name, function in tools.functions.items()
        ]
        content, calls_only_at_start = _content(answer, tools, form, callees)
        parts = [(callee.path, _json_spec(callee.schema)) for callee in callees]
        if answer is not None and tools.mode == "auto":
            parts.append((answer.path, _own_spec(answer)))
    answer_grammar = sequence(*_reasoning(model_format, reasoning_state, form), content)
    return _checked(AnswerConstraint(_tag_spec(answer_grammar), tuple(parts), calls_only_at_start))


def _content(
    answer: Answer | None, tools: Toolbox, form: ToolCallFormat, callees: Sequence[Callee]
) -> tuple[Part, bool]:
    most = MAX_CALLS if tools.parallel else 1
    if tools.mode != "auto":
        return calls(form, callees, most), True
    match answer:
        case None:
            return text_with_calls(form, callees, most), is_bare(form)
        case TagAnswer():
            # A structural tag itself defines the calls and their places.
            return _part(answer), False
        case _:
            return either([calls(form, callees, most), _part(answer)]), True


def _reasoning(
    model_format: ModelFormat, reasoning_state: ReasoningState, calls_form: ToolCallFormat | None
) -> Iterator[Part]:
    form = model_format.chat_format.reasoning
    if form is None or reasoning_state == "closed":
        return
    # A call within reasoning would end the reasoning and escape the constraint.
    ends = begins(calls_form) if calls_form is not None and calls_form.ends_reasoning else ()
    body = sequence(any_text((form.end, *ends)), literal(form.end), GAP)
    yield body if reasoning_state == "open" else optional(sequence(literal(form.begin), body))


def _part(answer: Answer) -> Part:
    match answer:
        case JsonAnswer(schema=schema):
            return json_value(schema)
        case RegexAnswer(pattern=pattern):
            return regex(pattern)
        case ChoiceAnswer(choices=choices):
            return either([literal(choice) for choice in choices])
        case GrammarAnswer(grammar=grammar):
            return ebnf(grammar)
        case TagAnswer(tag_format=tag_format):
            return tag_format


def _own_spec(answer: Answer) -> GrammarSpec:
    match answer:
        case JsonAnswer(schema=schema):
            return _json_spec(schema)
        case RegexAnswer(pattern=pattern):
            return GrammarSpec("regex", pattern)
        case GrammarAnswer(grammar=grammar):
            return GrammarSpec("ebnf", grammar)
        case ChoiceAnswer() | TagAnswer():
            return _tag_spec(_part(answer))


def _json_spec(schema: JSON) -> GrammarSpec:
    return GrammarSpec("json_schema", orjson.dumps(schema).decode())


def _tag_spec(part: Part) -> GrammarSpec:
    return GrammarSpec("structural_tag", orjson.dumps({"type": "structural_tag", "format": part}).decode())


def _checked(constraint: AnswerConstraint) -> AnswerConstraint:
    for path, spec in (*constraint.parts, (constraint.path, constraint.spec)):
        size = len(spec.source.encode())
        if size > MAX_SOURCE:
            raise ApiError(
                400,
                f"{path} is {size} bytes long as a grammar, but at most {MAX_SOURCE} are supported: make it shorter",
                param=path,
                code="invalid_value",
            )
    return constraint
