"""Tool calls read from text, one reader a way of writing them; the formats themselves are data of nanovllm_models.

A call is said to have begun when its function's name is known and its arguments begin; what is no call up to there is
text like any other. What is wrong with the arguments later is said as it is: their beginning is out already. This room
must not know requests or events beyond `Report`.
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
# The schema of each function's parameters, by name; None where it has none.
Tools = Mapping[str, JSON]
Sink = Callable[[str], None]


class CallReader(ABC, Generic[Format]):
    """Reads the calls of one answer."""

    def __init__(self, form: Format, source: Source, report: Report, tools: Tools):
        self.form = form
        self.source = source
        self.report = report
        self.tools = tools

    @property
    @abstractmethod
    def begins(self) -> tuple[str, ...]:
        """Where calls may begin: the format's own beginning, then what may begin a call of a known function."""

    @abstractmethod
    def call(self, *, wrapped: bool) -> Reading[bool]:
        """Read one call; False, with nothing said, if there is none. wrapped: after the format's own beginning."""

    def block(self, fallback: Sink) -> Reading[bool]:
        """Read what one of `begins` begins. False if that is no call: its text has gone to `fallback`."""
        self.source.record()
        wrapped = yield from self.source.literal(self.form.begin)
        sink, called = fallback, False
        while True:
            yield from self.source.space()
            if called and self.form.end is not None and (yield from self._end(self.form.end)):
                self.source.recorded()
                return True
            # Others begin anew.
            alone = called and not (wrapped and self.form.end)
            if alone or not (yield from self.call(wrapped=wrapped)):
                sink(self.source.recorded())
                return called
            sink, called = self.report.content, True
            self.source.record()

    def _end(self, tag: str) -> Reading[bool]:
        """Read a tag that nothing depends on any more; a part of it will do, if that is all there is."""
        return (yield from self.source.literal(tag)) or self.source.broken_off(tag)

    def known(self, name: str | None, *, wrapped: bool) -> bool:
        """Whether a call may have that name: without a tag around it only functions that there are."""
        return bool(name) and (wrapped or name in self.tools)

    def begin(self, name: str) -> None:
        """Say that a call begins: its text is no longer in doubt."""
        self.source.recorded()
        self.report.begin_call(name)

    def stream(self, name: str) -> Reading[None]:
        """Say a call whose arguments, a JSON object, come next."""
        self.begin(name)
        whole = yield from self.source.json(self.report.arguments)
        # A tag ends the arguments too; only the end of all text leaves the call open.
        if whole or (yield from self.source.peek()):
            self.report.end_call(self.form.separator)

    def cut(self, name: str | None, arguments: str = "") -> Reading[bool]:
        """Say a call that came to its name and no further, if it's the end of all text that kept it from that."""
        if name is None or (yield from self.source.peek()):
            return False
        self.begin(name)
        self.report.arguments(arguments)
        return True


class JsonReader(CallReader[JsonCalls]):
    """Calls as JSON objects."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The tag, and for some formats any object."""
        return (self.form.begin, "{") if self.form.bare else (self.form.begin,)

    def block(self, fallback: Sink) -> Reading[bool]:
        """Read what one of `begins` begins; objects within one that is no call are none either."""
        opened = (yield from self.source.peek()) == "{"
        if (yield from super().block(fallback)):
            return True
        if opened:
            yield from self.source.braces(fallback)
        return False

    def call(self, *, wrapped: bool) -> Reading[bool]:
        """Read one object."""
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
            # Where any object may be a call, one that has something else to say is none.
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
        """Read what an object has after its arguments; forgive braces that it lacks or has too many of."""
        yield from self.source.space()
        while (yield from self.source.literal(",")):
            if (yield from self._key()) is None or (yield from self.source.value()) is None:
                return
            yield from self.source.space()
        while (yield from self.source.literal("}")):
            pass


class FencedReader(CallReader[FencedCalls]):
    """Calls as a name and a fenced JSON object."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The block's tag, and a call's."""
        return self.form.begin, self.form.call_begin

    def call(self, *, wrapped: bool) -> Reading[bool]:
        """Read from one call's tag to its end."""
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
    """Calls as elements, one a parameter."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The block's tag, and a call's: some models leave the block out."""
        return self.form.begin, self.form.call_begin

    def call(self, *, wrapped: bool) -> Reading[bool]:
        """Read one call's element."""
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
            # What is no parameter is text again.
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
    """The reader of a format."""
    match form:
        case JsonCalls():
            return JsonReader(form, source, report, tools)
        case FencedCalls():
            return FencedReader(form, source, report, tools)
        case XmlCalls():
            return XmlReader(form, source, report, tools)
