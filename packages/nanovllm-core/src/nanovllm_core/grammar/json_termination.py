"""Ends JSON strings, numbers and nesting that a small model would continue forever, once the grammar allows the end.

The grammar itself has no length limits, because length limits make xgrammar slow.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# A string is closed after at least MIN_REPETITIONS repetitions that have at least MIN_REPEATED_TOKENS tokens in total.
MIN_REPETITIONS = 4
MIN_REPEATED_TOKENS = 96
# Maximum length of a repeated pattern, in tokens.
MAX_PERIOD_TOKENS = 64
# Maximum number of tokens of a string, if the grammar allows the string to end.
MAX_STRING_TOKENS = 8_192
# A repetitive string that the grammar does not allow to end must stop repeating after this number of tokens.
MAX_STUCK_TOKENS = 512
# Maximum number of characters of an integer of 64 bits.
MAX_INTEGER_LENGTH = 20
MAX_NUMBER_LENGTH = 40
MAX_EXPONENT_DIGITS = 2
# Maximum depth of nested arrays and objects.
MAX_DEPTH = 32
# The length of a number is checked after at least this many consecutive numeric tokens.
MIN_NUMERIC_TOKENS = 2

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_OPENING_BRACKETS, _CLOSING_BRACKETS = frozenset(b"[{"), frozenset(b"]}")
_STRUCTURAL_BYTES = frozenset((_QUOTE, _BACKSLASH)) | _OPENING_BRACKETS | _CLOSING_BRACKETS
_NUMBER_BYTES = frozenset(b"0123456789+-.eE")
_TRAILING_NUMBER = re.compile(rb"[-+.0-9eE]*$")
# Matches numbers that have reached a limit.
_LONG_NUMBER = re.compile(
    rb"-?[0-9]{%d,}|.{%d}|.*[eE][-+]?[0-9]{%d,}" % (MAX_INTEGER_LENGTH - 1, MAX_NUMBER_LENGTH, MAX_EXPONENT_DIGITS)
)


class JsonTokenClasses:
    """Classifies the tokens of a vocabulary by their effect in a JSON text.

    tokens: the bytes of each token.
    structural_ids: ids of tokens that contain a quotation mark, backslash, bracket or brace.
    numeric_ids: ids of tokens that consist of characters of numbers.

    The other fields are masks, int32 [num_words]:
    whitespace_mask: tokens that consist of whitespace.
    opening_mask: tokens that contain an opening bracket or brace.
    quote_mask: the token `"`, which closes a string.
    letter_mask: the token `a`, which may occur in a string, but can't begin a JSON value.
    bracket_mask: the token `[`, which begins an array.
    line_break_mask: a line break, which no string contains.
    number_start_mask: tokens that begin with a character of numbers.
    """

    def __init__(self, tokens: Sequence[bytes], num_words: int):
        self.tokens = tokens
        self._num_words = num_words
        self.structural_ids = frozenset(
            index for index, token in enumerate(tokens) if not _STRUCTURAL_BYTES.isdisjoint(token)
        )
        self.numeric_ids = frozenset(
            index for index, token in enumerate(tokens) if token and _NUMBER_BYTES.issuperset(token)
        )
        self.whitespace_mask = self._pack_mask([token.isspace() for token in tokens])
        self.opening_mask = self._pack_mask([not _OPENING_BRACKETS.isdisjoint(token) for token in tokens])
        self.quote_mask = self._pack_mask([token == b'"' for token in tokens])
        self.letter_mask = self._pack_mask([token == b"a" for token in tokens])
        self.bracket_mask = self._pack_mask([token == b"[" for token in tokens])
        self.line_break_mask = self._pack_mask([token == b"\n" for token in tokens])
        self.number_start_mask = self._pack_mask([token[:1] != b"" and token[0] in _NUMBER_BYTES for token in tokens])

    def _pack_mask(self, is_member: list[bool]) -> NDArray[np.int32]:
        bits = np.zeros(self._num_words * 32, np.bool_)
        bits[: len(is_member)] = is_member
        return np.packbits(bits, bitorder="little").view(np.int32)


class JsonTerminator:
    """Tracks the tokens of one output, and restricts masks to tokens that end an overlong string, number or nesting.

    Quotation marks and brackets in text before the JSON can make `_is_in_string` and `_depth` wrong.
    """

    def __init__(self, token_classes: JsonTokenClasses):
        self._token_classes = token_classes
        self._is_escaped = False
        self._is_in_string = False
        self._depth = 0
        self._tokens_since_quote: list[int] = []
        # Number of consecutive numeric tokens at the end of the output.
        self._num_numeric_tokens = 0

    def fork(self) -> "JsonTerminator":
        """An independent terminator in the same state."""
        forked = JsonTerminator(self._token_classes)
        vars(forked).update(vars(self), _tokens_since_quote=[*self._tokens_since_quote])
        return forked

    def accept(self, token: int) -> None:
        """Append the next token."""
        self._tokens_since_quote.append(token)
        self._num_numeric_tokens = self._num_numeric_tokens + 1 if token in self._token_classes.numeric_ids else 0
        if token not in self._token_classes.structural_ids and not self._is_escaped:
            return
        for byte in self._token_classes.tokens[token]:
            if self._is_escaped:
                self._is_escaped = False
            elif byte == _BACKSLASH:
                self._is_escaped = True
            elif byte == _QUOTE:
                self._is_in_string = not self._is_in_string
                self._tokens_since_quote.clear()
            elif not self._is_in_string and byte in _OPENING_BRACKETS:
                self._depth += 1
            elif not self._is_in_string and byte in _CLOSING_BRACKETS:
                self._depth = max(self._depth - 1, 0)

    def narrow(self, mask: NDArray[np.int32]) -> None:
        """Forbid tokens that continue an overlong string, number or nesting. Keeps at least one token allowed.

        mask: int32 [num_words], the allowed next tokens.
        """
        if self._depth >= MAX_DEPTH:
            mask_without_opening = mask & ~self._token_classes.opening_mask
            if (mask_without_opening & ~self._token_classes.whitespace_mask).any():
                mask[:] = mask_without_opening
        if self._num_numeric_tokens >= MIN_NUMERIC_TOKENS:
            self._restrict_to_number_end(mask)
        if len(self._tokens_since_quote) >= MIN_REPEATED_TOKENS:
            period = self._repeated_period()
            if period or len(self._tokens_since_quote) >= MAX_STRING_TOKENS:
                self._restrict_to_string_end(mask, period)

    def _restrict_to_number_end(self, mask: NDArray[np.int32]) -> None:
        token_classes = self._token_classes
        # If the output is inside a string, or a string may begin, the last tokens need not be a number.
        if (mask & (token_classes.letter_mask | token_classes.quote_mask)).any():
            return
        # Take one more token, because the number may begin inside that token.
        last_tokens = self._tokens_since_quote[-min(self._num_numeric_tokens, MAX_NUMBER_LENGTH) - 1 :]
        text = b"".join([token_classes.tokens[token] for token in last_tokens])[-MAX_NUMBER_LENGTH:]
        number_match = _TRAILING_NUMBER.search(text)
        end_mask = mask & ~token_classes.number_start_mask
        if number_match is not None and _LONG_NUMBER.fullmatch(number_match[0]) and end_mask.any():
            mask[:] = end_mask

    def _restrict_to_string_end(self, mask: NDArray[np.int32], period: int) -> None:
        token_classes = self._token_classes
        if (mask & token_classes.line_break_mask).any():
            return
        # If `[` is allowed and `a` is not, a value may begin here: a quotation mark would open a string, not close one.
        may_be_in_string = (mask & token_classes.letter_mask).any() or not (mask & token_classes.bracket_mask).any()
        end_mask = mask & token_classes.quote_mask
        if not may_be_in_string:
            return
        if end_mask.any():
            mask[:] = end_mask
        elif period and self._is_in_string and len(self._tokens_since_quote) >= MAX_STUCK_TOKENS:
            # The grammar does not allow the string to end: forbid the token that continues the repetition.
            word, bit = divmod(self._tokens_since_quote[-period], 32)
            other_mask = mask.copy()
            other_mask[word] &= ~np.uint32(1 << bit).view(np.int32)
            if other_mask.any():
                mask[:] = other_mask

    def _repeated_period(self) -> int:
        """Length in tokens of the pattern that repeats at the end of the output; 0 without a repetition."""
        tokens = self._tokens_since_quote
        for period in range(1, MAX_PERIOD_TOKENS + 1):
            if tokens[-1] == tokens[-1 - period] and tokens[-2] == tokens[-2 - period]:
                length = max(MIN_REPEATED_TOKENS, MIN_REPETITIONS * period)
                if len(tokens) >= length and tokens[period - length :] == tokens[-length:-period]:
                    return period
        return 0
