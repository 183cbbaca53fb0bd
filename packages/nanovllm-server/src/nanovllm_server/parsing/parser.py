"""The parser of an answer: turns pieces of text into events. The joined events don't depend on the pieces' borders.

Accepts any text without raising an exception.
"""

from nanovllm_models.chat_formats import ChatFormat, ReasoningFormat
from nanovllm_server.parsing.call_parser import Tools, make_reader
from nanovllm_server.parsing.events import ContentText, Event, Report
from nanovllm_server.parsing.source import Reading, Source

# Characters read at a time: bounds the text in which tags are searched for.
PIECE = 4096


class Parser:
    """Parses one answer.

    reasoning_begun: the prompt ends within reasoning.
    tools: functions that the model may call; None: text that looks like a call is content.
    calls_only_at_start: if the answer does not begin with a call, text that looks like one is content.
    """

    def __init__(
        self,
        form: ChatFormat,
        *,
        reasoning_begun: bool = False,
        tools: Tools | None = None,
        calls_only_at_start: bool = False,
    ):
        self._source = Source()
        if form.tool_calls is None or tools is None:
            self._report = Report(calls=False)
            self._calls = None
        else:
            self._report = Report(calls=True)
            self._calls = make_reader(form.tool_calls, self._source, self._report, tools)
        self._calls_only_at_start = calls_only_at_start
        self._reading = self._read(form.reasoning, reasoning_begun)
        self._in_reasoning = False
        self._at_content = False
        # Only content can follow: `push` then skips the parsing. True for most answers from the beginning.
        self._settled = False
        # Whether the answer has reasoning, even if it is empty.
        self.reasoned = False

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._in_reasoning and not self._report.num_calls

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun."""
        return self._report.num_calls

    @property
    def in_call(self) -> bool:
        """Whether the text so far ends within a call; after `finish`, whether a call was cut off."""
        return self._report.in_call

    def push(self, text: str) -> list[Event]:
        """Adds `text`; returns the events that are certain now."""
        if self._settled:
            return [ContentText(text)] if text else []
        for at in range(0, len(text), PIECE):
            self._source.feed(text[at : at + PIECE])
            next(self._reading)
        self._settled = self._at_content and self._report.settled
        return self._report.take()

    def finish(self) -> list[Event]:
        """Ends the answer; returns the remaining events."""
        self._source.end()
        for _ in self._reading:
            pass
        self._report.finish()
        return self._report.take()

    def _read(self, reasoning: ReasoningFormat | None, begun: bool) -> Reading[None]:
        if reasoning is not None:
            yield from self._read_reasoning(reasoning, begun)
        self._at_content = True
        begins = () if self._calls is None else self._calls.begins
        if self._calls_only_at_start and not (yield from self._begins_with(begins)):
            begins = ()
        while (yield from self._source.until(begins, self._report.content)) is not None:
            if self._calls is not None:
                yield from self._calls.block(self._report.content)

    def _begins_with(self, tags: tuple[str, ...]) -> Reading[bool]:
        """Reads whitespace as content; returns whether one of `tags` follows."""
        self._source.record()
        yield from self._source.space()
        self._report.content(self._source.recorded())
        for tag in tags:
            if (yield from self._source.ahead(tag)):
                return True
        return False

    def _read_reasoning(self, form: ReasoningFormat, begun: bool) -> Reading[None]:
        source, report = self._source, self._report
        source.record()
        yield from source.space()
        # Some models repeat the tag with which the prompt ends.
        opened = yield from source.literal(form.begin)
        before = source.recorded()
        if not (opened or begun):
            report.content(before)
            return
        self.reasoned = self._in_reasoning = True
        calls = self._calls if self._calls is not None and self._calls.form.ends_reasoning else None
        tags = (form.end, *calls.begins) if calls is not None else (form.end,)
        while (tag := (yield from source.until(tags, report.reasoning))) is not None:
            if tag == form.end:
                yield from source.literal(tag)
                report.end_reasoning()
                break
            if calls is not None and (yield from calls.block(report.reasoning)):
                break
        else:
            return
        self._in_reasoning = False
