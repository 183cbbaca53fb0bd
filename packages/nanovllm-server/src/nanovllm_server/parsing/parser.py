"""Parses the text of an answer, which arrives in pieces, into events.

If the same text arrives in other pieces, the events differ only in how they divide the text. Parsing never fails.
"""

from nanovllm_models.chat_formats import ChatFormat, ReasoningFormat
from nanovllm_server.parsing.call_parser import SchemasByFunction, make_reader
from nanovllm_server.parsing.events import ContentText, Event, EventCollector
from nanovllm_server.parsing.source import ReadGenerator, Source

# Maximum number of characters that are parsed at a time, which keeps each search for tags short.
MAX_PIECE_LENGTH = 4096
# Grammars of answers allow at most this number of line breaks between the end tag of reasoning and the content.
MAX_LINE_BREAKS_AFTER_REASONING = 2


class Parser:
    """Parses one answer.

    starts_in_reasoning: the prompt ends within reasoning.
    tools: schemas of the functions that the model may call; None: text that looks like a call is content.
    calls_only_at_start: if the answer does not begin with a call, text that looks like a call is content.
    is_content_constrained: the content follows a grammar. Only line breaks separate the content from reasoning.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        *,
        starts_in_reasoning: bool = False,
        tools: SchemasByFunction | None = None,
        calls_only_at_start: bool = False,
        is_content_constrained: bool = False,
    ):
        self._source = Source()
        if chat_format.tool_calls is None or tools is None:
            self._collector = EventCollector(allows_calls=False)
            self._call_reader = None
        else:
            self._collector = EventCollector(allows_calls=True)
            self._call_reader = make_reader(chat_format.tool_calls, self._source, self._collector, tools)
        self._calls_only_at_start = calls_only_at_start
        self._is_content_constrained = is_content_constrained
        self._read_generator = self._read(chat_format.reasoning, starts_in_reasoning)
        self._in_reasoning = False
        self._in_content = False
        # Whether only content can follow. `push` then skips the parsing.
        self._only_content_follows = False
        # True even if the reasoning is empty.
        self.has_reasoning = False

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._in_reasoning and not self._collector.num_calls

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun."""
        return self._collector.num_calls

    @property
    def in_call(self) -> bool:
        """Whether the text so far ends within a call; after `finish`, whether a call was cut off."""
        return self._collector.in_call

    def push(self, text: str) -> list[Event]:
        """Adds `text`. Returns the new events. Text that may be part of a tag waits for more text."""
        if self._only_content_follows:
            return [ContentText(text)] if text else []
        for index in range(0, len(text), MAX_PIECE_LENGTH):
            self._source.feed(text[index : index + MAX_PIECE_LENGTH])
            next(self._read_generator)
        self._only_content_follows = self._in_content and self._collector.passes_content_through
        return self._collector.take_events()

    def finish(self) -> list[Event]:
        """Ends the answer; returns the remaining events."""
        self._source.end()
        for _ in self._read_generator:
            pass
        self._collector.finish()
        return self._collector.take_events()

    def _read(self, reasoning_format: ReasoningFormat | None, starts_in_reasoning: bool) -> ReadGenerator[None]:
        # The end tag of reasoning that a call has interrupted.
        awaited_end_tag: str | None = None
        if reasoning_format is not None:
            awaited_end_tag = yield from self._read_reasoning(reasoning_format, starts_in_reasoning)
        self._in_content = True
        begin_texts = () if self._call_reader is None else self._call_reader.begin_texts
        if self._calls_only_at_start and not (yield from self._begins_with(begin_texts)):
            begin_texts = ()
        while True:
            tags = begin_texts if awaited_end_tag is None else (awaited_end_tag, *begin_texts)
            tag = yield from self._source.read_until(tags, self._collector.add_content)
            if tag is None:
                return
            if tag == awaited_end_tag:
                yield from self._read_end_tag(tag)
                awaited_end_tag = None
            elif self._call_reader is not None:
                yield from self._call_reader.read_consecutive_calls(self._collector.add_content)
                # If the beginning looked like a call but was not one, no later text is a call.
                if self._calls_only_at_start and not self._collector.num_calls:
                    begin_texts = ()

    def _begins_with(self, tags: tuple[str, ...]) -> ReadGenerator[bool]:
        """Reads whitespace as content; returns whether one of `tags` follows."""
        self._source.start_recording()
        yield from self._source.skip_whitespace()
        self._collector.add_content(self._source.stop_recording())
        for tag in tags:
            if (yield from self._source.is_next(tag)):
                return True
        return False

    def _read_reasoning(
        self, reasoning_format: ReasoningFormat, starts_in_reasoning: bool
    ) -> ReadGenerator[str | None]:
        """Reads reasoning up to its end tag or a call. Returns the end tag if a call came first, else None."""
        source, collector = self._source, self._collector
        source.start_recording()
        # A grammar allows an opening tag only at the very beginning. Later tags are content.
        if starts_in_reasoning or not self._is_content_constrained:
            yield from source.skip_whitespace()
        # Some models repeat the tag with which the prompt ends.
        has_begin_tag = yield from source.read_literal(reasoning_format.begin)
        recorded_text = source.stop_recording()
        if not (has_begin_tag or starts_in_reasoning):
            collector.add_content(recorded_text)
            return None
        self.has_reasoning = self._in_reasoning = True
        collector.begin_reasoning()
        call_reader = self._call_reader
        if call_reader is not None and not call_reader.call_format.ends_reasoning:
            call_reader = None
        tags = (reasoning_format.end, *call_reader.begin_texts) if call_reader is not None else (reasoning_format.end,)
        while (tag := (yield from source.read_until(tags, collector.add_reasoning))) is not None:
            if tag == reasoning_format.end:
                yield from self._read_end_tag(tag)
                return None
            if call_reader is not None and (yield from call_reader.read_consecutive_calls(collector.add_reasoning)):
                self._in_reasoning = False
                return reasoning_format.end
        return None

    def _read_end_tag(self, tag: str) -> ReadGenerator[None]:
        yield from self._source.read_literal(tag)
        self._in_reasoning = False
        self._collector.end_reasoning(skips_whitespace=not self._is_content_constrained)
        if self._is_content_constrained:
            for _ in range(MAX_LINE_BREAKS_AFTER_REASONING):
                yield from self._source.read_literal("\n")
