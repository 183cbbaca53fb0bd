"""Strings of bounded length in JSON, as rules whose masks are made beforehand and that all such strings share.

Left to itself xgrammar (0.2.8) makes an automaton of a bound of up to 128, a state for each character, with 7 ms for
each to compile: 13 s for fourteen fields. Above 128 it counts, and tries thousands of tokens by themselves at every
mask, which takes 17 ms. So the schema is written as rules here, by xgrammar, where each bounded string has a mark in it
that is then replaced.

`x{0,n}` becomes blocks of BLOCK characters, as many as may be, and behind any of them a tail. A tail is a chain of
rules, `t2 ::= "" | x t1`, whose end every bound shares. Blocks stand in sequences of half of them, half of the rest,
and so on, each of which may be left out. As whatever may come at all may come in a tail that began with the block, the
blocks need to allow no token that leads out of them. A lookahead that nothing meets tells xgrammar so: it is used for
masks alone, and else such tokens would be tried.

This room must not know tokens, nor where a schema comes from.
"""

import re
from dataclasses import dataclass
from typing import Any, cast

# Characters.
BLOCK = 16
# Of the least tail that follows a block; tokens longer than what it has left don't come at the end of one.
MIN_TAIL = 32
# Characters that a string must have, each of which is a state of its own. With more it is left as it is.
MAX_LEAST = 32

_POINT = r"(?:\\u\{[0-9a-f]{1,6}\}|\\[!-/:-@\[-`{-~]|[ !#%&',:;<=>@_`~\"a-zA-Z0-9])"
_CLASS = rf"(?:\[(?:{_POINT}(?:-{_POINT})?)+\]|{_POINT})"
_BOUNDED = re.compile(rf"\^\(\?:({_CLASS}(?:\|{_CLASS})*)\)\{{([0-9]{{1,7}}),([0-9]{{1,7}})\}}\$")
_RANGE = re.compile(rf"({_POINT})(?:-({_POINT}))?")
# What a JSON string can't hold as it is, beside what lies outside of these.
_LEAST, _MOST = 0x20, 0x10FFFF
_APART = ((0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF))
# Keywords with a schema, with several, and with several by their names.
_ONE = ("items", "additionalProperties")
_LIST = ("prefixItems", "anyOf")
_NAMED = ("properties", "patternProperties", "$defs")


@dataclass(frozen=True, slots=True)
class BoundedString:
    """A string of `low` to `high` characters of one class. characters: the class in EBNF."""

    characters: str
    low: int
    high: int


class BoundedStrings:
    """The bounded strings of one JSON text: marked in its schemas, then replaced by rules in the grammar.

    source: the text of the schemas; no mark occurs in it.
    """

    def __init__(self, source: str):
        self._mark = "marked"
        while self._mark in source:
            self._mark += "x"
        self._found: dict[BoundedString, int] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def mark_patterns(self, schema: Any) -> Any:
        """`schema` with marks in place of the patterns that only bound a string's characters and their number."""
        if not isinstance(schema, dict):
            return schema
        written = dict(cast("dict[str, Any]", schema))
        pattern = written.get("pattern")
        if isinstance(pattern, str) and (bounded := parse_bounded_pattern(pattern)) is not None:
            number = self._found.setdefault(bounded, len(self._found))
            written["pattern"] = f"^{self._mark}{number}[ab]$"
        for keyword in _ONE:
            if keyword in written:
                written[keyword] = self.mark_patterns(written[keyword])
        for keyword in _LIST:
            if isinstance(some := written.get(keyword), list):
                written[keyword] = [self.mark_patterns(each) for each in cast("list[Any]", some)]
        for keyword in _NAMED:
            if isinstance(some := written.get(keyword), dict):
                written[keyword] = {
                    name: self.mark_patterns(each) for name, each in cast("dict[str, Any]", some).items()
                }
        return written

    def insert_rules(self, rules: str) -> str:
        """`rules`, which xgrammar writes for marked schemas, with rules in place of the marks. Raises ValueError."""
        prefix = "bounded"
        while prefix in rules:
            prefix += "_"
        classes = dict.fromkeys(bounded.characters for bounded in self._found)
        shared = {
            characters: _SharedRules(characters, f"{prefix}_{index}_") for index, characters in enumerate(classes)
        }
        bodies = [shared[bounded.characters].body(bounded) for bounded in self._found]
        line = re.compile(rf'^(\S+ ::=) Regex\("\^{self._mark}(\d+)\[ab\]\$", json_string=true\)$', re.MULTILINE)
        written = line.sub(lambda found: f"{found[1]} {bodies[int(found[2])]}", rules)
        spelled = " ".join(f'"{letter}"' for letter in self._mark)
        if self._mark in written or spelled in written:
            raise ValueError("the length of a string is not where it was expected")
        return "\n".join([written, *(rule for each in shared.values() for rule in each.rules())])


