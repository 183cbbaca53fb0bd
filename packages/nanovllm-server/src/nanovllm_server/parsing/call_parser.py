"""Readers of tool calls, one class per kind of format. nanovllm_models defines the formats.

A call is reported once its function's name is known and its arguments begin. Text that fails before is content;
malformed arguments after that are passed on unchanged.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import orjson

from nanovllm_models.chat_formats import FencedCalls, JsonCalls, ToolCallFormat, XmlCalls
from nanovllm_server.parsing.events import Report
from nanovllm_server.parsing.source import MAX_NAME, Reading, Source
from nanovllm_server.parsing.typed import json_object, typed_json
from nanovllm_server.protocol.json import JSON

Format = TypeVar("Format", bound=ToolCallFormat)
# The schema of each function's parameters, by name; None if it has none.
Tools = Mapping[str, JSON]
Sink = Callable[[str], None]


class CallReader(ABC, Generic[Format]):
    """Reads the calls of one answer from `source` and reports them. tools: functions that the model may call."""

    def __init__(self, form: Format, source: Source, report: Report, tools: Tools):
        self.form = form
        self.source = source
        self.report = report
        self.tools = tools

    @property
    @abstractmethod
    def begins(self) -> tuple[str, ...]:
        """Texts with which calls begin: the format's opening tag, then the texts that begin a call without it."""

    @abstractmethod
    def call(self, *, wrapped: bool) -> Reading[bool]:
        """Reads one call. Returns False, with nothing reported, if there is none. wrapped: the opening tag was read."""

    def block(self, fallback: Sink) -> Reading[bool]:
        """Reads the calls that begin with one of `begins`. Returns False if there is none; `fallback` gets its text."""
        self.source.record()
        wrapped = yield from self.source.literal(self.form.begin)
        sink, called = fallback, False
        while True:
            yield from self.source.space()
            if called and self.form.end is not None and (yield from self._end(self.form.end)):
                self.source.recorded()
                return True
            # Without a closing tag, each call has its own beginning.
            alone = called and not (wrapped and self.form.end)
            if alone or not (yield from self.call(wrapped=wrapped)):
                sink(self.source.recorded())
                return called
            sink, called = self.report.content, True
            self.source.record()

    def _end(self, tag: str) -> Reading[bool]:
        """Reads a closing tag, or, at the end of the answer, the first part of one."""
        return (yield from self.source.literal(tag)) or self.source.broken_off(tag)

    def known(self, name: str | None, *, wrapped: bool) -> bool:
        """Whether a call may have this name. Without the format's opening tag, it must name a function of `tools`."""
        return bool(name) and (wrapped or name in self.tools)

    def begin(self, name: str) -> None:
        """Reports that a call begins. The text recorded so far is then part of the call."""
        self.source.recorded()
        self.report.begin_call(name)

    def stream(self, name: str) -> Reading[None]:
        """Reports a call whose arguments, a JSON object, are next in the text."""
        self.begin(name)
        complete = yield from self.source.json(self.report.arguments)
        # A tag ends incomplete arguments too; only the end of the answer leaves the call open.
        if complete or (yield from self.source.peek()):
            self.report.end_call(self.form.separator)

    def cut(self, name: str | None, arguments: str = "") -> Reading[bool]:
        """Reports a call whose arguments are cut off by the end of the answer. Returns False if text follows."""
        if name is None or (yield from self.source.peek()):
            return False
        self.begin(name)
        self.report.arguments(arguments)
        return True


