"""Text that comes in pieces, read as if it were all there.

Readers are generators that yield where they need more text, so that what they read never depends on how it was cut, and
each of them looks like what it reads. Text is looked at again only where a tag could begin at its end, so that reading
takes time in proportion to its length. This room must not know any format.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

import orjson

from nanovllm_server.parsing.events import SPACE

Value = TypeVar("Value")
# A reader: yields when it needs more text, returns what it read.
Reading: TypeAlias = Generator[None, None, Value]

# Beyond that a name is none.
MAX_NAME = 256
# What JSON has in numbers, true, false and null.
SCALARS = frozenset("+-.0123456789truefalsnE")
# What nothing that is meant to be JSON has outside of strings; tags and fences begin with it.
NO_JSON = "<`;"


class Nesting:
    """How deep in brackets and strings a text is, as far as that can be said of any text."""

    def __init__(self, depth: int = 0):
        self.depth = depth
        self.in_string = False
        self._escaped = False

    def step(self, character: str) -> None:
        """Go past a character."""
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
        """Leave a string that was not closed: none of JSON's goes over several lines."""
        if self.in_string:
            self.depth -= 1
        self.in_string = self._escaped = False


class Source:
    """Text that has come and is not yet read, and on demand a record of what was read, to be taken back."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._record: list[str] | None = None

    def feed(self, piece: str) -> None:
        """Add text."""
        self._text = self._text[self._at :] + piece
        self._at = 0

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    def record(self) -> None:
        """Keep what is read from here on."""
        self._record = []

    def recorded(self) -> str:
        """What was read since `record`; it isn't kept any longer."""
        record, self._record = self._record, None
        return "".join(record or ())

    def peek(self) -> Reading[str]:
        """The next character, "" at the end; not read yet."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def ahead(self, literal: str) -> Reading[bool]:
        """Whether `literal` comes next; not read yet."""
        while not self._text.startswith(literal, self._at):
            rest = len(self._text) - self._at
            if self._ended or rest >= len(literal) or not literal.startswith(self._text[self._at :]):
                return False
            yield
        return True

    def literal(self, literal: str) -> Reading[bool]:
        """Read `literal` if it comes next, and nothing if it doesn't."""
        if not (yield from self.ahead(literal)):
            return False
        self._take(self._at + len(literal))
        return True

    def broken_off(self, *literals: str) -> bool:
        """Read the rest, if all text ends within one of `literals`."""
        rest = self._text[self._at :]
        if not self._ended or not rest or not any(literal.startswith(rest) for literal in literals):
            return False
        self._take(len(self._text))
        return True

    def space(self) -> Reading[None]:
        """Read whitespace."""
        while (character := (yield from self.peek())) and character in SPACE:
            self._take(self._at + 1)

    def until(self, tags: Sequence[str], sink: Callable[[str], None]) -> Reading[str | None]:
        """Read up to the first of `tags`, which is not read and returned; None at the end. The text goes to `sink`."""
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
        """Read up to and including `end`; the text before, or None if it isn't one line of at most MAX_NAME.

        What isn't stays unread, unless it is all that is left.
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
        """Read a JSON string of at most that many characters in source; None if none comes next."""
        if (yield from self.peek()) != '"':
            return None
        parts: list[str] = []
        if not (yield from self.json(parts.append, max_length)):
            return None
        return _decoded("".join(parts))

    def value(self) -> Reading[str | None]:
        """Read any JSON value, and return it as it stands; None if none comes next."""
        parts: list[str] = []
        if (yield from self.peek()) in ('"', "{", "["):
            return "".join(parts) if (yield from self.json(parts.append)) else None
        while (character := (yield from self.peek())) and character in SCALARS:
            parts.append(self._take(self._at + 1))
        return "".join(parts) or None

    def json(self, sink: Callable[[str], None], max_length: int | None = None) -> Reading[bool]:
        """Read the JSON object, array or string that comes next, to `sink` as it comes; whether it was all there.

        Looks only at strings and brackets, so that what a model gets wrong between them is passed on. Ends before a
        character of NO_JSON; with `max_length`, also after so many characters and before the end of the line.
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
        """Read on, to `sink`, from within an opened brace to the one that closes it, or to a line that opens one."""
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
        """Where at the end of the text a tag could begin; its end if nowhere."""
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
