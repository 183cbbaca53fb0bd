"""What one model writes beside plain text: a parser for each answer, and the special tokens that it must see.

This room must not know HTTP, engines or how parsers work.
"""

from dataclasses import fields

from nanovllm_models.chat_formats import ChatFormat, ReasoningFormat, ToolCallFormat
from nanovllm_server.detokenize import Vocabulary
from nanovllm_server.parsing.calls import Tools
from nanovllm_server.parsing.parser import Parser


class Dialect:
    """The format of one model, over its vocabulary."""

    def __init__(self, form: ChatFormat, vocabulary: Vocabulary):
        self._form = form
        self._reasoning_tags = _tags(form.reasoning, vocabulary)
        self._tags = self._reasoning_tags | _tags(form.tool_calls, vocabulary)

    @property
    def has_calls(self) -> bool:
        """Whether it is known how the model calls tools."""
        return self._form.tool_calls is not None

    def tags(self, tools: Tools | None) -> frozenset[int]:
        """The special tokens that are part of an answer's text, for the parser to see."""
        return self._reasoning_tags if tools is None else self._tags

    def parser(self, prompt: str, tools: Tools | None) -> Parser:
        """The parser of one answer to `prompt`; tools: the functions it may call, None when it may not call any."""
        reasoning = self._form.reasoning
        begun = reasoning is not None and prompt.rstrip().endswith(reasoning.begin)
        return Parser(self._form, reasoning_begun=begun, tools=tools)


def _tags(form: ReasoningFormat | ToolCallFormat | None, vocabulary: Vocabulary) -> frozenset[int]:
    if form is None:
        return frozenset()
    words = [getattr(form, field.name) for field in fields(form)]
    return vocabulary.special(word for word in words if isinstance(word, str))
