"""Trees of patterns in xgrammar's spelling. This room must not know what schemas are, nor how patterns are read."""

from itertools import pairwise

from nanovllm_core.grammar.bounded_strings import parse_bounded_pattern
from nanovllm_core.grammar.schemas.characters import MAX_CODE_POINT, Ranges
from nanovllm_core.grammar.schemas.regex import EMPTY, Alt, Chars, Node, RegexError, Repeat, Seq

# Nothing, said outside of ASCII.
BY_RULES = "é{0,0}"
# Of a character in a row, in an automaton.
MAX_COUNTED = 128
# Ranges that cross these are written as several in an automaton, which else lets UTF-8 longer than need be through.
UTF8_EDGES = (0x800, 0x10000)


def write(node: Node) -> str:
    """A whole match in xgrammar's spelling, with classes, groups and quantifiers and nothing else.

    Out of patterns in ASCII xgrammar 0.2.8 makes automata, which take some strings that don't match (`a|b|[ab]|b{1,2}`
    takes "ab"), take UTF-8 that is longer than need be, and fail with counts above 128. Where something outside ASCII
    stands in a pattern it makes rules of it, which are right in all of that; so it does here.

    But not of what only bounds a string's length. With rules every token that is longer than what is left is tried by
    itself, 3 to 20 ms for one row's mask; an automaton has its masks made beforehand, 0.01 ms.
    """
    match node:
        case Repeat(Chars(ranges), low, high) if max(low, high or 0) <= MAX_COUNTED:
            return _repeated(ranges, low, high)
        case _:
            return f"^(?:{_written(node)}){BY_RULES}$"


def write_value(node: Node) -> str:
    """The same for the value of a JSON string: its length is bounded by rules of the engine's, where it has some."""
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
    """One of some characters, as one class for each size in UTF-8 that matters."""
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
    # A ^ in front would negate, even an escaped one on some of xgrammar's ways.
    ordered = sorted(ranges, key=lambda bounds: bounds[0] == ord("^"))
    return "[" + "".join(_point(a) if a == b else f"{_point(a)}-{_point(b)}" for a, b in ordered) + "]"


def _point(point: int) -> str:
    character = chr(point)
    if character.isascii() and (character.isalnum() or character in " !#%&',:;<=>@_`~\""):
        return character
    return f"\\{character}" if 0x21 <= point < 0x7F and character not in "/-" else f"\\u{{{point:x}}}"
