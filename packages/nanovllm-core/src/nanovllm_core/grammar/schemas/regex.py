"""Parses ECMA 262 patterns of JSON Schema to trees, and converts searches to matches of whole strings.

Regex engines differ in `\\d`, `\\w` and `\\s` beyond ASCII. A class here has the characters on which all of them agree.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from nanovllm_core.grammar.schemas.characters import (
    CLASSES,
    MAX_CODE_POINT,
    NO_DOT,
    PLAIN,
    Ranges,
    common,
    invert,
    normal,
)

MAX_PATTERN = 4096
MAX_NESTING = 40
# Most states of a pattern with its repetitions expanded.
MAX_STATES = 20_000
ESCAPES = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
HEX = frozenset("0123456789abcdefABCDEF")


class RegexError(ValueError):
    """A pattern that is invalid or can't be converted."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of sorted, disjoint code point ranges."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    """A sequence of parts. An empty sequence matches the empty string."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several options. Without options nothing matches."""

    options: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` repetitions of `part`. high: None for no limit."""

    part: "Node"
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The start of the string, or its end."""

    start: bool


@dataclass(frozen=True, slots=True)
class Look:
    """A lookahead: the following text begins with `part`, or does not if `negative`."""

    part: "Node"
    negative: bool


Node: TypeAlias = Chars | Seq | Alt | Repeat | Anchor | Look

EMPTY = Seq(())
NOTHING = Alt(())
ANY = Chars(((0, MAX_CODE_POINT),))
ANYTHING = Repeat(ANY, 0, None)


@lru_cache(maxsize=1024)
def parse(pattern: str, *, widest: bool = False) -> Node:
    """Parse a pattern to a tree that includes its anchors. Raises RegexError for unsupported patterns.

    widest: match strings that at least one regex engine matches, instead of those that all engines match.
    """
    if len(pattern) > MAX_PATTERN:
        raise RegexError(f"it has {len(pattern)} characters, at most {MAX_PATTERN} are supported")
    tree = _Parser(pattern, widest).parse()
    if _states(tree) > MAX_STATES:
        raise RegexError("its repetitions are too large")
    return tree


class _Parser:
    """A recursive descent parser of one pattern."""

    def __init__(self, text: str, widest: bool):
        self.text = text
        self.widest = widest
        self.at = 0
        self.depth = 0

    def parse(self) -> Node:
        tree = self.alternatives()
        if self.at < len(self.text):
            raise RegexError("it has a ) without (")
        return tree

    def peek(self, count: int = 1) -> str:
        return self.text[self.at : self.at + count]

    def take(self, word: str) -> bool:
        if self.text.startswith(word, self.at):
            self.at += len(word)
            return True
        return False

    def alternatives(self) -> Node:
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise RegexError(f"its groups are nested deeper than {MAX_NESTING}")
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        self.depth -= 1
        classes = [option for option in options if isinstance(option, Chars)]
        if len(classes) == len(options):
            return Chars(normal([each for option in classes for each in option.ranges]))
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.peek() not in "|)":
            atom = self.atom()
            bounds = self.quantifier()
            if bounds is not None:
                if isinstance(atom, Anchor | Look):
                    raise RegexError("it repeats an assertion")
                atom = Repeat(atom, *bounds)
                if self.quantifier() is not None or self.peek() == "+":
                    raise RegexError("it has two quantifiers in a row")
            parts.append(atom)
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def quantifier(self) -> tuple[int, int | None] | None:
        bounds: tuple[int, int | None] | None = None
        for word, meaning in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if bounds is None and self.take(word):
                bounds = meaning
        if bounds is None and self.peek() == "{":
            bounds = self.counts()
        if bounds is not None:
            self.take("?")  # Lazy and greedy quantifiers match the same strings.
        return bounds

    def counts(self) -> tuple[int, int | None] | None:
        end = self.text.find("}", self.at)
        low, comma, high = self.text[self.at + 1 : max(end, self.at + 1)].partition(",")
        if comma and not low and high.isdecimal():
            raise RegexError("{,n} means different things to different engines")
        if not all(digits.isascii() and digits.isdecimal() and len(digits) < 7 for digits in (low, high or "0")):
            return None  # A brace that is not a quantifier is a literal.
        self.at = end + 1
        bounds = int(low), (int(high) if high else None) if comma else int(low)
        if bounds[1] is not None and bounds[1] < bounds[0]:
            raise RegexError("it has a quantifier whose numbers are out of order")
        return bounds

    def atom(self) -> Node:
        character = self.peek()
        self.at += 1
        match character:
            case "^" | "$":
                return Anchor(character == "^")
            case ".":
                return Chars(invert(NO_DOT[:1] if self.widest else NO_DOT))
            case "(":
                return self.group()
            case "[":
                return Chars(self.characters())
            case "\\":
                return Chars(self.escape(self.widest)[0])
            case "*" | "+" | "?":
                raise RegexError(f"there is nothing to repeat before {character}")
            case _:
                return Chars(((ord(character), ord(character)),))

    def group(self) -> Node:
        look: bool | None = None
        if self.take("?"):
            if self.take("=") or self.take("!"):
                look = self.text[self.at - 1] == "!"
            elif self.peek(2) in ("<=", "<!"):
                raise RegexError("lookbehind is not supported")
            elif self.take("P<") or self.take("<"):
                end = self.text.find(">", self.at)
                if not self.text[self.at : end].isidentifier():
                    raise RegexError("it has a group without a proper name")
                self.at = end + 1
            elif not self.take(":"):
                raise RegexError("flags and the like after (? are not supported")
        self.widest ^= look is True
        inner = self.alternatives()
        self.widest ^= look is True
        if not self.take(")"):
            raise RegexError("it has a ( without )")
        return inner if look is None else Look(inner, look)

    def characters(self) -> Ranges:
        negative = self.take("^")
        chosen: list[tuple[int, int]] = []
        if self.peek() == "]":
            raise RegexError("it has an empty character class")
        while not self.take("]"):
            low, is_set = self.member(negative ^ self.widest)
            if not is_set and self.peek() == "-" and self.peek(2) not in ("-]", "-"):
                self.at += 1
                high, is_set = self.member(negative ^ self.widest)
                if is_set:
                    raise RegexError("it has a range that ends in a class")
                if high[0][0] < low[0][0]:
                    raise RegexError("it has a range that is out of order")
                low = ((low[0][0], high[0][0]),)
            chosen.extend(low)
        ranges = normal(chosen)
        return invert(ranges) if negative else ranges

    def member(self, widest: bool) -> tuple[Ranges, bool]:
        character = self.peek()
        if not character:
            raise RegexError("it has a [ without ]")
        self.at += 1
        if character != "\\":
            return ((ord(character), ord(character)),), False
        if self.take("b"):
            return ((8, 8),), False
        return self.escape(widest)

    def escape(self, widest: bool) -> tuple[Ranges, bool]:
        """The characters of an escape, and whether it is a class. widest: see `parse`."""
        letter = self.peek()
        self.at += 1
        if letter.lower() in CLASSES and letter:
            strict, loose = CLASSES[letter.lower()]
            if letter.islower():
                return normal(loose if widest else strict), True
            return invert(strict if widest else loose), True
        point = self.point(letter)
        return ((point, point),), False

    def point(self, letter: str) -> int:
        match letter:
            case "x":
                return self.hexadecimal(2)
            case "u" if self.take("{"):
                end = self.text.find("}", self.at)
                return self.hexadecimal(end - self.at, closing=1)
            case "u":
                high = self.hexadecimal(4)
                if 0xD800 <= high < 0xDC00 and self.take("\\u"):
                    return 0x10000 + ((high - 0xD800) << 10) + self.hexadecimal(4) - 0xDC00
                return high
            case "c" if self.peek().isascii() and self.peek().isalpha():
                self.at += 1
                return ord(self.text[self.at - 1]) % 32
            case "0" if not self.peek().isdecimal():
                return 0
            case "":
                raise RegexError("it ends in a backslash")
            case _ if letter in ESCAPES:
                return ESCAPES[letter]
            case _ if letter.isalnum():
                raise RegexError(f"\\{letter} is not supported")
            case _:
                return ord(letter)

    def hexadecimal(self, count: int, closing: int = 0) -> int:
        digits = self.text[self.at : self.at + max(count, 0)]
        if not 0 < count <= 6 or len(digits) < count or not HEX.issuperset(digits) or int(digits, 16) > MAX_CODE_POINT:
            raise RegexError("it has an escape with improper hexadecimal digits")
        self.at += count + closing
        return int(digits, 16)


def whole(tree: Node) -> Node:
    """A tree that matches the whole strings in which `tree` is found. Raises RegexError for anchors in the middle."""
    return _edge(tree, True, True)


def _edge(node: Node, left: bool, right: bool) -> Node:
    """`node` preceded and followed by any text on the sides where it is not anchored."""
    if isinstance(node, Alt) and _has_anchor(node):
        return Alt(tuple(_edge(option, left, right) for option in node.options))
    parts: list[Node] = list(node.parts) if isinstance(node, Seq) else [node]
    start, end = 0, len(parts)
    while start < end and parts[start] == Anchor(True) and left:
        start += 1
    while end > start and parts[end - 1] == Anchor(False) and right:
        end -= 1
    open_left, open_right = left and start == 0, right and end == len(parts)
    inner: list[Node] = parts[start:end]
    if inner and open_left and _has_anchor(inner[0]):
        if isinstance(inner[0], Repeat):
            raise RegexError("it repeats an assertion")
        inner[0] = _edge(inner[0], True, open_right and len(inner) == 1)
        open_right = open_right and len(inner) > 1
        open_left = False
    if inner and open_right and _has_anchor(inner[-1]):
        if isinstance(inner[-1], Repeat):
            raise RegexError("it repeats an assertion")
        inner[-1] = _edge(inner[-1], False, True)
        open_right = False
    for part in inner:
        if _has_anchor(part):
            raise RegexError("it has an anchor in the middle")
    around: list[Node] = [ANYTHING]
    return seq(around * open_left + inner + around * open_right)


def _has_anchor(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Seq(parts) | Alt(parts):
            return any(_has_anchor(part) for part in parts)
        case Repeat(part) | Look(part):
            return _has_anchor(part)
        case _:
            return False


def seq(parts: list[Node]) -> Node:
    """A sequence of `parts` without nested sequences."""
    flat: list[Node] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Seq) else (part,))
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def narrow(node: Node, alphabet: Ranges = PLAIN) -> Node:
    """`node` restricted to the characters of `alphabet`. Options that then match nothing are removed."""
    match node:
        case Chars(ranges):
            kept = common(ranges, alphabet)
            return Chars(kept) if kept else NOTHING
        case Seq(parts):
            narrowed = [narrow(part, alphabet) for part in parts]
            return NOTHING if NOTHING in narrowed else seq(narrowed)
        case Alt(options):
            left = [option for option in (narrow(option, alphabet) for option in options) if option != NOTHING]
            return left[0] if len(left) == 1 else Alt(tuple(dict.fromkeys(left)))
        case Repeat(part, low, high):
            inner = narrow(part, alphabet)
            if inner in (NOTHING, EMPTY) or high == 0:
                return NOTHING if inner == NOTHING and low else EMPTY
            return Repeat(inner, low, high)
        case _:
            raise RegexError("it has an assertion in the middle")


def _states(node: Node) -> int:
    match node:
        case Chars():
            return 1
        case Seq(parts) | Alt(parts):
            return 1 + sum(_states(part) for part in parts)
        case Repeat(Chars()):
            return 2  # xgrammar counts repetitions of one character and does not expand them.
        case Repeat(part, low, high):
            return 1 + _states(part) * max(low, high or 1, 1)
        case Look(part):
            return _states(part)
        case _:
            return 1
