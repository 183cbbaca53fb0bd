"""Reads text that arrives in pieces. The results do not depend on where the pieces end.

Most read methods are generators, which yield when they need more text. The total time is linear in the text's length.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

import orjson

from nanovllm_server.parsing.events import WHITESPACE

Value = TypeVar("Value")
# A generator that yields when it needs more text, and finally returns the value that it has read.
ReadGenerator: TypeAlias = Generator[None, None, Value]

MAX_NAME_LENGTH = 256  # Maximum number of characters of a function's or parameter's name.
# Characters of JSON's numbers, true, false and null.
SCALAR_CHARACTERS = frozenset("+-.0123456789truefalsnE")
# Characters that JSON allows only in strings. Tags, code fences and separators of calls begin with one of these.
STRING_ONLY_CHARACTERS = "<`;"


class NestingCounter:
    """Counts the open brackets and strings (`depth`) of a text, even if the text is not valid JSON."""

    def __init__(self, depth: int = 0):
        self.depth = depth
        self.in_string = False
        self._is_escaped = False

    def step(self, character: str) -> None:
        """Updates the depth for the next character."""
        if self._is_escaped:
            self._is_escaped = False
        elif character == '"':
            self.depth += -1 if self.in_string else 1
            self.in_string = not self.in_string
        elif self.in_string:
            self._is_escaped = character == "\\"
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1

    def end_line(self) -> None:
        """Closes an open string, because a JSON string can't contain a line break."""
        if self.in_string:
            self.depth -= 1
        self.in_string = self._is_escaped = False