class _SharedRules:
    """The rules that all strings of one class share; their names begin with `prefix`."""

    def __init__(self, characters: str, prefix: str):
        self._characters = characters
        self._prefix = prefix
        self._sizes: set[int] = set()
        self._longest = 0

    def body(self, bounded: BoundedString) -> str:
        """What one string is, between its quotation marks."""
        free = bounded.high - bounded.low
        blocks = max(free - MIN_TAIL, 0) // BLOCK
        tail = free - blocks * BLOCK
        self._longest = max(self._longest, tail)
        sizes = _sizes(blocks)
        for size in sizes:
            self._need(size)
        parts = [self._characters] * bounded.low
        parts += [f'({self._prefix}block{size} | "")' for size in sizes]
        return " ".join([*parts, f"{self._prefix}tail{tail}"])

    def rules(self) -> list[str]:
        """Them, one a line."""
        prefix, one = self._prefix, self._characters
        rules = [f'{prefix}tail0 ::= "" (= "\\"")']
        rules += [
            f'{prefix}tail{length} ::= "" | {one} {prefix}tail{length - 1} (= "\\"")'
            for length in range(1, self._longest + 1)
        ]
        for size in sorted(self._sizes):
            if size > 1:
                half = f"{prefix}block{size // 2}"
                rules.append(f"{prefix}block{size} ::= {half} {half}{f' {prefix}block1' * (size % 2)}")
        if self._sizes:
            # Of rules that refer to none xgrammar makes copies, without the lookahead.
            rules.append(f'{prefix}block1 ::= {f"{one} " * (BLOCK - 1)}{prefix}last (= "\\x01")')
            rules.append(f'{prefix}last ::= {one} (= "\\x01")')
        return rules

    def _need(self, size: int) -> None:
        while size and size not in self._sizes:
            self._sizes |= {size, 1}
            size //= 2


def _sizes(number: int) -> list[int]:
    """Sizes, the largest first, of which some or other make up each number up to `number`, and none more."""
    sizes: list[int] = []
    while number:
        size = (number + 1) // 2
        sizes.append(size)
        number -= size
    return sizes


def parse_bounded_pattern(pattern: str) -> BoundedString | None:
    """A pattern `^(?:[..]|[..]){low,high}$` as a BoundedString.

    None for all other patterns, and for those that the rules here would not make faster.
    """
    found = _BOUNDED.fullmatch(pattern)
    if found is None:
        return None
    low, high = int(found[2]), int(found[3])
    ranges = [(_point(each[1]), _point(each[2] or each[1])) for each in _RANGE.finditer(_without_brackets(found[1]))]
    if not low <= high or low > MAX_LEAST or not all(_is_plain(*each) for each in ranges):
        return None
    return BoundedString(f"[{''.join(f'{_escaped(a)}-{_escaped(b)}' for a, b in ranges)}]", low, high)


def _without_brackets(classes: str) -> str:
    """The ranges of some classes in a row: brackets and bars that stand for themselves are escaped."""
    return re.sub(rf"({_POINT})|[\[\]|]", lambda found: found[1] or "", classes)


def _point(spelled: str) -> int:
    return int(spelled[3:-1], 16) if spelled.startswith("\\u") else ord(spelled[-1])


def _is_plain(low: int, high: int) -> bool:
    return _LEAST <= low <= high <= _MOST and not any(low <= last and first <= high for first, last in _APART)


def _escaped(point: int) -> str:
    return f"\\U{point:08x}"
