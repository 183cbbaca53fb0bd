"""Finds out where a JSON text was cut off, and whether it would ever have ended there."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# A run of whitespace, or a number, with at least this many characters counts as endless.
LONG_WHITESPACE = 10
LONG_NUMBER = 45
# A string counts as endless if its last characters and tokens repeat a sequence at least MIN_REPETITIONS times.
REPEATED_CHARACTERS = 120
REPEATED_TOKENS = 128
MIN_REPETITIONS = 4
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NUMBER = re.compile(r"[-+.0-9eE]+$")


@dataclass(frozen=True, slots=True)
class Tail:
    """part: the part of JSON in which the text was cut off."""

    part: Literal["whitespace", "number", "string", "array or object"]
    endless: bool


def find_tail(text: str, tokens: Sequence[int]) -> Tail:
    """tokens: the last tokens of `text`."""
    # After the removal of complete strings, a quotation mark begins the string that was cut off.
    _, quote, within = _STRING.sub("", text).partition('"')
    if quote:
        return Tail("string", is_repetitive(within, REPEATED_CHARACTERS) and is_repetitive(tokens, REPEATED_TOKENS))
    spaces = len(text) - len(text.rstrip())
    if spaces >= LONG_WHITESPACE:
        return Tail("whitespace", True)
    if number := _NUMBER.search(text):
        return Tail("number", len(number[0]) >= LONG_NUMBER)
    return Tail("array or object", False)


def is_repetitive(text: Sequence[object], min_length: int) -> bool:
    """Returns whether at least the last `min_length` elements of `text` repeat a shorter sequence."""
    for period in range(1, len(text) // MIN_REPETITIONS + 1):
        length = max(min_length, period * MIN_REPETITIONS)
        if length > len(text):
            return False
        end = text[-length:]
        if end[period:] == end[:-period]:
            return True
    return False