class Source:
    """Text that has arrived and is not read yet. Can record the text that is read."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._has_ended = False
        self._recording: list[str] | None = None

    def feed(self, piece: str) -> None:
        """Adds text."""
        self._text = self._text[self._position :] + piece
        self._position = 0

    def unread(self, text: str) -> None:
        """Puts back `text`, which has just been read."""
        self._text = text + self._text[self._position :]
        self._position = 0

    def end(self) -> None:
        """Marks the end of the text."""
        self._has_ended = True

    def start_recording(self) -> None:
        """Starts to record the text that is read. Discards an earlier recording."""
        self._recording = []

    def stop_recording(self) -> str:
        """Stops recording. Returns the text read since `start_recording`."""
        recording, self._recording = self._recording, None
        return "".join(recording or ())

    def peek(self) -> ReadGenerator[str]:
        """Returns the next character without reading it; "" at the end of the text."""
        while self._position == len(self._text):
            if self._has_ended:
                return ""
            yield
        return self._text[self._position]

    def is_next(self, literal: str) -> ReadGenerator[bool]:
        """Returns whether `literal` comes next, without reading it."""
        while not self._text.startswith(literal, self._position):
            num_unread = len(self._text) - self._position
            if self._has_ended or num_unread >= len(literal) or not literal.startswith(self._text[self._position :]):
                return False
            yield
        return True

    def read_literal(self, literal: str) -> ReadGenerator[bool]:
        """Reads `literal` and returns True if it comes next. If not, reads nothing and returns False."""
        if not (yield from self.is_next(literal)):
            return False
        self._read_to(self._position + len(literal))
        return True

    def read_truncated_literal(self, *literals: str) -> bool:
        """If the text has ended and the rest is a prefix of one of `literals`, reads the rest and returns True."""
        unread = self._text[self._position :]
        if not self._has_ended or not unread or not any(literal.startswith(unread) for literal in literals):
            return False
        self._read_to(len(self._text))
        return True

    def skip_whitespace(self) -> ReadGenerator[None]:
        """Reads whitespace."""
        while (character := (yield from self.peek())) and character in WHITESPACE:
            self._read_to(self._position + 1)

    def read_until(self, tags: Sequence[str], sink: Callable[[str], None]) -> ReadGenerator[str | None]:
        """Passes the text before the next of `tags` to `sink`. Returns this tag, still unread; None if no tag comes."""
        while True:
            tag_positions = [(index, tag) for tag in tags if (index := self._text.find(tag, self._position)) >= 0]
            if tag_positions:
                index, tag = min(tag_positions)
                sink(self._read_to(index))
                return tag
            sink(self._read_to(len(self._text) if self._has_ended else self._find_possible_tag(tags)))
            if self._has_ended:
                return None
            yield

    def read_name(self, end: str) -> ReadGenerator[str | None]:
        """Reads a name, and the text `end` that follows the name. Returns the name.

        A name has one line and at most MAX_NAME_LENGTH characters. Returns None and reads nothing if no name comes
        next. If the text ends within a name, reads the rest of the text and returns None.
        """
        while (index := self._text.find(end, self._position)) < 0:
            unread = self._text[self._position :]
            if len(unread) >= MAX_NAME_LENGTH + len(end) or "\n" in unread:
                return None
            if self._has_ended:
                self._read_to(len(self._text))
                return None
            yield
        name = self._text[self._position : index]
        if index - self._position > MAX_NAME_LENGTH or "\n" in name:
            return None
        self._read_to(index + len(end))
        return name

    def read_string(self, max_length: int) -> ReadGenerator[str | None]:
        """Reads and decodes a JSON string of at most `max_length` characters. None: no such string comes next."""
        if (yield from self.peek()) != '"':
            return None
        parts: list[str] = []
        if not (yield from self.read_json(parts.append, max_length)):
            return None
        return _decode_string("".join(parts))

    def read_value(self) -> ReadGenerator[str | None]:
        """Reads any JSON value; returns its text, or None if no value comes next."""
        parts: list[str] = []
        if (yield from self.peek()) in ('"', "{", "["):
            return "".join(parts) if (yield from self.read_json(parts.append)) else None
        while (character := (yield from self.peek())) and character in SCALAR_CHARACTERS:
            parts.append(self._read_to(self._position + 1))
        return "".join(parts) or None

    def read_json(self, sink: Callable[[str], None], max_length: int | None = None) -> ReadGenerator[bool]:
        """Passes a JSON object, array or string to `sink`, piece by piece. Returns whether the value was complete.

        Tracks only strings and the nesting depth. Other errors in the model's JSON go to `sink` unchanged.
        Outside strings, reading stops before a character of STRING_ONLY_CHARACTERS.
        max_length: None for no limit. With a limit, reading also stops before a line break in a string.
        """
        nesting, length = NestingCounter(), 0
        stop_characters_in_strings = "" if max_length is None else "\n"
        while True:
            text = self._text
            for index in range(self._position, len(text)):
                if text[index] in (stop_characters_in_strings if nesting.in_string else STRING_ONLY_CHARACTERS):
                    sink(self._read_to(index))
                    return False
                nesting.step(text[index])
                length += 1
                is_closed = not nesting.depth
                if is_closed or length == max_length:
                    sink(self._read_to(index + 1))
                    return is_closed
            sink(self._read_to(len(text)))
            if self._has_ended:
                return False
            yield

    def read_rest_of_object(self, sink: Callable[[str], None]) -> ReadGenerator[None]:
        """Passes the rest of an object to `sink`, after the object's { has been read.

        Stops after the object's } or before a line that begins with {.
        """
        nesting, is_line_start = NestingCounter(1), False
        while True:
            text = self._text
            for index in range(self._position, len(text)):
                if is_line_start and text[index] == "{":
                    sink(self._read_to(index))
                    return
                is_line_start = text[index] == "\n"
                if is_line_start:
                    nesting.end_line()
                nesting.step(text[index])
                if not nesting.depth:
                    sink(self._read_to(index + 1))
                    return
            sink(self._read_to(len(text)))
            if self._has_ended:
                return
            yield

    def _find_possible_tag(self, tags: Sequence[str]) -> int:
        """Returns the index at which an incomplete tag may begin; the text's length if there is no such index."""
        text = self._text
        tag_start = len(text)
        for tag in tags:
            index = text.find(tag[0], max(self._position, len(text) - len(tag) + 1))
            while 0 <= index < tag_start:
                if tag.startswith(text[index:]):
                    tag_start = index
                    break
                index = text.find(tag[0], index + 1)
        return tag_start

    def _read_to(self, end: int) -> str:
        text = self._text[self._position : end]
        self._position = end
        if self._recording is not None:
            self._recording.append(text)
        return text


def _decode_string(literal: str) -> str | None:
    try:
        decoded: object = orjson.loads(literal)
    except orjson.JSONDecodeError:
        return None
    return decoded if isinstance(decoded, str) else None
