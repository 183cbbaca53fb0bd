"""The parser's events, and the removal of whitespace around reasoning, content and calls."""

import msgspec

SPACE = " \n\r\t"


class ReasoningText(msgspec.Struct, frozen=True, gc=False):
    """More text of the reasoning."""

    text: str


class ContentText(msgspec.Struct, frozen=True, gc=False):
    """More text of the content."""

    text: str


class CallBegun(msgspec.Struct, frozen=True, gc=False):
    """A tool call of the function `name` begins. index: position among the answer's calls, from 0."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More text of a call's arguments, which are JSON."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True, gc=False):
    """A call is complete."""

    index: int


Event = ReasoningText | ContentText | CallBegun | CallArguments | CallEnded


class Trimmer:
    """Removes whitespace at the ends of a text that comes in pieces.

    holds: hold back whitespace at the end until more text follows.
    skip_leading: remove leading whitespace and the characters `extra`.
    """

    def __init__(self, *, holds: bool, skip_leading: bool):
        self.holds = holds
        self.skip_leading = skip_leading
        # Whether `push` has returned text.
        self.has_text = False
        # Characters that are treated like whitespace until other text comes.
        self.extra = ""
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """Adds `text`; returns the text that can be passed on."""
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
            self.has_text, self.skip_leading, self.extra = True, False, ""
        if len(body) < len(text):
            self._held.append(text[len(body) :])
        return out

    def drop(self) -> None:
        """Discards the whitespace that is held back."""
        self._held.clear()

    def flush(self) -> str:
        """The text that is held back, at the end of the answer; "" if leading whitespace is skipped."""
        out = self._take()
        return "" if self.skip_leading else out

    def _take(self) -> str:
        out = "".join(self._held)
        self._held.clear()
        return out


class Report:
    """Collects the events of one answer. calls: the answer may have tool calls."""

    def __init__(self, *, calls: bool) -> None:
        self.num_calls = 0
        # Whether a call has begun and not ended.
        self.in_call = False
        self._events: list[Event] = []
        self._reasoning = Trimmer(holds=True, skip_leading=True)
        self._content = Trimmer(holds=calls, skip_leading=False)

    @property
    def settled(self) -> bool:
        """Whether content now passes unchanged."""
        return not (self._content.holds or self._content.skip_leading)

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def reasoning(self, text: str) -> None:
        """Adds text to the reasoning."""
        if out := self._reasoning.push(text):
            self._events.append(ReasoningText(out))

    def end_reasoning(self) -> None:
        """Ends the reasoning, and drops the whitespace between it and the content or call that follows."""
        self._reasoning.drop()
        self._content.skip_leading = True

    def content(self, text: str) -> None:
        """Adds text to the content."""
        if out := self._content.push(text):
            self._events.append(ContentText(out))

    def begin_call(self, name: str) -> None:
        """Begins a call of the function `name`; drops whitespace before it."""
        self._reasoning.drop()
        self._content.drop()
        self.in_call = True
        self._events.append(CallBegun(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Adds text to the arguments of the call."""
        if text:
            self._events.append(CallArguments(self.num_calls - 1, text))

    def end_call(self, separator: str = "") -> None:
        """Ends the call. separator: characters that count as whitespace between calls."""
        self.in_call = False
        self._events.append(CallEnded(self.num_calls - 1))
        # Whitespace between content before the call and content after it stays.
        self._content.skip_leading = not self._content.has_text
        self._content.extra = separator

    def finish(self) -> None:
        """Ends the answer."""
        if reasoning := self._reasoning.flush():
            self._events.append(ReasoningText(reasoning))
        content = self._content.flush()
        if content and not self.num_calls:
            self._events.append(ContentText(content))
