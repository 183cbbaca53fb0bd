"""Sets of characters as ranges of code points, and the character classes of patterns and JSON."""

from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]

MAX_CODE_POINT = 0x10FFFF
# Characters that every regex engine takes for white space, and those that at least one engine does.
SPACES: Ranges = ((9, 13), (32, 32))
SPACES_SOMEWHERE: Ranges = (
    (9, 13), (28, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x180E, 0x180E), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
DIGITS: Ranges = ((48, 57),)
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
BEYOND_ASCII: Ranges = ((128, MAX_CODE_POINT),)
CLASSES: dict[str, tuple[Ranges, Ranges]] = {
    "d": (DIGITS, DIGITS + BEYOND_ASCII),
    "w": (WORD, WORD + BEYOND_ASCII),
    "s": (SPACES, SPACES_SOMEWHERE),
}
NO_DOT: Ranges = ((10, 10), (13, 13), (0x85, 0x85), (0x2028, 0x2029))
# Characters that a JSON string holds without an escape.
PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, MAX_CODE_POINT))


def normal(ranges: list[tuple[int, int]] | Ranges) -> Ranges:
    """`ranges`, sorted, with adjacent ranges joined."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return tuple(joined)


def invert(ranges: Ranges) -> Ranges:
    """All code points outside of `ranges`."""
    gaps: list[tuple[int, int]] = []
    next_one = 0
    for low, high in normal(ranges):
        if low > next_one:
            gaps.append((next_one, low - 1))
        next_one = high + 1
    if next_one <= MAX_CODE_POINT:
        gaps.append((next_one, MAX_CODE_POINT))
    return tuple(gaps)


def common(one: Ranges, other: Ranges) -> Ranges:
    """The code points that are in both sets."""
    return invert(normal(invert(one) + invert(other)))
