"""Reads tool calls, with one class per kind of format.

A reader reports a call when the arguments begin. Text that is malformed before the arguments is content. Malformed
arguments are reported unchanged.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from typing import Any, Generic, TypeVar

import orjson

from nanovllm_models.chat_formats import FencedCalls, JsonCalls, ToolCallFormat, XmlCalls
from nanovllm_server.parsing.events import WHITESPACE, EventCollector
from nanovllm_server.parsing.parameter_values import list_declared_parameters, to_object_json, to_parameter_json
from nanovllm_server.parsing.source import MAX_NAME_LENGTH, ReadGenerator, Source
from nanovllm_server.protocol.json import JSON

CallFormat = TypeVar("CallFormat", bound=ToolCallFormat)
# Maps each function's name to the schema of the function's parameters, or to None if there is no schema.
SchemasByFunction = Mapping[str, JSON]
TextSink = Callable[[str], None]


class CallReader(ABC, Generic[CallFormat]):
    """Reads the calls of one answer from `source` and reports them to `collector`."""

    def __init__(self, call_format: CallFormat, source: Source, collector: EventCollector, schemas: SchemasByFunction):
        self.call_format = call_format
        self.source = source
        self.collector = collector
        self.schemas = schemas

    @property
    @abstractmethod
    def begin_texts(self) -> tuple[str, ...]:
        """Texts with which calls may begin. The first is the format's opening tag."""

    @abstractmethod
    def read_call(self, *, has_opening_tag: bool) -> ReadGenerator[bool]:
        """Reads one call. Returns False and reports nothing if there is no call."""

    def read_consecutive_calls(self, fallback: TextSink) -> ReadGenerator[bool]:
        """Reads consecutive calls. Returns whether there was a call. If not, passes the read text to `fallback`."""
        self.source.start_recording()
        has_opening_tag = yield from self.source.read_literal(self.call_format.begin)
        sink, has_calls = fallback, False
        while True:
            yield from self.source.skip_whitespace()
            if (
                has_calls
                and self.call_format.end is not None
                and (yield from self._read_closing_tag(self.call_format.end))
            ):
                self.source.stop_recording()
                return True
            # Several calls may follow one opening tag only if the format has a closing tag.
            has_all_calls = has_calls and not (has_opening_tag and self.call_format.end)
            if has_all_calls or not (yield from self.read_call(has_opening_tag=has_opening_tag)):
                sink(self.source.stop_recording())
                return has_calls
            sink, has_calls = self.collector.add_content, True
            self.source.start_recording()

    def _read_closing_tag(self, tag: str) -> ReadGenerator[bool]:
        """Reads a closing tag. Returns True if the tag comes next, even if the answer ends within the tag."""
        return (yield from self.source.read_literal(tag)) or self.source.read_truncated_literal(tag)

    def accepts_name(self, name: str | None, *, has_opening_tag: bool) -> bool:
        """Whether a call may have this name. Without an opening tag, the function must be known."""
        return bool(name) and (has_opening_tag or name in self.schemas)

    def begin_call(self, name: str) -> None:
        """Reports that a call begins, and discards the recorded text, which is part of the call."""
        self.source.stop_recording()
        self.collector.begin_call(name)

    def stream_call(self, name: str) -> ReadGenerator[None]:
        """Reports a call, and reads its arguments: the JSON object that comes next."""
        self.begin_call(name)
        is_complete = yield from self.source.read_json(self.collector.add_arguments)
        # If the end of the answer cuts the arguments off, the call stays open.
        if is_complete or (yield from self.source.peek()):
            self.collector.end_call(self.call_format.separator)

    def report_call_at_end(self, name: str | None, arguments: str = "") -> ReadGenerator[bool]:
        """If the answer has ended and `name` is not None, reports the call and returns True. Else returns False."""
        if name is None or (yield from self.source.peek()):
            return False
        self.begin_call(name)
        self.collector.add_arguments(arguments)
        return True


