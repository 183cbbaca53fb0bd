"""Ends strings, numbers and nesting of JSON that small models repeat without end, where the grammar allows an end.

The decision depends on the output so far, because length limits in the grammar are slow in xgrammar.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# A string is closed when a pattern repeats over this many tokens and at least this many times.
MAX_REPEATED = 96
MIN_TIMES = 4
# Longest repeated pattern, in tokens.
MAX_PERIOD = 64
# Tokens after which any string is closed, where the grammar allows it.
MAX_STRING = 8_192
# Tokens after which a string that the grammar does not let end may not repeat the same token sequence.
MAX_STUCK = 512
# Characters of an integer (as many as 64 bits need) and of any number, and digits of its exponent.
MAX_INTEGER = 20
MAX_NUMBER = 40
MAX_EXPONENT = 2
# Depth of nested arrays and objects.
MAX_DEPTH = 32
# Numbers are checked from this many numeric tokens on.
MIN_NUMERIC = 2

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")
_MARKS = frozenset((_QUOTE, _BACKSLASH)) | _OPENING | _CLOSING
_NUMBER = frozenset(b"0123456789+-.eE")
# The end of a text that may be a number, and numbers that have reached a limit.
_TRAILING_NUMBER = re.compile(rb"[-+.0-9eE]*$")
_LONG_NUMBER = re.compile(rb"-?[0-9]{%d,}|.{%d}|.*[eE][-+]?[0-9]{%d,}" % (MAX_INTEGER - 1, MAX_NUMBER, MAX_EXPONENT))


class JsonTokenClasses:
    """Tokens of a vocabulary, classified by their effect in a JSON text.

    Computed at construction, because a step would wait for it at the first use.

    tokens: the bytes of each token.
    marked: ids of tokens that contain a quotation mark, backslash, bracket or brace.
    numeric: ids of tokens that consist of characters of numbers.

    The other fields are masks, int32 [num_words]:
    blank: tokens of whitespace.
    opening: tokens that contain an opening bracket or brace.
    quote: the token `"`, which closes a string.
    letter: the token `a`, which can't begin a JSON value.
    bracket: the token `[`, which begins an array.
    line_break: a line break, which no string contains.
    number: tokens that begin with a character of numbers.
    """

    def __init__(self, tokens: Sequence[bytes], num_words: int):
        self.tokens = tokens
        self._num_words = num_words
        self.marked = frozenset(index for index, token in enumerate(tokens) if not _MARKS.isdisjoint(token))
        self.numeric = frozenset(index for index, token in enumerate(tokens) if token and _NUMBER.issuperset(token))
        self.blank = self._mask([token.isspace() for token in tokens])
        self.opening = self._mask([not _OPENING.isdisjoint(token) for token in tokens])
        self.quote = self._mask([token == b'"' for token in tokens])
        self.letter = self._mask([token == b"a" for token in tokens])
        self.bracket = self._mask([token == b"[" for token in tokens])
        self.line_break = self._mask([token == b"\n" for token in tokens])
        self.number = self._mask([token[:1] != b"" and token[0] in _NUMBER for token in tokens])

    def _mask(self, chosen: list[bool]) -> NDArray[np.int32]:
        bits = np.zeros(self._num_words * 32, np.bool_)
        bits[: len(chosen)] = chosen
        return np.packbits(bits, bitorder="little").view(np.int32)


class JsonTerminator:
    """Follows the tokens of one output, and restricts masks to tokens that end an overlong string, number or nesting.

    It tracks the tokens since the last quotation mark and the depth of nesting. Quotation marks in text before the JSON
    can only make the depth wrong.
    """

    def __init__(self, token_classes: JsonTokenClasses):
        self._token_classes = token_classes
        self._escaped = False
        self._in_string = False
        self._depth = 0
        self._written: list[int] = []
        # Trailing tokens that may belong to one number.
        self._num_numeric = 0

    def accept(self, token: int) -> None:
        """Append the next token."""
        self._written.append(token)
        self._num_numeric = self._num_numeric + 1 if token in self._token_classes.numeric else 0
        if token not in self._token_classes.marked and not self._escaped:
            return
        for byte in self._token_classes.tokens[token]:
            if self._escaped:
                self._escaped = False
            elif byte == _BACKSLASH:
                self._escaped = True
            elif byte == _QUOTE:
                self._in_string = not self._in_string
                self._written.clear()
            elif not self._in_string and byte in _OPENING:
                self._depth += 1
            elif not self._in_string and byte in _CLOSING:
                self._depth = max(self._depth - 1, 0)

    def narrow(self, mask: NDArray[np.int32]) -> None:
        """Restrict a mask, int32 [words], to ending tokens where something must end and the mask allows an end."""
        if self._depth >= MAX_DEPTH:
            flat = mask & ~self._token_classes.opening
            if (flat & ~self._token_classes.blank).any():
                mask[:] = flat
        if self._num_numeric >= MIN_NUMERIC:
            self._end_number(mask)
        if len(self._written) >= MAX_REPEATED:
            period = self._period()
            if period or len(self._written) >= MAX_STRING:
                self._end_string(mask, period)

    def _end_number(self, mask: NDArray[np.int32]) -> None:
        token_classes = self._token_classes
        if (mask & (token_classes.letter | token_classes.quote)).any():
            return
        # One more token, because the number may begin inside it.
        last = self._written[-min(self._num_numeric, MAX_NUMBER) - 1 :]
        text = b"".join([token_classes.tokens[token] for token in last])[-MAX_NUMBER:]
        number = _TRAILING_NUMBER.search(text)
        ends = mask & ~token_classes.number
        if number is not None and _LONG_NUMBER.fullmatch(number[0]) and ends.any():
            mask[:] = ends

    def _end_string(self, mask: NDArray[np.int32], period: int) -> None:
        token_classes = self._token_classes
        if (mask & token_classes.line_break).any():
            return
        # Where a value may begin, a quotation mark would open a string instead of closing one.
        is_in_string = (mask & token_classes.letter).any() or not (mask & token_classes.bracket).any()
        ends = mask & token_classes.quote
        if not is_in_string:
            return
        if ends.any():
            mask[:] = ends
        elif period and self._in_string and len(self._written) >= MAX_STUCK:
            # The pattern requires another character before the end: forbid the token that continues the repetition.
            word, bit = divmod(self._written[-period], 32)
            others = mask.copy()
            others[word] &= ~np.uint32(1 << bit).view(np.int32)
            if others.any():
                mask[:] = others

    def _period(self) -> int:
        """Length in tokens of the pattern that the output repeats at its end; 0 if it does not repeat."""
        written = self._written
        for period in range(1, MAX_PERIOD + 1):
            if written[-1] == written[-1 - period] and written[-2] == written[-2 - period]:
                length = max(MAX_REPEATED, MIN_TIMES * period)
                if len(written) >= length and written[period - length :] == written[-length:-period]:
                    return period
        return 0
