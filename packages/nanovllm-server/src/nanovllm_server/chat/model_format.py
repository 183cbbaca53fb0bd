"""The format of one model's answers: makes the parser of an answer, and names the special tokens that it must see."""

from dataclasses import fields
from typing import Literal

from nanovllm_models.chat_formats import ChatFormat, ReasoningFormat, ToolCallFormat
from nanovllm_server.chat.detokenizing import TextVocabulary
from nanovllm_server.parsing.call_parser import Tools
from nanovllm_server.parsing.parser import Parser

# How an answer may begin, as far as reasoning goes: within it, after it or not at all, or as the model likes.
Opening = Literal["begun", "over", "free"]


class ModelFormat:
    """The chat format of one model, in terms of its vocabulary."""

    def __init__(self, chat_format: ChatFormat, vocabulary: TextVocabulary):
        self.chat_format = chat_format
        self._vocabulary = vocabulary
        self._reasoning_tags = _tags(chat_format.reasoning, vocabulary)
        self._tags = self._reasoning_tags | _tags(chat_format.tool_calls, vocabulary)

    @property
    def has_calls(self) -> bool:
        """Whether it is known how the model calls tools."""
        return self.chat_format.tool_calls is not None

    @property
    def reasoning_end(self) -> int | None:
        """The token that ends reasoning, if the model reasons and one does."""
        return None if self.chat_format.reasoning is None else self._vocabulary.id_of(self.chat_format.reasoning.end)

    def tags(self, tools: Tools | None) -> frozenset[int]:
        """The special tokens that are part of an answer's text, for the parser to see."""
        return self._reasoning_tags if tools is None else self._tags

    def opening(self, prompt: str) -> Opening:
        """What the prompt says of reasoning in the answer to it."""
        reasoning = self.chat_format.reasoning
        if reasoning is None or prompt.rstrip().endswith(reasoning.end):
            return "over"
        return "begun" if prompt.rstrip().endswith(reasoning.begin) else "free"

    def parser(self, prompt: str, tools: Tools | None, *, apart: bool = False) -> Parser:
        """The parser of one answer to `prompt`; tools: the functions it may call, None when it may not call any.

        apart: an answer that doesn't begin with a call has none.
        """
        return Parser(self.chat_format, reasoning_begun=self.opening(prompt) == "begun", tools=tools, apart=apart)


def _tags(form: ReasoningFormat | ToolCallFormat | None, vocabulary: TextVocabulary) -> frozenset[int]:
    if form is None:
        return frozenset()
    words = [getattr(form, field.name) for field in fields(form)]
    return vocabulary.special(word for word in words if isinstance(word, str))
