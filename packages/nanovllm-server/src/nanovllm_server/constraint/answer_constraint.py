"""From a request to the grammar that its answer is held to: reasoning first, then calls, what was asked for, or both.

This room must not know engines: it names the grammar, and says which part of the request to blame for one that is none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson

from nanovllm_core.request import GrammarSpec
from nanovllm_models.chat_formats import ToolCallFormat
from nanovllm_server.chat.model_format import ModelFormat, Opening
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
from nanovllm_server.protocol.answer import Answer, ChoiceAnswer, GrammarAnswer, JsonAnswer, RegexAnswer, TagAnswer
from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.tools import Toolbox

# In bytes, of all that one request is held to.
MAX_SOURCE = 1 << 20
# Between reasoning and what follows it.
GAP = regex(r"\n{0,2}")
ANY_OBJECT: JSON = {"type": "object"}


@dataclass(frozen=True, slots=True)
class AnswerConstraint:
    """What an answer is held to. parts: what of it each field of the request wants, by the field's path, alone.

    apart: an answer that doesn't begin with a call has none.
    """

    spec: GrammarSpec
    parts: tuple[tuple[str, GrammarSpec], ...]
    apart: bool

    @property
    def path(self) -> str:
        """The field that wants all of it."""
        return self.parts[0][0] if len(self.parts) == 1 else "tools"


def constrain(
    answer: Answer | None, tools: Toolbox | None, model_format: ModelFormat, opening: Opening
) -> AnswerConstraint | None:
    """What the answer to a prompt that ends with that `opening` is held to; None if it is free.

    Raises ApiError (400) for what the model's format of calls can't say, and for too much of it.
    """
    form = model_format.chat_format.tool_calls if tools is not None else None
    if tools is None or form is None or not (tools.constrains or answer is not None):
        if answer is None:
            return None
        if opening == "over":
            return _checked(AnswerConstraint(_alone(answer), ((answer.path, _alone(answer)),), apart=False))
        content, parts, apart = _part(answer), [(answer.path, _alone(answer))], False
    else:
        callees = [
            Callee(name, function.parameters if function.enforced else ANY_OBJECT, function.path)
            for name, function in tools.functions.items()
        ]
        content, apart = _content(answer, tools, form, callees)
        parts = [(callee.path, _json_spec(callee.schema)) for callee in callees]
        if answer is not None and tools.mode == "auto":
            parts.append((answer.path, _alone(answer)))
    whole = sequence(*_reasoning(model_format, opening, form), content)
    return _checked(AnswerConstraint(_tag_spec(whole), tuple(parts), apart))


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
            # Whoever writes one says what may be called, and where.
            return _part(answer), False
        case _:
            return either([calls(form, callees, most), _part(answer)]), True


def _reasoning(model_format: ModelFormat, opening: Opening, calls_form: ToolCallFormat | None) -> Iterator[Part]:
    form = model_format.chat_format.reasoning
    if form is None or opening == "over":
        return
    # A call would end it, and be under no constraint.
    ends = begins(calls_form) if calls_form is not None and calls_form.ends_reasoning else ()
    body = sequence(any_text((form.end, *ends)), literal(form.end), GAP)
    yield body if opening == "begun" else optional(sequence(literal(form.begin), body))


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
        case TagAnswer(form=form):
            return form


def _alone(answer: Answer) -> GrammarSpec:
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
                f"{path} is {size} bytes long as a grammar, of at most {MAX_SOURCE}: make it shorter",
                param=path,
                code="invalid_value",
            )
    return constraint
