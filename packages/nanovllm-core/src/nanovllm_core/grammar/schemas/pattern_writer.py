"""Writes regex trees in the regex syntax of xgrammar."""

from itertools import pairwise

from nanovllm_core.grammar.bounded_strings import parse_bounded_pattern
from nanovllm_core.grammar.schemas import regex
from nanovllm_core.grammar.schemas.characters import MAX_CODE_POINT, UTF8_CHARACTERS, Ranges

# Matches the empty string. The non-ASCII character makes xgrammar compile a pattern to rules, not to an automaton.
RULES_MARKER = "é{0,0}"
# Maximum number of repetitions of a character that an automaton of xgrammar can count.
MAX_COUNTED_REPETITIONS = 128
# No range may cross these code points, because xgrammar's automaton for such a range accepts overlong UTF-8.
UTF8_LENGTH_EDGES = (0x800, 0x10000)


def write_pattern(node: regex.Node) -> str:
    """Writes `node`, which matches whole strings, as a pattern of classes, groups and quantifiers only.

    xgrammar 0.2.8 compiles ASCII patterns to automata. Automata have three bugs: they accept strings that don't
    match (`a|b|[ab]|b{1,2}` accepts "ab"), they accept overlong UTF-8, and they fail with more than 128 repetitions.
    `RULES_MARKER` makes xgrammar compile a pattern to rules, which are correct.

    A repeated character class stays an automaton: the bugs do not affect it, and rules would be slow. A mask (set of
    allowed next tokens) takes 3 to 20 ms with rules, and 0.01 ms with automata.
    """
    match node:
        case regex.Repeat(regex.CharacterSet(ranges), low, high) if max(low, high or 0) <= MAX_COUNTED_REPETITIONS:
            return _write_repeated(ranges, low, high)
        case _:
            return f"^(?:{_write_unanchored(node)}){RULES_MARKER}$"


def rewrite_pattern(pattern: str) -> str:
    """Rewrites a pattern that matches whole texts for xgrammar. Raises RegexError.

    Why: xgrammar ignores anchors within a pattern, takes unknown escapes such as `\\A` for letters, and lets `.` match
    line breaks. Unlike `write_pattern`, this function always writes rules, which are fast without JSON around them.
    """
    tree = regex.restrict_characters(regex.remove_anchors(regex.parse(pattern)), UTF8_CHARACTERS)
    if tree == regex.NO_STRING:
        raise regex.RegexError("it matches no text")
    return f"(?:{_write_unanchored(tree)}){RULES_MARKER}"


def write_json_string_pattern(node: regex.Node) -> str:
    """Writes `node` for a JSON string, if possible in the form that `BoundedStrings` recognizes."""
    match node:
        case regex.Repeat(regex.CharacterSet(ranges), low, high) if (
            parse_bounded_pattern(written := _write_repeated(ranges, low, high)) is not None
        ):
            return written
        case _:
            return write_pattern(node)


def _write_repeated(ranges: Ranges, low: int, high: int | None) -> str:
    return f"^(?:{_split_by_utf8_length(ranges)}){{{low},{'' if high is None else high}}}$"


def _split_by_utf8_length(ranges: Ranges) -> str:
    """Write one character of `ranges` as alternative classes that do not cross `UTF8_LENGTH_EDGES`."""
    edges = (0, *UTF8_LENGTH_EDGES, MAX_CODE_POINT + 1)
    classes = [
        tuple((max(low, begin), min(high, end - 1)) for low, high in ranges if low < end and high >= begin)
        for begin, end in pairwise(edges)
    ]
    return "|".join(_write_class(part) for part in classes if part)


def _write_unanchored(node: regex.Node) -> str:
    match node:
        case regex.CharacterSet(ranges):
            return _write_class(ranges)
        case regex.Concatenation(parts):
            return "".join(
                f"(?:{_write_unanchored(part)})" if isinstance(part, regex.Alternation) else _write_unanchored(part)
                for part in parts
            )
        case regex.Alternation(options):
            written = [_write_unanchored(option) for option in options if option != regex.EMPTY_STRING]
            return "|".join(written) + "|" * (len(written) < len(options))
        case regex.Repeat(regex.CharacterSet() as part, low, high):
            return _write_quantified(_write_unanchored(part), low, high)
        case regex.Repeat(part, low, high):
            return _write_quantified(f"(?:{_write_unanchored(part)})", low, high)
        case _:
            raise regex.RegexError("it has an assertion in the middle")


def _write_quantified(inner: str, low: int, high: int | None) -> str:
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


def _write_class(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _write_code_point(ranges[0][0])
    # xgrammar negates a class that begins with ^, even with an escaped ^.
    ordered = sorted(ranges, key=lambda bounds: bounds[0] == ord("^"))
    written = [
        _write_code_point(low) if low == high else f"{_write_code_point(low)}-{_write_code_point(high)}"
        for low, high in ordered
    ]
    return f"[{''.join(written)}]"


def _write_code_point(point: int) -> str:
    character = chr(point)
    if character.isascii() and (character.isalnum() or character in " !#%&',:;<=>@_`~\""):
        return character
    return f"\\{character}" if 0x21 <= point < 0x7F and character not in "/-" else f"\\u{{{point:x}}}"
