"""Sets of characters as ranges of code points: operations on them, and the sets that regex and JSON define."""

from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]

MAX_CODE_POINT = 0x10FFFF
# Whitespace in every regex engine, and in at least one.
SPACES: Ranges = ((9, 13), (32, 32))
SPACES_SOMEWHERE: Ranges = (
    (9, 13), (28, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x180E, 0x180E), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
DIGITS: Ranges = ((48, 57),)
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
BEYOND_ASCII: Ranges = ((128, MAX_CODE_POINT),)
# Each class letter's characters in every regex engine, and in at least one.
CLASSES: dict[str, tuple[Ranges, Ranges]] = {
    "d": (DIGITS, DIGITS + BEYOND_ASCII),
    "w": (WORD, WORD + BEYOND_ASCII),
    "s": (SPACES, SPACES_SOMEWHERE),
}
# Line ends that `.` does not match in at least one regex engine; the first is the only one in every engine.
NO_DOT: Ranges = ((10, 10), (13, 13), (0x85, 0x85), (0x2028, 0x2029))
# Characters that a JSON string holds without an escape.
PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, MAX_CODE_POINT))


def normalized(ranges: list[tuple[int, int]] | Ranges) -> Ranges:
    """`ranges`, sorted, with ranges joined that overlap or touch."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return tuple(joined)


def invert(ranges: Ranges) -> Ranges:
    """The code points that are in none of `ranges`."""
    gaps: list[tuple[int, int]] = []
    next_one = 0
    for low, high in normalized(ranges):
        if low > next_one:
            gaps.append((next_one, low - 1))
        next_one = high + 1
    if next_one <= MAX_CODE_POINT:
        gaps.append((next_one, MAX_CODE_POINT))
    return tuple(gaps)


def common(one: Ranges, other: Ranges) -> Ranges:
    """The code points that are in `one` and `other`."""
    return invert(normalized(invert(one) + invert(other)))