class JsonReader(CallReader[JsonCalls]):
    """Reads calls that are JSON objects."""

    @property
    def begin_texts(self) -> tuple[str, ...]:
        """The opening tag, and { if the format allows calls without an opening tag."""
        return (self.call_format.begin, "{") if self.call_format.may_omit_begin else (self.call_format.begin,)

    def read_consecutive_calls(self, fallback: TextSink) -> ReadGenerator[bool]:
        """See `CallReader`. If an object is not a call, the objects inside it are not calls either."""
        begins_with_object = (yield from self.source.peek()) == "{"
        if (yield from super().read_consecutive_calls(fallback)):
            return True
        if begins_with_object:
            yield from self.source.read_rest_of_object(fallback)
        return False

    def read_call(self, *, has_opening_tag: bool) -> ReadGenerator[bool]:
        """Reads one object."""
        source = self.source
        name: str | None = None
        arguments: str | None = None
        if not (yield from source.read_literal("{")):
            return False
        while True:
            key = yield from self._read_key()
            if key == "name":
                name = yield from source.read_string(MAX_NAME_LENGTH)
                if not self.accepts_name(name, has_opening_tag=has_opening_tag):
                    return False
            elif key in self.call_format.argument_keys:
                if name is not None and (yield from source.peek()) == "{":
                    yield from self.stream_call(name)
                    yield from self._skip_remaining_keys()
                    return True
                arguments = to_object_json((yield from source.read_value()))
                if arguments is None:
                    return (yield from self.report_call_at_end(name))
            # Without an opening tag, an object is content if it has a key that is neither a call's key nor `type`.
            elif key is None or not (has_opening_tag or key == "type") or (yield from source.read_value()) is None:
                return (yield from self.report_call_at_end(name, arguments or ""))
            yield from source.skip_whitespace()
            if name is not None and (yield from source.read_literal("}")):
                break
            if not (yield from source.read_literal(",")):
                return (yield from self.report_call_at_end(name, arguments or ""))
        self.begin_call(name)
        self.collector.add_arguments(arguments or "{}")
        self.collector.end_call(self.call_format.separator)
        return True

    def _read_key(self) -> ReadGenerator[str | None]:
        yield from self.source.skip_whitespace()
        key = yield from self.source.read_string(MAX_NAME_LENGTH)
        yield from self.source.skip_whitespace()
        if key is None or not (yield from self.source.read_literal(":")):
            return None
        yield from self.source.skip_whitespace()
        return key

    def _skip_remaining_keys(self) -> ReadGenerator[None]:
        """Reads the rest of a call's object after the arguments. Accepts missing and superfluous closing braces."""
        yield from self.source.skip_whitespace()
        while (yield from self.source.read_literal(",")):
            if (yield from self._read_key()) is None or (yield from self.source.read_value()) is None:
                return
            yield from self.source.skip_whitespace()
        while (yield from self.source.read_literal("}")):
            pass


class FencedReader(CallReader[FencedCalls]):
    """Reads calls that consist of a name and a JSON object in a code fence."""

    @property
    def begin_texts(self) -> tuple[str, ...]:
        """The opening tags of a block of calls and of a single call."""
        return self.call_format.begin, self.call_format.call_begin

    def read_call(self, *, has_opening_tag: bool) -> ReadGenerator[bool]:
        """Reads one call with its tags."""
        source, call_format = self.source, self.call_format
        if not (yield from source.read_literal(call_format.call_begin)):
            return False
        kind = yield from source.read_name(call_format.name_begin)
        if kind is None or kind.strip() != call_format.kind:
            return False
        name = yield from source.read_name("\n")
        name = name and name.strip()
        if name is None or not self.accepts_name(name, has_opening_tag=has_opening_tag):
            return False
        yield from source.skip_whitespace()
        if not (
            (yield from source.read_literal(call_format.fence_begin))
            or source.read_truncated_literal(call_format.fence_begin)
        ):
            yield from source.read_literal(call_format.fence_end)
        yield from source.skip_whitespace()
        if (yield from source.peek()) != "{":
            return (yield from self.report_call_at_end(name))
        yield from self.stream_call(name)
        for tag in (call_format.fence_end, call_format.call_end):
            yield from source.skip_whitespace()
            yield from self._read_closing_tag(tag)
        return True


