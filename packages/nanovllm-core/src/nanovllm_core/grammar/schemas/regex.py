"""Parses ECMA 262 patterns into trees, and rewrites the trees to match whole strings.

JSON Schema searches a string for a pattern. xgrammar matches the whole string instead.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from nanovllm_core.grammar.schemas.characters import (
    CLASS_ESCAPES,
    LINE_ENDS,
    MAX_CODE_POINT,
    UNESCAPED_IN_JSON,
    Ranges,
    intersect_ranges,
    invert_ranges,
    normalize_ranges,
)

MAX_PATTERN_LENGTH = 16_384
MAX_NESTING = 40
# Maximum estimated number of a pattern's automaton states. A repeated group's states count once per repetition.
MAX_STATES = 20_000
QUANTIFIERS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
CONTROL_ESCAPES = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
HEX = frozenset("0123456789abcdefABCDEF")
LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][\da-fA-F]{2})", re.ASCII)


class RegexError(ValueError):
    """The pattern is invalid, or no grammar can express it."""


@dataclass(frozen=True, slots=True)
class CharacterSet:
    """Matches one character. ranges: sorted ranges of code points that neither overlap nor touch."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Matches the parts in order. Without parts, matches the empty string."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Alternation:
    """Matches one of the options. Without options, matches no string."""

    options: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """Matches `part` `low` to `high` times. high: None for no limit."""

    part: "Node"
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """Matches at the start (`^`) or at the end (`$`) of the string."""

    is_start: bool


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Requires that the following text begins with `part`, or, if negative, does not begin with `part`."""

    part: "Node"
    is_negative: bool


Node: TypeAlias = CharacterSet | Concatenation | Alternation | Repeat | Anchor | Lookahead

EMPTY_STRING = Concatenation(())
NO_STRING = Alternation(())
ANY_CHARACTER = CharacterSet(((0, MAX_CODE_POINT),))
ANY_STRING = Repeat(ANY_CHARACTER, 0, None)


@lru_cache(maxsize=1024)
def parse(pattern: str, *, is_permissive: bool = False) -> Node:
    """Parses `pattern` into a tree with its anchors. Raises RegexError for invalid and unsupported patterns.

    Regex engines disagree about `\\d`, `\\w`, `\\s` and `.` beyond ASCII.
    is_permissive: True: the tree matches a string if at least one engine does. False: only if all engines do.
    """
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise RegexError(f"it has {len(pattern)} characters, at most {MAX_PATTERN_LENGTH} are supported")
    tree = _Parser(pattern, is_permissive).parse()
    if _count_states(tree) > MAX_STATES:
        raise RegexError("its repetitions are too large")
    return tree


class _Parser:
    """Reads one pattern from left to right."""

    def __init__(self, text: str, is_permissive: bool):
        self.text = text
        self.is_permissive = is_permissive
        self.position = 0
        self.depth = 0

    def parse(self) -> Node:
        tree = self.parse_alternatives()
        if self.position < len(self.text):
            raise RegexError("it has a ) without (")
        return tree

    def peek(self, count: int = 1) -> str:
        return self.text[self.position : self.position + count]

    def skip(self, word: str) -> bool:
        """Skip `word`. Returns False if the remaining pattern does not begin with `word`."""
        if self.text.startswith(word, self.position):
            self.position += len(word)
            return True
        return False

    def parse_alternatives(self) -> Node:
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise RegexError(f"its groups are nested deeper than {MAX_NESTING}")
        options = [self.parse_sequence()]
        while self.skip("|"):
            options.append(self.parse_sequence())
        self.depth -= 1
        classes = [option for option in options if isinstance(option, CharacterSet)]
        if len(classes) == len(options):
            return CharacterSet(normalize_ranges([bounds for option in classes for bounds in option.ranges]))
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def parse_sequence(self) -> Node:
        parts: list[Node] = []
        while self.position < len(self.text) and self.peek() not in "|)":
            atom = self.parse_atom()
            bounds = self.parse_quantifier()
            if bounds is not None:
                if isinstance(atom, Anchor | Lookahead):
                    raise RegexError("it repeats an assertion")
                atom = Repeat(atom, *bounds)
                if self.parse_quantifier() is not None or self.peek() == "+":
                    raise RegexError("it has two quantifiers in a row")
            parts.append(atom)
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def parse_quantifier(self) -> tuple[int, int | None] | None:
        bounds = QUANTIFIERS.get(self.peek())
        if bounds is not None:
            self.position += 1
        elif self.peek() == "{":
            bounds = self.read_counts()
        if bounds is not None:
            self.skip("?")  # A lazy quantifier matches the same strings as a greedy one.
        return bounds

    def read_counts(self) -> tuple[int, int | None] | None:
        end = self.text.find("}", self.position)
        low, comma, high = self.text[self.position + 1 : max(end, self.position + 1)].partition(",")
        if comma and not low and high.isdecimal():
            raise RegexError("{,n} means different things to different engines")
        if not all(digits.isascii() and digits.isdecimal() and len(digits) < 7 for digits in (low, high or "0")):
            return None  # A brace without counts is a literal character.
        self.position = end + 1
        bounds = int(low), (int(high) if high else None) if comma else int(low)
        if bounds[1] is not None and bounds[1] < bounds[0]:
            raise RegexError("it has a quantifier whose numbers are out of order")
        return bounds

    def parse_atom(self) -> Node:
        character = self.peek()
        self.position += 1
        match character:
            case "^" | "$":
                return Anchor(character == "^")
            case ".":
                return CharacterSet(invert_ranges(LINE_ENDS[:1] if self.is_permissive else LINE_ENDS))
            case "(":
                return self.parse_group()
            case "[":
                return CharacterSet(self.parse_character_class())
            case "\\":
                return CharacterSet(self.parse_escape(self.is_permissive)[0])
            case "*" | "+" | "?":
                raise RegexError(f"there is nothing to repeat before {character}")
            case _:
                return CharacterSet(((ord(character), ord(character)),))

    def parse_group(self) -> Node:
        is_negative_lookahead: bool | None = None
        if self.skip("?"):
            if self.skip("=") or self.skip("!"):
                is_negative_lookahead = self.text[self.position - 1] == "!"
            elif self.peek(2) in ("<=", "<!"):
                raise RegexError("lookbehind is not supported")
            elif self.skip("P<") or self.skip("<"):
                end = self.text.find(">", self.position)
                if not self.text[self.position : end].isidentifier():
                    raise RegexError("it has a group without a proper name")
                self.position = end + 1
            elif not self.skip(":"):
                raise RegexError("flags and the like after (? are not supported")
        # Invert the flag in a negative lookahead: if the lookahead matches more, the whole pattern matches less.
        self.is_permissive ^= is_negative_lookahead is True
        inner = self.parse_alternatives()
        self.is_permissive ^= is_negative_lookahead is True
        if not self.skip(")"):
            raise RegexError("it has a ( without )")
        return inner if is_negative_lookahead is None else Lookahead(inner, is_negative_lookahead)

    def parse_character_class(self) -> Ranges:
        is_negative = self.skip("^")
        members: list[tuple[int, int]] = []
        if self.peek() == "]":
            raise RegexError("it has an empty character class")
        while not self.skip("]"):
            member, is_class = self.parse_class_member(is_negative ^ self.is_permissive)
            if not is_class and self.peek() == "-" and self.peek(2) not in ("-]", "-"):
                self.position += 1
                last, is_class = self.parse_class_member(is_negative ^ self.is_permissive)
                if is_class:
                    raise RegexError("it has a range that ends in a class")
                if last[0][0] < member[0][0]:
                    raise RegexError("it has a range that is out of order")
                member = ((member[0][0], last[0][0]),)
            members.extend(member)
        ranges = normalize_ranges(members)
        return invert_ranges(ranges) if is_negative else ranges

    def parse_class_member(self, is_permissive: bool) -> tuple[Ranges, bool]:
        """Returns (characters of a member, whether the member is an escape of a class such as `\\d`)."""
        character = self.peek()
        if not character:
            raise RegexError("it has a [ without ]")
        self.position += 1
        if character != "\\":
            return ((ord(character), ord(character)),), False
        if self.skip("b"):
            return ((8, 8),), False
        return self.parse_escape(is_permissive)

    def parse_escape(self, is_permissive: bool) -> tuple[Ranges, bool]:
        """Returns (characters of an escape, whether the escape is a class such as `\\d`)."""
        letter = self.peek()
        self.position += 1
        if letter.lower() in CLASS_ESCAPES and letter:
            in_all_engines, in_any_engine = CLASS_ESCAPES[letter.lower()]
            if letter.islower():
                return normalize_ranges(in_any_engine if is_permissive else in_all_engines), True
            return invert_ranges(in_all_engines if is_permissive else in_any_engine), True
        code_point = self.parse_code_point(letter)
        return ((code_point, code_point),), False

    def parse_code_point(self, letter: str) -> int:
        match letter:
            case "x":
                return self.parse_hexadecimal(2)
            case "u" if self.skip("{"):
                end = self.text.find("}", self.position)
                return self.parse_hexadecimal(end - self.position, num_closing_braces=1)
            case "u":
                high = self.parse_hexadecimal(4)
                if 0xD800 <= high < 0xDC00 and (low := LOW_SURROGATE.match(self.text, self.position)):
                    self.position = low.end()
                    return 0x10000 + ((high - 0xD800) << 10) + int(low[1], 16) - 0xDC00
                return high
            case "c" if self.peek().isascii() and self.peek().isalpha():
                self.position += 1
                return ord(self.text[self.position - 1]) % 32
            case "0" if not self.peek().isdecimal():
                return 0
            case "":
                raise RegexError("it ends in a backslash")
            case _ if letter in CONTROL_ESCAPES:
                return CONTROL_ESCAPES[letter]
            case _ if letter.isalnum():
                raise RegexError(f"\\{letter} is not supported")
            case _:
                return ord(letter)

    def parse_hexadecimal(self, count: int, num_closing_braces: int = 0) -> int:
        digits = self.text[self.position : self.position + max(count, 0)]
        if not 0 < count <= 6 or len(digits) < count or not HEX.issuperset(digits) or int(digits, 16) > MAX_CODE_POINT:
            raise RegexError("it has an escape with improper hexadecimal digits")
        self.position += count + num_closing_braces
        return int(digits, 16)


def convert_to_full_match(tree: Node) -> Node:
    """Returns a tree without anchors that matches a whole string if a search for `tree` in the string succeeds.

    Raises RegexError if an anchor is neither at the start nor at the end of the pattern.
    """
    return _replace_anchors(tree, ANY_STRING, True, True)


def remove_anchors(tree: Node) -> Node:
    """Returns a tree without anchors that matches the same whole strings. Raises like `convert_to_full_match`."""
    return _replace_anchors(tree, EMPTY_STRING, True, True)


def _replace_anchors(node: Node, unanchored_end: Node, is_first: bool, is_last: bool) -> Node:
    """Removes anchors, and adds `unanchored_end` at both ends of the whole pattern where `node` has no anchor."""
    if isinstance(node, Alternation) and _has_anchor(node):
        options = (_replace_anchors(option, unanchored_end, is_first, is_last) for option in node.options)
        return Alternation(tuple(options))
    parts: list[Node] = list(node.parts) if isinstance(node, Concatenation) else [node]
    start, end = 0, len(parts)
    while start < end and parts[start] == Anchor(True) and is_first:
        start += 1
    while end > start and parts[end - 1] == Anchor(False) and is_last:
        end -= 1
    adds_prefix, adds_suffix = is_first and start == 0, is_last and end == len(parts)
    inner: list[Node] = parts[start:end]
    if inner and adds_prefix and _is_group_with_anchor(inner[0]):
        inner[0] = _replace_anchors(inner[0], unanchored_end, True, adds_suffix and len(inner) == 1)
        adds_suffix = adds_suffix and len(inner) > 1
        adds_prefix = False
    if inner and adds_suffix and _is_group_with_anchor(inner[-1]):
        inner[-1] = _replace_anchors(inner[-1], unanchored_end, False, True)
        adds_suffix = False
    if any(_has_anchor(part) for part in inner):
        raise RegexError("it has an anchor in the middle, in a repetition or in a lookahead")
    return concatenate([unanchored_end] * adds_prefix + inner + [unanchored_end] * adds_suffix)


def _is_group_with_anchor(node: Node) -> bool:
    return isinstance(node, Concatenation | Alternation) and _has_anchor(node)


def _has_anchor(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Concatenation(parts) | Alternation(parts):
            return any(_has_anchor(part) for part in parts)
        case Repeat(part) | Lookahead(part):
            return _has_anchor(part)
        case _:
            return False


def concatenate(parts: list[Node]) -> Node:
    """Concatenate the parts, and flatten nested concatenations."""
    flat: list[Node] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Concatenation) else (part,))
    return flat[0] if len(flat) == 1 else Concatenation(tuple(flat))


def restrict_characters(node: Node, alphabet: Ranges = UNESCAPED_IN_JSON) -> Node:
    """Restricts `node` to the characters of `alphabet`, and removes options that then match nothing."""
    match node:
        case CharacterSet(ranges):
            allowed = intersect_ranges(ranges, alphabet)
            return CharacterSet(allowed) if allowed else NO_STRING
        case Concatenation(parts):
            restricted = [restrict_characters(part, alphabet) for part in parts]
            return NO_STRING if NO_STRING in restricted else concatenate(restricted)
        case Alternation(options):
            restricted = [restrict_characters(option, alphabet) for option in options]
            remaining = [option for option in restricted if option != NO_STRING]
            return remaining[0] if len(remaining) == 1 else Alternation(tuple(dict.fromkeys(remaining)))
        case Repeat(part, low, high):
            inner = restrict_characters(part, alphabet)
            if inner in (NO_STRING, EMPTY_STRING) or high == 0:
                return NO_STRING if inner == NO_STRING and low else EMPTY_STRING
            return Repeat(inner, low, high)
        case _:
            raise RegexError("it has an assertion in the middle")


def _count_states(node: Node) -> int:
    match node:
        case CharacterSet():
            return 1
        case Concatenation(parts) | Alternation(parts):
            return 1 + sum(_count_states(part) for part in parts)
        case Repeat(CharacterSet()):
            # xgrammar counts the repetitions of a single character instead of copying the character's state.
            return 2
        case Repeat(part, low, high):
            return 1 + _count_states(part) * max(low, high or 1, 1)
        case Lookahead(part):
            return _count_states(part)
        case _:
            return 1