class JsonReader(CallReader[JsonCalls]):
    """Reads calls that are JSON objects."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The opening tag and, in bare formats, any object."""
        return (self.form.begin, "{") if self.form.bare else (self.form.begin,)

    def block(self, fallback: Sink) -> Reading[bool]:
        """Like `CallReader.block`. If an object is no call, the objects inside it are no calls either."""
        opened = (yield from self.source.peek()) == "{"
        if (yield from super().block(fallback)):
            return True
        if opened:
            yield from self.source.braces(fallback)
        return False

    def call(self, *, wrapped: bool) -> Reading[bool]:
        """Reads one object."""
        source = self.source
        name: str | None = None
        arguments: str | None = None
        if not (yield from source.literal("{")):
            return False
        while True:
            key = yield from self._key()
            if key == "name":
                name = yield from source.string(MAX_NAME)
                if not self.known(name, wrapped=wrapped):
                    return False
            elif key in self.form.arguments:
                if name is not None and (yield from source.peek()) == "{":
                    yield from self.stream(name)
                    yield from self._rest()
                    return True
                arguments = json_object((yield from source.value()))
                if arguments is None:
                    return (yield from self.cut(name))
            # Without an opening tag, an object with other keys than those of a call is content.
            elif key is None or not (wrapped or key == "type") or (yield from source.value()) is None:
                return (yield from self.cut(name, arguments or ""))
            yield from source.space()
            if name is not None and (yield from source.literal("}")):
                break
            if not (yield from source.literal(",")):
                return (yield from self.cut(name, arguments or ""))
        self.begin(name)
        self.report.arguments(arguments or "{}")
        self.report.end_call(self.form.separator)
        return True

    def _key(self) -> Reading[str | None]:
        yield from self.source.space()
        key = yield from self.source.string(MAX_NAME)
        yield from self.source.space()
        if key is None or not (yield from self.source.literal(":")):
            return None
        yield from self.source.space()
        return key

    def _rest(self) -> Reading[None]:
        """Reads the rest of an object after its arguments. Accepts missing and superfluous closing braces."""
        yield from self.source.space()
        while (yield from self.source.literal(",")):
            if (yield from self._key()) is None or (yield from self.source.value()) is None:
                return
            yield from self.source.space()
        while (yield from self.source.literal("}")):
            pass


class FencedReader(CallReader[FencedCalls]):
    """Reads calls that are a name and a fenced JSON object."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The opening tags of a block and of a call."""
        return self.form.begin, self.form.call_begin

    def call(self, *, wrapped: bool) -> Reading[bool]:
        """Reads one call with its tags."""
        source, form = self.source, self.form
        if not (yield from source.literal(form.call_begin)):
            return False
        kind = yield from source.name(form.name_begin)
        if kind is None or kind.strip() != form.kind:
            return False
        name = yield from source.name("\n")
        name = name and name.strip()
        if name is None or not self.known(name, wrapped=wrapped):
            return False
        yield from source.space()
        if not ((yield from source.literal(form.fence_begin)) or source.broken_off(form.fence_begin)):
            yield from source.literal(form.fence_end)
        yield from source.space()
        if (yield from source.peek()) != "{":
            return (yield from self.cut(name))
        yield from self.stream(name)
        for tag in (form.fence_end, form.call_end):
            yield from source.space()
            yield from self._end(tag)
        return True


class XmlReader(CallReader[XmlCalls]):
    """Reads calls that have one element per parameter."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The opening tags of a block and of a call: some models omit the block."""
        return self.form.begin, self.form.call_begin

    def call(self, *, wrapped: bool) -> Reading[bool]:
        """Reads the element of one call."""
        source, form = self.source, self.form
        if not (yield from source.literal(form.call_begin)):
            return False
        name = yield from source.name(form.name_end)
        name = name and name.strip()
        if name is None or not self.known(name, wrapped=wrapped):
            return False
        yield from source.space()
        if (yield from source.literal(form.call_end)):
            self.begin(name)
            return self._close("{}")
        separator = "{"
        while (yield from source.literal(form.parameter_begin)):
            key = yield from source.name(form.key_end)
            if key is None:
                break
            if separator == "{":
                self.begin(name)
            value: list[str] = []
            if (yield from source.until((form.parameter_end,), value.append)) is None:
                return True
            yield from source.literal(form.parameter_end)
            key = key.strip()
            typed = self._typed(name, key, "".join(value))
            self.report.arguments(f"{separator}{orjson.dumps(key).decode()}: {typed}")
            separator = ", "
            # If no further parameter follows, the text from here on is content.
            source.record()
            yield from source.space()
        if separator != "{" and (yield from source.literal(form.call_end)):
            source.recorded()
            return self._close("}")
        source.broken_off(form.parameter_begin, form.call_end)
        if separator == "{":
            return (yield from self.cut(name))
        left = source.recorded()
        if (yield from source.peek()):
            self._close("}")
            self.report.content(left)
        return True

    def _close(self, brace: str) -> bool:
        self.report.arguments(brace)
        self.report.end_call(self.form.separator)
        return True

    def _typed(self, name: str, key: str, value: str) -> str:
        if self.form.newlines:
            value = value.removeprefix("\n").removesuffix("\n")
        return typed_json(value, self.tools.get(name), key)


def make_reader(form: ToolCallFormat, source: Source, report: Report, tools: Tools) -> CallReader[Any]:
    """Returns the reader for a format."""
    match form:
        case JsonCalls():
            return JsonReader(form, source, report, tools)
        case FencedCalls():
            return FencedReader(form, source, report, tools)
        case XmlCalls():
            return XmlReader(form, source, report, tools)