class XmlReader(CallReader[XmlCalls]):
    """Reads calls that have one element per parameter."""

    @property
    def begin_texts(self) -> tuple[str, ...]:
        """The opening tags of a block of calls and of a single call: some models omit the tags of the block."""
        return self.call_format.begin, self.call_format.call_begin

    def read_call(self, *, has_opening_tag: bool) -> ReadGenerator[bool]:
        """Reads the element of one call."""
        source, call_format = self.source, self.call_format
        if not (yield from source.read_literal(call_format.call_begin)):
            return False
        name = yield from source.read_name(call_format.name_end)
        name = name and name.strip()
        if name is None or not self.accepts_name(name, has_opening_tag=has_opening_tag):
            return False
        yield from source.skip_whitespace()
        if (yield from source.read_literal(call_format.call_end)):
            self.begin_call(name)
            return self._close_call("{}")
        # JSON text to report before the next key: "{" before the first parameter, then ", ".
        separator, next_key = "{", None
        missing_keys = list_declared_parameters(self.schemas.get(name))
        while next_key is not None or (yield from source.read_literal(call_format.parameter_begin)):
            key = next_key if next_key is not None else (yield from source.read_name(call_format.key_end))
            if key is None:
                break
            if separator == "{":
                self.begin_call(name)
            key = key.strip()
            missing_keys.discard(key)
            value_and_next_key = yield from self._read_parameter_value(missing_keys)
            if value_and_next_key is None:
                return True
            value, next_key = value_and_next_key
            value_json = self._parameter_json(name, key, value)
            self.collector.add_arguments(f"{separator}{orjson.dumps(key).decode()}: {value_json}")
            if next_key == call_format.call_end:
                return self._close_call("}")
            separator = ", "
            # The recorded text is content if neither another parameter nor the closing tag of the call follows.
            source.start_recording()
            yield from source.skip_whitespace()
        if separator != "{" and (yield from source.read_literal(call_format.call_end)):
            source.stop_recording()
            return self._close_call("}")
        source.read_truncated_literal(call_format.parameter_begin, call_format.call_end)
        if separator == "{":
            return (yield from self.report_call_at_end(name))
        text_after_parameter = source.stop_recording()
        if (yield from source.peek()):
            self._close_call("}")
            self.collector.add_content(text_after_parameter)
        return True

    def _read_parameter_value(self, missing_keys: Set[str]) -> ReadGenerator[tuple[str, str | None] | None]:
        """Reads a value and its closing tag. Returns (value, next_key); None if the answer ends within the value.

        missing_keys: parameters of the function that the call does not have yet.
        next_key: name of the next parameter if this parameter begins before the closing tag; `call_end` if the call
            ends before the closing tag; else None.
        """
        source, call_format = self.source, self.call_format
        tags = (call_format.parameter_end, call_format.parameter_begin, call_format.call_end)
        value: list[str] = []
        while (tag := (yield from source.read_until(tags, value.append))) is not None:
            source.start_recording()
            yield from source.read_literal(tag)
            if tag == call_format.parameter_end:
                return "".join(value), None
            if tag == call_format.call_end:
                if (yield from self._read_to_next_call()):
                    source.unread(source.stop_recording().removeprefix(tag))
                    return self._trim_unclosed_value("".join(value)), tag
            else:
                next_key = yield from source.read_name(call_format.key_end)
                if next_key is not None and next_key.strip() in missing_keys:
                    return self._trim_unclosed_value("".join(value)), next_key
            value.append(source.stop_recording())
        return None

    def _read_to_next_call(self) -> ReadGenerator[bool]:
        """Reads the tags after a call. Returns whether the answer ends, or another call of a known function begins."""
        source, call_format = self.source, self.call_format
        yield from source.skip_whitespace()
        yield from self._read_closing_tag(call_format.end)
        yield from source.skip_whitespace()
        if not (yield from source.peek()):
            return True
        yield from source.read_literal(call_format.begin)
        yield from source.skip_whitespace()
        if not (yield from source.read_literal(call_format.call_begin)):
            return False
        name = yield from source.read_name(call_format.name_end)
        return name is not None and name.strip() in self.schemas

    def _trim_unclosed_value(self, value: str) -> str:
        return value if self.call_format.wraps_values_in_line_breaks else value.rstrip(WHITESPACE)

    def _close_call(self, brace: str) -> bool:
        """Ends the arguments with `brace`, and ends the call. Returns True."""
        self.collector.add_arguments(brace)
        self.collector.end_call(self.call_format.separator)
        return True

    def _parameter_json(self, name: str, key: str, value: str) -> str:
        if self.call_format.wraps_values_in_line_breaks:
            value = value.removeprefix("\n").removesuffix("\n")
        return to_parameter_json(value, self.schemas.get(name), key)


def make_reader(
    call_format: ToolCallFormat, source: Source, collector: EventCollector, schemas: SchemasByFunction
) -> CallReader[Any]:
    """Returns the reader for a format."""
    match call_format:
        case JsonCalls():
            return JsonReader(call_format, source, collector, schemas)
        case FencedCalls():
            return FencedReader(call_format, source, collector, schemas)
        case XmlCalls():
            return XmlReader(call_format, source, collector, schemas)
