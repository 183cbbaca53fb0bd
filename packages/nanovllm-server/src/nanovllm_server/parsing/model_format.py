"""Makes the parsers of a model's answers, and finds the special tokens that the parsers read."""

from dataclasses import fields
from typing import Literal

from nanovllm_models.chat_formats import ChatFormat, ReasoningFormat, ToolCallFormat
from nanovllm_server.parsing.call_parser import SchemasByFunction
from nanovllm_server.parsing.detokenizing import TextVocabulary
from nanovllm_server.parsing.parser import Parser

# State of the reasoning where the prompt ends. open: the answer begins within reasoning. closed: the answer has no
# reasoning. undecided: the answer may begin with reasoning.
ReasoningState = Literal["open", "closed", "undecided"]


class ModelFormat:
    """A chat format, and the ids of the format's tags in the vocabulary of one model."""

    def __init__(self, chat_format: ChatFormat, vocabulary: TextVocabulary):
        self.chat_format = chat_format
        self._vocabulary = vocabulary
        self._reasoning_tag_ids = _find_tag_ids(chat_format.reasoning, vocabulary)
        self._all_tag_ids = self._reasoning_tag_ids | _find_tag_ids(chat_format.tool_calls, vocabulary)

    @property
    def has_tool_calls(self) -> bool:
        """Whether the format of the model's tool calls is known."""
        return self.chat_format.tool_calls is not None

    @property
    def reasoning_end_id(self) -> int | None:
        """Id of the token that ends reasoning; None without reasoning, or if the end tag is not a single token."""
        return None if self.chat_format.reasoning is None else self._vocabulary.find_id(self.chat_format.reasoning.end)

    def tag_ids(self, tools: SchemasByFunction | None) -> frozenset[int]:
        """Ids of the special tokens that the parser must see as text. tools: None if the parser reads no calls."""
        return self._reasoning_tag_ids if tools is None else self._all_tag_ids

    def reasoning_state(self, prompt: str, continued_text: str = "") -> ReasoningState:
        """Returns the state of the reasoning at the end of `prompt`.

        continued_text: the text of the last message if the answer continues this message.
        """
        reasoning = self.chat_format.reasoning
        if reasoning is None or prompt.rstrip().endswith(reasoning.end):
            return "closed"
        if prompt.rstrip().endswith(reasoning.begin):
            return "open"
        if continued_text.strip():
            return "open" if continued_text.rfind(reasoning.begin) > continued_text.rfind(reasoning.end) else "closed"
        return "undecided"

    def make_parser(
        self,
        reasoning_state: ReasoningState,
        tools: SchemasByFunction | None,
        *,
        calls_only_at_start: bool = False,
        is_content_constrained: bool = False,
    ) -> Parser:
        """Makes the parser of one answer.

        reasoning_state: state at the end of the prompt.
        tools: None to treat tool calls as content.
        calls_only_at_start, is_content_constrained: see `Parser`.
        """
        chat_format = self.chat_format
        if is_content_constrained and reasoning_state == "closed":
            # The grammar allows no reasoning, so a tag of reasoning is content.
            chat_format = ChatFormat(None, chat_format.tool_calls)
        return Parser(
            chat_format,
            starts_in_reasoning=reasoning_state == "open",
            tools=tools,
            calls_only_at_start=calls_only_at_start,
            is_content_constrained=is_content_constrained,
        )


def _find_tag_ids(tag_format: ReasoningFormat | ToolCallFormat | None, vocabulary: TextVocabulary) -> frozenset[int]:
    if tag_format is None:
        return frozenset()
    tags = [getattr(tag_format, field.name) for field in fields(tag_format)]
    return vocabulary.find_special_ids(tag for tag in tags if isinstance(tag, str))
