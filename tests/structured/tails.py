"""What a JSON text that was cut off was amid, and whether that would ever have ended."""

import re
from dataclasses import dataclass
from typing import Literal

# A run of these is longer than anybody means.
LONG_WHITESPACE = 10
LONG_NUMBER = 30
# What repeats itself over so many characters at the end, and at least so many times, goes on doing so.
REPEATED = 120
TIMES = 4
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NUMBER = re.compile(r"[-+.0-9eE]+$")


@dataclass(frozen=True, slots=True)
class Tail:
    """amid: what the text was amid. endless: whether it looked as if it would never end."""

    amid: Literal["whitespace", "number", "string", "array or object"]
    endless: bool


def tail_of(text: str) -> Tail:
    """What `text`, the beginning of a JSON text, ends amid."""
    # Without the strings that are whole, a quotation mark begins one that is not.
    _, quote, within = _STRING.sub("", text).partition('"')
    if quote:
        return Tail("string", repeats(within))
    spaces = len(text) - len(text.rstrip())
    if spaces >= LONG_WHITESPACE:
        return Tail("whitespace", True)
    if number := _NUMBER.search(text):
        return Tail("number", len(number[0]) >= LONG_NUMBER)
    return Tail("array or object", False)


def repeats(text: str) -> bool:
    """Whether the end of `text` says the same over and over."""
    for period in range(1, len(text) // TIMES + 1):
        length = max(REPEATED, period * TIMES)
        if length > len(text):
            return False
        end = text[-length:]
        if end[period:] == end[:-period]:
            return True
    return False
