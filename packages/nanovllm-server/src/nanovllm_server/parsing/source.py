"""Reads text that arrives in pieces. The result does not depend on where the text is split.

Readers are generators that yield when they need more text. The total time is proportional to the text's length.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

import orjson

from nanovllm_server.parsing.events import SPACE

Value = TypeVar("Value")
# A reader: yields when it needs more text, and returns the value that it read.
Reading: TypeAlias = Generator[None, None, Value]

# Maximum number of characters in a name.
MAX_NAME = 256
# Characters of JSON's numbers, true, false and null.
SCALARS = frozenset("+-.0123456789truefalsnE")
# JSON allows these characters only inside strings. Tags, code fences and separators of calls begin with one of them.
NO_JSON = "<`;"


class Nesting:
    """Counts open brackets and strings in a text that need not be valid JSON."""

    def __init__(self, depth: int = 0):
        self.depth = depth
        self.in_string = False
        self._escaped = False

    def step(self, character: str) -> None:
        """Updates the depth for the next character."""
        if self._escaped:
            self._escaped = False
        elif character == '"':
            self.depth += -1 if self.in_string else 1
            self.in_string = not self.in_string
        elif self.in_string:
            self._escaped = character == "\\"
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1

    def end_line(self) -> None:
        """Closes an open string: a JSON string has one line."""
        if self.in_string:
            self.depth -= 1
        self.in_string = self._escaped = False


class Source:
    """Text that has arrived and is not yet read. On demand, it records the text that is read."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._record: list[str] | None = None

    def feed(self, piece: str) -> None:
        """Adds text."""
        self._text = self._text[self._at :] + piece
        self._at = 0

    def end(self) -> None:
        """Marks the end of the text."""
        self._ended = True

    def record(self) -> None:
        """Starts to record the text that is read."""
        self._record = []

    def recorded(self) -> str:
        """Stops recording; returns the text read since `record`."""
        record, self._record = self._record, None
        return "".join(record or ())

    def peek(self) -> Reading[str]:
        """The next character, without reading it; "" at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def ahead(self, literal: str) -> Reading[bool]:
        """Whether `literal` comes next, without reading it."""
        while not self._text.startswith(literal, self._at):
            rest = len(self._text) - self._at
            if self._ended or rest >= len(literal) or not literal.startswith(self._text[self._at :]):
                return False
            yield
        return True

    def literal(self, literal: str) -> Reading[bool]:
        """Reads `literal` if it comes next; returns whether it did."""
        if not (yield from self.ahead(literal)):
            return False
        self._take(self._at + len(literal))
        return True

    def broken_off(self, *literals: str) -> bool:
        """If the text has ended in an incomplete literal of `literals`, reads it; returns whether it did."""
        rest = self._text[self._at :]
        if not self._ended or not rest or not any(literal.startswith(rest) for literal in literals):
            return False
        self._take(len(self._text))
        return True

    def space(self) -> Reading[None]:
        """Reads whitespace."""
        while (character := (yield from self.peek())) and character in SPACE:
            self._take(self._at + 1)

    def until(self, tags: Sequence[str], sink: Callable[[str], None]) -> Reading[str | None]:
        """Reads text to `sink` up to the first of `tags`. Returns that tag without reading it, or None at the end."""
        while True:
            found = [(at, tag) for tag in tags if (at := self._text.find(tag, self._at)) >= 0]
            if found:
                at, tag = min(found)
                sink(self._take(at))
                return tag
            sink(self._take(len(self._text) if self._ended else self._undecided(tags)))
            if self._ended:
                return None
            yield

    def name(self, end: str) -> Reading[str | None]:
        """Reads a name and `end` after it; returns the name: one line of at most MAX_NAME characters.

        Otherwise returns None and reads nothing, except that it reads the rest of a text that has ended without `end`.
        """
        while (at := self._text.find(end, self._at)) < 0:
            rest = self._text[self._at :]
            if len(rest) >= MAX_NAME + len(end) or "\n" in rest:
                return None
            if self._ended:
                self._take(len(self._text))
                return None
            yield
        name = self._text[self._at : at]
        if at - self._at > MAX_NAME or "\n" in name:
            return None
        self._take(at + len(end))
        return name

    def string(self, max_length: int) -> Reading[str | None]:
        """Reads a JSON string, which takes at most `max_length` characters, and decodes it.

        Returns None if no such string comes next.
        """
        if (yield from self.peek()) != '"':
            return None
        parts: list[str] = []
        if not (yield from self.json(parts.append, max_length)):
            return None
        return _decoded("".join(parts))

    def value(self) -> Reading[str | None]:
        """Reads any JSON value; returns its text, or None if no value comes next."""
        parts: list[str] = []
        if (yield from self.peek()) in ('"', "{", "["):
            return "".join(parts) if (yield from self.json(parts.append)) else None
        while (character := (yield from self.peek())) and character in SCALARS:
            parts.append(self._take(self._at + 1))
        return "".join(parts) or None

    def json(self, sink: Callable[[str], None], max_length: int | None = None) -> Reading[bool]:
        """Reads a JSON object, array or string to `sink`, piece by piece; returns whether it was complete.

        Checks strings and brackets only; other mistakes of the model go to `sink` unchanged.
        Outside strings it stops before a character of NO_JSON.
        max_length: maximum number of characters; a line break in a string then stops reading too. None: no limit.
        """
        nesting, length = Nesting(), 0
        ends_string = "" if max_length is None else "\n"
        while True:
            text = self._text
            for at in range(self._at, len(text)):
                if text[at] in (ends_string if nesting.in_string else NO_JSON):
                    sink(self._take(at))
                    return False
                nesting.step(text[at])
                length += 1
                closed = not nesting.depth
                if closed or length == max_length:
                    sink(self._take(at + 1))
                    return closed
            sink(self._take(len(text)))
            if self._ended:
                return False
            yield

    def braces(self, sink: Callable[[str], None]) -> Reading[None]:
        """Reads the rest of an open object to `sink`: through its closing brace, or up to a line that begins with {."""
        nesting, at_start = Nesting(1), False
        while True:
            text = self._text
            for at in range(self._at, len(text)):
                if at_start and text[at] == "{":
                    sink(self._take(at))
                    return
                at_start = text[at] == "\n"
                if at_start:
                    nesting.end_line()
                nesting.step(text[at])
                if not nesting.depth:
                    sink(self._take(at + 1))
                    return
            sink(self._take(len(text)))
            if self._ended:
                return
            yield

    def _undecided(self, tags: Sequence[str]) -> int:
        """The start of the longest end of the text that may begin a tag; the text's length if there is none."""
        text = self._text
        undecided = len(text)
        for tag in tags:
            at = text.find(tag[0], max(self._at, len(text) - len(tag) + 1))
            while 0 <= at < undecided:
                if tag.startswith(text[at:]):
                    undecided = at
                    break
                at = text.find(tag[0], at + 1)
        return undecided

    def _take(self, end: int) -> str:
        out = self._text[self._at : end]
        self._at = end
        if self._record is not None:
            self._record.append(out)
        return out


def _decoded(literal: str) -> str | None:
    try:
        decoded: object = orjson.loads(literal)
    except orjson.JSONDecodeError:
        return None
    return decoded if isinstance(decoded, str) else None
