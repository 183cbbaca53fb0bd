"""What one model writes beside plain text: a parser for each answer, and the special tokens that it must see.

This room must not know HTTP, engines or how parsers work.
"""

from dataclasses import fields
from typing import Literal

from nanovllm_models.chat_formats import ChatFormat, ReasoningFormat, ToolCallFormat
from nanovllm_server.chat.detokenizing import Vocabulary
from nanovllm_server.parsing.call_parser import Tools
from nanovllm_server.parsing.parser import Parser

# How an answer may begin, as far as reasoning goes: within it, after it or not at all, or as the model likes.
Opening = Literal["begun", "over", "free"]


class Dialect:
    """The format of one model, over its vocabulary."""

    def __init__(self, form: ChatFormat, vocabulary: Vocabulary):
        self.form = form
        self._vocabulary = vocabulary
        self._reasoning_tags = _tags(form.reasoning, vocabulary)
        self._tags = self._reasoning_tags | _tags(form.tool_calls, vocabulary)

    @property
    def has_calls(self) -> bool:
        """Whether it is known how the model calls tools."""
        return self.form.tool_calls is not None

    @property
    def reasoning_end(self) -> int | None:
        """The token that ends reasoning, if the model reasons and one does."""
        return None if self.form.reasoning is None else self._vocabulary.id_of(self.form.reasoning.end)

    def tags(self, tools: Tools | None) -> frozenset[int]:
        """The special tokens that are part of an answer's text, for the parser to see."""
        return self._reasoning_tags if tools is None else self._tags

    def opening(self, prompt: str) -> Opening:
        """What the prompt says of reasoning in the answer to it."""
        reasoning = self.form.reasoning
        if reasoning is None or prompt.rstrip().endswith(reasoning.end):
            return "over"
        return "begun" if prompt.rstrip().endswith(reasoning.begin) else "free"

    def parser(self, prompt: str, tools: Tools | None, *, apart: bool = False) -> Parser:
        """The parser of one answer to `prompt`; tools: the functions it may call, None when it may not call any.

        apart: an answer that doesn't begin with a call has none.
        """
        return Parser(self.form, reasoning_begun=self.opening(prompt) == "begun", tools=tools, apart=apart)


def _tags(form: ReasoningFormat | ToolCallFormat | None, vocabulary: Vocabulary) -> frozenset[int]:
    if form is None:
        return frozenset()
    words = [getattr(form, field.name) for field in fields(form)]
    return vocabulary.special(word for word in words if isinstance(word, str))
