"""Defines the parser's events, and removes whitespace around reasoning, content and calls."""

import msgspec

WHITESPACE = " \n\r\t"


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


class WhitespaceTrimmer:
    """Removes whitespace at the beginning and the end of a text that comes in pieces.

    holds_trailing: hold back whitespace at the end until more text follows.
    skips_leading: remove leading whitespace and leading characters of `separator_characters`.
    """

    def __init__(self, *, holds_trailing: bool, skips_leading: bool):
        self.holds_trailing = holds_trailing
        self.skips_leading = skips_leading
        # Whether `push` has returned text.
        self.has_text = False
        # Characters that `push` treats like whitespace until other text comes.
        self.separator_characters = ""
        self._held_pieces: list[str] = []

    def push(self, text: str) -> str:
        """Adds `text`. Returns the trimmed text that later text can no longer change."""
        trimmed_text = text.rstrip(WHITESPACE) if self.holds_trailing else text
        if self.separator_characters and not trimmed_text.strip(WHITESPACE + self.separator_characters):
            trimmed_text = ""
        self._held_pieces.append(trimmed_text or text)
        if not trimmed_text:
            return ""
        certain_text = self._take_held_text()
        if self.skips_leading:
            certain_text = certain_text.lstrip(WHITESPACE + self.separator_characters)
        if certain_text:
            self.has_text, self.skips_leading, self.separator_characters = True, False, ""
        if len(trimmed_text) < len(text):
            self._held_pieces.append(text[len(trimmed_text) :])
        return certain_text

    def drop(self) -> None:
        """Discards the whitespace that is held back."""
        self._held_pieces.clear()

    def flush(self) -> str:
        """Returns the whitespace that is held back; "" if leading whitespace is skipped."""
        held_text = self._take_held_text()
        return "" if self.skips_leading else held_text

    def _take_held_text(self) -> str:
        held_text = "".join(self._held_pieces)
        self._held_pieces.clear()
        return held_text


class EventCollector:
    """Collects the events of one answer."""

    def __init__(self, *, allows_calls: bool) -> None:
        self.num_calls = 0
        self.in_call = False
        self._events: list[Event] = []
        # Whether reasoning has begun whose end tag has not come yet.
        self._is_reasoning_open = False
        # Text after a call within reasoning: reasoning if the end tag still comes, else content.
        self._undecided_pieces: list[str] = []
        self._reasoning = WhitespaceTrimmer(holds_trailing=True, skips_leading=True)
        self._content = WhitespaceTrimmer(holds_trailing=allows_calls, skips_leading=False)

    @property
    def passes_content_through(self) -> bool:
        """Whether `add_content` reports all further text unchanged and at once."""
        return not (self._content.holds_trailing or self._content.skips_leading)

    def take_events(self) -> list[Event]:
        """Returns and removes the collected events."""
        events, self._events = self._events, []
        return events

    def begin_reasoning(self) -> None:
        """Begins the reasoning. Until `end_reasoning`, `add_content` holds text back."""
        self._is_reasoning_open = True

    def add_reasoning(self, text: str) -> None:
        """Adds text to the reasoning."""
        if trimmed_text := self._reasoning.push(text):
            self._events.append(ReasoningText(trimmed_text))

    def end_reasoning(self, *, skips_whitespace: bool) -> None:
        """Ends the reasoning, and drops the whitespace at its end. skips_whitespace: also the whitespace after it."""
        self._is_reasoning_open = False
        self.add_reasoning(self._take_undecided_text())
        self._reasoning.drop()
        # After content, whitespace stays. Content precedes the end tag only if the reasoning contains two calls.
        self._content.skips_leading = skips_whitespace and not self._content.has_text

    def add_content(self, text: str) -> None:
        """Adds text to the content. Holds the text back until it is certain that the text is not reasoning."""
        if self._is_reasoning_open:
            self._undecided_pieces.append(text)
        else:
            self._push_content(text)

    def begin_call(self, name: str) -> None:
        """Begins a call of the function `name`, and drops the whitespace before the call."""
        # The call must not wait for the end tag, so the text before it becomes content.
        self._push_content(self._take_undecided_text())
        self._reasoning.drop()
        self._content.drop()
        self.in_call = True
        self._events.append(CallBegun(self.num_calls, name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Adds text to the arguments of the call."""
        if text:
            self._events.append(CallArguments(self.num_calls - 1, text))

    def end_call(self, separator: str = "") -> None:
        """Ends the call. separator: characters that, like whitespace, may separate two calls."""
        self.in_call = False
        self._events.append(CallEnded(self.num_calls - 1))
        # If content precedes the call, the whitespace between the call and later content stays.
        self._content.skips_leading = not self._content.has_text
        self._content.separator_characters = separator

    def finish(self) -> None:
        """Ends the answer."""
        self._push_content(self._take_undecided_text())
        if reasoning := self._reasoning.flush():
            self._events.append(ReasoningText(reasoning))
        content = self._content.flush()
        if content and not self.num_calls:
            self._events.append(ContentText(content))

    def _take_undecided_text(self) -> str:
        undecided_text = "".join(self._undecided_pieces)
        self._undecided_pieces.clear()
        return undecided_text

    def _push_content(self, text: str) -> None:
        if trimmed_text := self._content.push(text):
            self._events.append(ContentText(trimmed_text))
