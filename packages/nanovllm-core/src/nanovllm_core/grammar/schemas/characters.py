"""Represents sets of characters as ranges of code points, and defines the sets that regexes and JSON use."""

from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # Pairs (first code point, last code point).

MAX_CODE_POINT = 0x10FFFF
# Characters that are whitespace in every regex engine.
SPACES: Ranges = ((9, 13), (32, 32))
# Characters that are whitespace in at least one regex engine.
SPACES_IN_ANY_ENGINE: Ranges = (
    (9, 13), (28, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x180E, 0x180E), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
DIGITS: Ranges = ((48, 57),)
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
BEYOND_ASCII: Ranges = ((128, MAX_CODE_POINT),)
# Maps the letter of an escape such as \d to its characters: (in every regex engine, in at least one engine).
CLASS_ESCAPES: dict[str, tuple[Ranges, Ranges]] = {
    "d": (DIGITS, DIGITS + BEYOND_ASCII),
    "w": (WORD, WORD + BEYOND_ASCII),
    "s": (SPACES, SPACES_IN_ANY_ENGINE),
}
# Characters that `.` excludes in at least one regex engine. Every engine excludes the first character, a line feed.
LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x85, 0x85), (0x2028, 0x2029))
# All characters of UTF-8 text, which excludes surrogates.
UTF8_CHARACTERS: Ranges = ((0, 0xD7FF), (0xE000, MAX_CODE_POINT))
# Characters that a JSON string holds without an escape.
UNESCAPED_IN_JSON: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, MAX_CODE_POINT))


def normalize_ranges(ranges: list[tuple[int, int]] | Ranges) -> Ranges:
    """Sort `ranges`, and join ranges that overlap or touch."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return tuple(joined)


def invert_ranges(ranges: Ranges) -> Ranges:
    """The code points outside `ranges`."""
    gaps: list[tuple[int, int]] = []
    next_point = 0
    for low, high in normalize_ranges(ranges):
        if low > next_point:
            gaps.append((next_point, low - 1))
        next_point = high + 1
    if next_point <= MAX_CODE_POINT:
        gaps.append((next_point, MAX_CODE_POINT))
    return tuple(gaps)


def intersect_ranges(first: Ranges, second: Ranges) -> Ranges:
    """The code points in both `first` and `second`."""
    return invert_ranges(normalize_ranges(invert_ranges(first) + invert_ranges(second)))
