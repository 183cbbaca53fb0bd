"""Ends strings and numbers of JSON that would go on for ever, where the grammar has them end whenever they like.

Small models, once they repeat themselves, do so until no token is left. A grammar that counts would stop them at a
length that suits nobody, and xgrammar takes half a second a token to count to 16,384; so it is looked at what was
written. What ends is still what the grammar allows. This room must not know schemas, nor grammars but by their masks.
"""

import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

# Tokens over which a string repeats itself, and how often it does at least: then it is closed.
MAX_REPEATED = 96
MIN_TIMES = 4
# Of what is repeated, in tokens.
MAX_PERIOD = 64
# Tokens of any string that its grammar lets end.
MAX_STRING = 8_192
# Characters of a number: of an integer, which are those that 64 bits need, and of any; and digits of its exponent.
MAX_INTEGER = 20
MAX_NUMBER = 40
MAX_EXPONENT = 2

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_NUMBER = frozenset(b"0123456789+-.eE")
_LONG = re.compile(rb"-?\d{%d}|.{%d}|.*[eE][-+]?\d{%d}" % (MAX_INTEGER - 1, MAX_NUMBER, MAX_EXPONENT))
_PERIODS = np.arange(1, MAX_PERIOD + 1, dtype=np.int32)


class Alphabet:
    """What of a vocabulary tells where in a JSON text an answer is, and what leads on from there.

    tokens: the bytes of each. num_words: int32 words of a mask.
    """

    def __init__(self, tokens: Sequence[bytes], num_words: int):
        self.tokens = tokens
        self._num_words = num_words

    @cached_property
    def quote(self) -> NDArray[np.int32]:
        """The mask of the token that closes a string."""
        return self._mask([token == b'"' for token in self.tokens])

    @cached_property
    def letter(self) -> NDArray[np.int32]:
        """That of a letter that begins no value."""
        return self._mask([token == b"a" for token in self.tokens])

    @cached_property
    def bracket(self) -> NDArray[np.int32]:
        """That of what begins an array."""
        return self._mask([token == b"[" for token in self.tokens])

    @cached_property
    def line_break(self) -> NDArray[np.int32]:
        """That of what stands in no string."""
        return self._mask([token == b"\n" for token in self.tokens])

    @cached_property
    def number(self) -> NDArray[np.int32]:
        """That of the tokens that a number may go on with."""
        return self._mask([token[:1] != b"" and token[0] in _NUMBER for token in self.tokens])

    def _mask(self, chosen: list[bool]) -> NDArray[np.int32]:
        bits = np.zeros(self._num_words * 32, np.bool_)
        bits[: len(chosen)] = chosen
        return np.packbits(bits, bitorder="little").view(np.int32)


class Endings:
    """What one answer has written since the last quotation mark, which is what a string or number of it is within."""

    def __init__(self, alphabet: Alphabet):
        self.alphabet = alphabet
        self._escaped = False
        self._begin()

    def _begin(self) -> None:
        self._length = 0
        # What a number would be that the answer ends with, as far as it matters.
        self._number = b""
        # The latest tokens, the last one first, and for how many tokens each period has held.
        self._latest = np.full(MAX_PERIOD, -1, np.int32)
        self._held = np.zeros(MAX_PERIOD, np.int32)

    def accept(self, token: int) -> None:
        """Take in the next token."""
        self._held += 1
        self._held[self._latest != token] = 0
        self._latest[1:] = self._latest[:-1]
        self._latest[0] = token
        self._length += 1
        for byte in self.alphabet.tokens[token] if token < len(self.alphabet.tokens) else b"":
            self._number = (self._number + bytes((byte,)))[-MAX_NUMBER:] if byte in _NUMBER else b""
            if self._escaped:
                self._escaped = False
            elif byte == _BACKSLASH:
                self._escaped = True
            elif byte == _QUOTE:
                self._begin()

    def narrow(self, mask: NDArray[np.int32]) -> None:
        """Leave in a mask, int32 [words], only what ends a string or number, if that may end and has to."""
        alphabet = self.alphabet
        if _LONG.match(self._number) and not (mask & (alphabet.letter | alphabet.quote)).any():
            ends = mask & ~alphabet.number
            if ends.any():
                mask[:] = ends
                return
        if self._length >= MAX_REPEATED and (self._length >= MAX_STRING or self._repeats()):
            in_string = not (mask & alphabet.line_break).any() and (
                bool((mask & alphabet.letter).any()) or not (mask & alphabet.bracket).any()
            )
            ends = mask & alphabet.quote
            if in_string and ends.any():
                mask[:] = ends

    def _repeats(self) -> bool:
        lengths = self._held + _PERIODS
        return bool(((self._held > 0) & (lengths >= MAX_REPEATED) & (lengths >= MIN_TIMES * _PERIODS)).any())
