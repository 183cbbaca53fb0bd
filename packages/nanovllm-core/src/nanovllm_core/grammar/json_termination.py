"""Ends strings, numbers and nesting of JSON that would never end, where the grammar lets them end.

Small models, once they repeat themselves, do so until no token is left. A grammar that counts would stop them at a
length that suits nobody, and xgrammar takes half a second a token to count to 16,384; so it is looked at what was
written. What ends is still what the grammar allows."""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Tokens over which a string repeats itself, and how often it does at least: then it is closed.
MAX_REPEATED = 96
MIN_TIMES = 4
# Of what is repeated, in tokens.
MAX_PERIOD = 64
# Tokens of any string that its grammar lets end.
MAX_STRING = 8_192
# Tokens of one that its grammar doesn't let end, after which it may not go on repeating itself.
MAX_STUCK = 512
# Characters of a number: of an integer, which are those that 64 bits need, and of any; and digits of its exponent.
MAX_INTEGER = 20
MAX_NUMBER = 40
MAX_EXPONENT = 2
# Arrays and objects inside one another.
MAX_DEPTH = 32
# Tokens that may be too long a number together.
MIN_NUMERIC = 2

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")
_MARKS = frozenset((_QUOTE, _BACKSLASH)) | _OPENING | _CLOSING
_NUMBER = frozenset(b"0123456789+-.eE")
# What is long enough, of the end of a text that a number may be made of.
_END = re.compile(rb"[-+.0-9eE]*$")
_LONG = re.compile(rb"-?[0-9]{%d,}|.{%d}|.*[eE][-+]?[0-9]{%d,}" % (MAX_INTEGER - 1, MAX_NUMBER, MAX_EXPONENT))


class JsonTokenClasses:
    """Tokens of a vocabulary, classified by what they do in a JSON text.

    Computed at construction, since a step waits for the first use.

    tokens: the bytes of each token.
    marked: ids of tokens in which a string, an array or an object may begin or end.
    numeric: ids of tokens of which a number may consist.

    All others are masks, int32 [num_words]:
    blank: whitespace, which changes nothing.
    opening: tokens in which an array or an object may begin.
    quote: the token that closes a string.
    letter: a token that begins no value.
    bracket: the token that begins an array.
    line_break: a token that no string contains.
    number: tokens with which a number may continue.
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
    """Follows the tokens of one answer, and narrows masks to what ends a string, a number or nesting that is too long.

    Keeps the tokens since the last quotation mark and the depth of nesting. Quotation marks in text before the JSON can
    only make the depth wrong.
    """

    def __init__(self, token_classes: JsonTokenClasses):
        self._token_classes = token_classes
        self._escaped = False
        self._in_string = False
        self._depth = 0
        self._written: list[int] = []
        # How many tokens at the end may be of one number.
        self._numeric = 0

    def accept(self, token: int) -> None:
        """Take in the next token."""
        self._written.append(token)
        self._numeric = self._numeric + 1 if token in self._token_classes.numeric else 0
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
        """Leave in a mask, int32 [words], only what ends what has to end and may."""
        if self._depth >= MAX_DEPTH:
            flat = mask & ~self._token_classes.opening
            if (flat & ~self._token_classes.blank).any():
                mask[:] = flat
        if self._numeric >= MIN_NUMERIC:
            self._end_number(mask)
        if len(self._written) >= MAX_REPEATED:
            period = self._period()
            if period or len(self._written) >= MAX_STRING:
                self._end_string(mask, period)

    def _end_number(self, mask: NDArray[np.int32]) -> None:
        token_classes = self._token_classes
        if (mask & (token_classes.letter | token_classes.quote)).any():
            return
        # With what stands before it in the same token.
        last = self._written[-min(self._numeric, MAX_NUMBER) - 1 :]
        text = b"".join([token_classes.tokens[token] for token in last])[-MAX_NUMBER:]
        number = _END.search(text)
        ends = mask & ~token_classes.number
        if number is not None and _LONG.fullmatch(number[0]) and ends.any():
            mask[:] = ends

    def _end_string(self, mask: NDArray[np.int32], period: int) -> None:
        token_classes = self._token_classes
        if (mask & token_classes.line_break).any():
            return
        # Where a value may begin a quotation mark would open a string.
        within = (mask & token_classes.letter).any() or not (mask & token_classes.bracket).any()
        ends = mask & token_classes.quote
        if not within:
            return
        if ends.any():
            mask[:] = ends
        elif period and self._in_string and len(self._written) >= MAX_STUCK:
            # A pattern wants something else first, which is not what comes all the time.
            word, bit = divmod(self._written[-period], 32)
            others = mask.copy()
            others[word] &= ~np.uint32(1 << bit).view(np.int32)
            if others.any():
                mask[:] = others

    def _period(self) -> int:
        """Of how many tokens is what the end repeats; 0 when it doesn't."""
        written = self._written
        for period in range(1, MAX_PERIOD + 1):
            if written[-1] == written[-1 - period] and written[-2] == written[-2 - period]:
                length = max(MAX_REPEATED, MIN_TIMES * period)
                if len(written) >= length and written[period - length :] == written[-length:-period]:
                    return period
        return 0
