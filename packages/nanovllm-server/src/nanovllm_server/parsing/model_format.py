"""The format of one model's answers: makes the parser of an answer, and names the special tokens that it must see."""

from dataclasses import fields
from typing import Literal

from nanovllm_models.chat_formats import ChatFormat, ReasoningFormat, ToolCallFormat
from nanovllm_server.parsing.call_parser import Tools
from nanovllm_server.parsing.detokenizing import TextVocabulary
from nanovllm_server.parsing.parser import Parser

# begun: the answer begins within reasoning. over: it has no reasoning. free: it may begin with reasoning.
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
        """Whether the format of the model's tool calls is known."""
        return self.chat_format.tool_calls is not None

    @property
    def reasoning_end(self) -> int | None:
        """The token that ends reasoning; None if the model doesn't reason or its end tag is not a single token."""
        return None if self.chat_format.reasoning is None else self._vocabulary.id_of(self.chat_format.reasoning.end)

    def tags(self, tools: Tools | None) -> frozenset[int]:
        """The special tokens that the parser needs in an answer's text."""
        return self._reasoning_tags if tools is None else self._tags

    def opening(self, prompt: str) -> Opening:
        """Whether the answer to `prompt` begins within reasoning, has none, or may begin with it."""
        reasoning = self.chat_format.reasoning
        if reasoning is None or prompt.rstrip().endswith(reasoning.end):
            return "over"
        return "begun" if prompt.rstrip().endswith(reasoning.begin) else "free"

    def parser(self, prompt: str, tools: Tools | None, *, calls_only_at_start: bool = False) -> Parser:
        """The parser of one answer to `prompt`. tools, calls_only_at_start: see `Parser`."""
        return Parser(
            self.chat_format,
            reasoning_begun=self.opening(prompt) == "begun",
            tools=tools,
            calls_only_at_start=calls_only_at_start,
        )


def _tags(form: ReasoningFormat | ToolCallFormat | None, vocabulary: TextVocabulary) -> frozenset[int]:
    if form is None:
        return frozenset()
    words = [getattr(form, field.name) for field in fields(form)]
    return vocabulary.special(word for word in words if isinstance(word, str))
