"""What an answer turns out to say, bit by bit, and the one place where whitespace around its parts is decided.

This room must not know any format.
"""

import msgspec

SPACE = " \n\r\t"


class ReasoningText(msgspec.Struct, frozen=True, gc=False):
    """Reasoning goes on."""

    text: str


class ContentText(msgspec.Struct, frozen=True, gc=False):
    """Content goes on."""

    text: str


class CallBegun(msgspec.Struct, frozen=True, gc=False):
    """The `index`-th tool call of the answer, from 0, calls the function `name`."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """The arguments of a call, JSON as text, go on."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True, gc=False):
    """A call has all of its arguments."""

    index: int


Event = ReasoningText | ContentText | CallBegun | CallArguments | CallEnded


class Trimmer:
    """Text whose whitespace at either end may turn out to be no part of it: held back until what follows decides.

    holds: whether whitespace at the end can be undecided at all. skip_leading: leave out whitespace and the characters
    `extra` up to the first other one.
    """

    def __init__(self, *, holds: bool, skip_leading: bool):
        self.holds = holds
        self.skip_leading = skip_leading
        # Whether text has come out.
        self.said = False
        # Characters that are treated as whitespace, until the next other one.
        self.extra = ""
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """The text that is decided with `text`."""
        body = text.rstrip(SPACE) if self.holds else text
        if self.extra and not body.strip(SPACE + self.extra):
            body = ""
        self._held.append(body or text)
        if not body:
            return ""
        out = self._take()
        if self.skip_leading:
            out = out.lstrip(SPACE + self.extra)
        if out:
            self.said, self.skip_leading, self.extra = True, False, ""
        if len(body) < len(text):
            self._held.append(text[len(body) :])
        return out

    def drop(self) -> None:
        """Leave out what is held: it stands before something that is no text."""
        self._held.clear()

    def flush(self) -> str:
        """What is held, at the end of everything, unless it is to be left out."""
        out = self._take()
        return "" if self.skip_leading else out

    def _take(self) -> str:
        out = "".join(self._held)
        self._held.clear()
        return out


class Report:
    """The events of one answer in the making. calls: whether tool calls may come."""

    def __init__(self, *, calls: bool) -> None:
        self.num_calls = 0
        # Whether a call has begun and not ended.
        self.in_call = False
        self._events: list[Event] = []
        self._reasoning = Trimmer(holds=True, skip_leading=True)
        self._content = Trimmer(holds=calls, skip_leading=False)

    @property
    def settled(self) -> bool:
        """Whether content comes out as it goes in."""
        return not (self._content.holds or self._content.skip_leading)

    def take(self) -> list[Event]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    def reasoning(self, text: str) -> None:
        """Go on reasoning."""
        if out := self._reasoning.push(text):
            self._events.append(ReasoningText(out))

    def end_reasoning(self) -> None:
        """Content or a call is next, without the whitespace between."""
        self._reasoning.drop()
        self._content.skip_leading = True

    def content(self, text: str) -> None:
        """Go on with content."""
        if out := self._content.push(text):
            self._events.append(ContentText(out))

    def begin_call(self, name: str) -> None:
        """A call of the function `name` begins, and with it the end of reasoning and text."""
        self._reasoning.drop()
        self._content.drop()
        self.in_call = True
        self._events.append(CallBegun(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """The call's arguments go on."""
        if text:
            self._events.append(CallArguments(self.num_calls - 1, text))

    def end_call(self, separator: str = "") -> None:
        """The call is complete. separator: characters that count as whitespace between calls."""
        self.in_call = False
        self._events.append(CallEnded(self.num_calls - 1))
        # Between content and more content it stays.
        self._content.skip_leading = not self._content.said
        self._content.extra = separator

    def finish(self) -> None:
        """Nothing follows."""
        if reasoning := self._reasoning.flush():
            self._events.append(ReasoningText(reasoning))
        content = self._content.flush()
        if content and not self.num_calls:
            self._events.append(ContentText(content))
