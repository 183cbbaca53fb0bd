"""What a JSON text that was cut off was amid, and whether that would ever have ended."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# A run of these is longer than anybody means.
LONG_WHITESPACE = 10
LONG_NUMBER = 45
# A string that repeats itself over so many characters and tokens at the end, and so many times, goes on doing so.
REPEATED_CHARACTERS = 120
REPEATED_TOKENS = 128
TIMES = 4
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NUMBER = re.compile(r"[-+.0-9eE]+$")


@dataclass(frozen=True, slots=True)
class Tail:
    """amid: what the text was amid. endless: whether it looked as if it would never end."""

    amid: Literal["whitespace", "number", "string", "array or object"]
    endless: bool


def tail_of(text: str, tokens: Sequence[int]) -> Tail:
    """What `text`, the beginning of a JSON text that ends with `tokens`, ends amid."""
    # Without the strings that are whole, a quotation mark begins one that is not.
    _, quote, within = _STRING.sub("", text).partition('"')
    if quote:
        return Tail("string", repeats(within, REPEATED_CHARACTERS) and repeats(tokens, REPEATED_TOKENS))
    spaces = len(text) - len(text.rstrip())
    if spaces >= LONG_WHITESPACE:
        return Tail("whitespace", True)
    if number := _NUMBER.search(text):
        return Tail("number", len(number[0]) >= LONG_NUMBER)
    return Tail("array or object", False)


def repeats(text: Sequence[object], least: int) -> bool:
    """Whether the end of `text`, at least so much of it, is the same over and over."""
    for period in range(1, len(text) // TIMES + 1):
        length = max(least, period * TIMES)
        if length > len(text):
            return False
        end = text[-length:]
        if end[period:] == end[:-period]:
            return True
    return False
