"""Writes pattern trees in xgrammar's syntax."""

from itertools import pairwise

from nanovllm_core.grammar.bounded_strings import parse_bounded_pattern
from nanovllm_core.grammar.schemas.characters import MAX_CODE_POINT, Ranges
from nanovllm_core.grammar.schemas.regex import EMPTY, Alt, Chars, Node, RegexError, Repeat, Seq

# An empty match with a non-ASCII character, which makes xgrammar use rules instead of an automaton.
BY_RULES = "é{0,0}"
# Largest count of a repeated character in an automaton.
MAX_COUNTED = 128
# Ranges are split at these code points, because automata otherwise accept overlong UTF-8.
UTF8_EDGES = (0x800, 0x10000)


def write(node: Node) -> str:
    """Write a pattern for the whole string, with classes, groups and quantifiers only.

    xgrammar 0.2.8 compiles ASCII patterns to automata. These accept some strings that do not match (`a|b|[ab]|b{1,2}`
    accepts "ab"), accept overlong UTF-8, and fail for counts above 128. Patterns with a non-ASCII character become
    rules, which are correct. Length bounds alone stay automata, because masks of rules are over 100 times slower.
    """
    match node:
        case Repeat(Chars(ranges), low, high) if max(low, high or 0) <= MAX_COUNTED:
            return _repeated(ranges, low, high)
        case _:
            return f"^(?:{_written(node)}){BY_RULES}$"


def write_value(node: Node) -> str:
    """Like `write`, for a string value. Length bounds that `BoundedStrings` can rewrite are kept as a plain count."""
    match node:
        case Repeat(Chars(ranges), low, high) if (
            parse_bounded_pattern(written := _repeated(ranges, low, high)) is not None
        ):
            return written
        case _:
            return write(node)


def _repeated(ranges: Ranges, low: int, high: int | None) -> str:
    return f"^(?:{_by_size(ranges)}){{{low},{'' if high is None else high}}}$"


def _by_size(ranges: Ranges) -> str:
    """A class for `ranges`, split into one class per UTF-8 length."""
    edges = (0, *UTF8_EDGES, MAX_CODE_POINT + 1)
    sizes = [
        tuple((max(a, low), min(b, high - 1)) for a, b in ranges if a < high and b >= low)
        for low, high in pairwise(edges)
    ]
    return "|".join(_class(some) for some in sizes if some)


def _written(node: Node) -> str:
    match node:
        case Chars(ranges):
            return _class(ranges)
        case Seq(parts):
            return "".join(f"(?:{_written(part)})" if isinstance(part, Alt) else _written(part) for part in parts)
        case Alt(options):
            some = [_written(option) for option in options if option != EMPTY]
            return "|".join(some) + "|" * (len(some) < len(options))
        case Repeat(Chars() as part, low, high):
            return _counted(_written(part), low, high)
        case Repeat(part, low, high):
            return _counted(f"(?:{_written(part)})", low, high)
        case _:
            raise RegexError("it has an assertion in the middle")


def _counted(inner: str, low: int, high: int | None) -> str:
    match low, high:
        case 0, None:
            return f"{inner}*"
        case 1, None:
            return f"{inner}+"
        case _, None:
            return f"{inner}{{{low}}}{inner}*"
        case 0, 1:
            return f"(?:{inner}|)"
        case 1, 1:
            return inner
        case _:
            return f"{inner}{{{low},{high}}}"


def _class(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _point(ranges[0][0])
    # A leading ^ would negate the class; in some code paths of xgrammar an escaped one too. So it comes last.
    ordered = sorted(ranges, key=lambda bounds: bounds[0] == ord("^"))
    return "[" + "".join(_point(a) if a == b else f"{_point(a)}-{_point(b)}" for a, b in ordered) + "]"


def _point(point: int) -> str:
    character = chr(point)
    if character.isascii() and (character.isalnum() or character in " !#%&',:;<=>@_`~\""):
        return character
    return f"\\{character}" if 0x21 <= point < 0x7F and character not in "/-" else f"\\u{{{point:x}}}"
