"""Writes JSON strings of bounded length as grammar rules that xgrammar runs fast.

Without these rules, xgrammar 0.2.8 is slow. It compiles an upper bound of N <= 128 characters in N times 7 ms.
With a larger bound, computing each mask of allowed next tokens takes 17 ms.
"""
# `x{0,n}`, up to n characters of the class x, becomes optional runs of blocks, followed by a tail. A block has exactly
# BLOCK_LENGTH characters. Each run takes half of the remaining blocks. The rule `tailN` matches at most N characters,
# for example `tail2 ::= "" | x tail1`. All strings of a class share these rules.
# At run time, xgrammar would test each token that crosses a block's end. Therefore blocks end with a lookahead that
# never matches. xgrammar uses lookaheads only for masks: a block adds no crossing tokens to a mask, but still matches.
# The tail adds the crossing tokens to the mask: because runs are optional, a second parse of the same text skips the
# current block and matches the text with the tail.
#
# `x{n}`, exactly n characters, becomes blocks and a part of a block. `write_rule_body` writes alternatives whose
# block ends are half a block apart. A token of up to HALF_BLOCK_LENGTH characters crosses no block end in at least one
# alternative, which therefore allows the token.

import re
from dataclasses import dataclass
from itertools import pairwise

from nanovllm_core.grammar.schemas.json_values import JSON

BLOCK_LENGTH = 16
HALF_BLOCK_LENGTH = BLOCK_LENGTH // 2
# Minimum length of a tail that follows blocks, in characters. A tail never allows a token that is longer than the tail.
MIN_TAIL_LENGTH = 32
# A string of `low` to `high` characters gets no rules if `low` is at least MIN_AUTOMATON_LOW, `high` is at most
# MAX_AUTOMATON_LENGTH, and its class is small (MAX_FEW_CHARACTERS): xgrammar compiles it fast.
MIN_AUTOMATON_LOW = 33
MAX_FEW_CHARACTERS = 64
MAX_AUTOMATON_LENGTH = 128

_CHARACTER = r"(?:\\u\{[0-9a-f]{1,6}\}|\\[!-/:-@\[-`{-~]|[ !#%&',:;<=>@_`~\"a-zA-Z0-9])"
_CLASS = rf"(?:\[(?:{_CHARACTER}(?:-{_CHARACTER})?)+\]|{_CHARACTER})"
_BOUNDED_PATTERN = re.compile(rf"\^\(\?:({_CLASS}(?:\|{_CLASS})*)\)\{{([0-9]{{1,7}}),([0-9]{{0,7}})\}}\$")
_RANGE_PATTERN = re.compile(rf"({_CHARACTER})(?:-({_CHARACTER}))?")
# A JSON string holds the code points from _FIRST_POINT to _LAST_POINT unescaped, except those in _ESCAPED.
_FIRST_POINT, _LAST_POINT = 0x20, 0x10FFFF
_ESCAPED = ((0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF))
# The class of all characters that a JSON string holds unescaped.
_ANY_CHARACTER = (
    r"[\U00000020-\U00000021\U00000023-\U0000005b\U0000005d-\U000007ff\U00000800-\U0000d7ff\U0000e000-\U0000ffff"
    r"\U00010000-\U0010ffff]"
)


@dataclass(frozen=True, slots=True)
class BoundedString:
    """A string of `low` to `high` characters.

    characters: the allowed characters as an EBNF class.
    high: None for no limit.
    """

    characters: str
    low: int
    high: int | None


# Together, these strings need the rules that most bounded strings use: tails of up to 47 characters, blocks, and short
# chains (see `_SharedRules`).
_PRECOMPILED_STRINGS = [
    BoundedString(_ANY_CHARACTER, low, high)
    for low, high in ((0, MIN_TAIL_LENGTH + BLOCK_LENGTH - 1), (0, 1000), (4, 1000), (4, None))
]


class BoundedStrings:
    """Replaces patterns of bounded strings in schemas by marks, and marks in xgrammar's rules by other rules.

    A mark is a placeholder pattern. It contains a word that `source`, the text of the schemas, does not contain.
    """

    def __init__(self, source: str):
        self._mark = "marked"
        while self._mark in source:
            self._mark += "x"
        self._index_by_string: dict[BoundedString, int] = {}

    def __bool__(self) -> bool:
        return bool(self._index_by_string)

    def mark_patterns(self, schema: JSON) -> JSON:
        """Copy `schema`, and replace patterns that only bound a string's length and characters by marks.

        schema: a part of a result of `convert_schema`.
        """
        match schema:
            case list():
                return [self.mark_patterns(item) for item in schema]
            case {"pattern": str(pattern)} if (bounded := parse_bounded_pattern(pattern)) is not None:
                index = self._index_by_string.setdefault(bounded, len(self._index_by_string))
                return {**schema, "pattern": f"^{self._mark}{index}[ab]$"}
            case dict() if not isinstance(schema.get("enum"), list):
                return {name: self.mark_patterns(item) for name, item in schema.items()}
            case _:
                return schema

    def insert_rules(self, grammar: str) -> str:
        """Replace the marks in `grammar` by rules. Raises ValueError if a mark remains.

        grammar: xgrammar's EBNF of the marked schemas.
        """
        prefix = "bounded"
        while prefix in grammar:
            prefix += "_"
        classes = dict.fromkeys(bounded.characters for bounded in self._index_by_string)
        rules_by_class = {
            characters: _SharedRules(characters, f"{prefix}_{'any' if characters == _ANY_CHARACTER else index}_")
            for index, characters in enumerate(classes)
        }
        bodies = [rules_by_class[bounded.characters].write_rule_body(bounded) for bounded in self._index_by_string]
        marked_rule = re.compile(rf'^(\S+ ::=) Regex\("\^{self._mark}(\d+)\[ab\]\$", json_string=true\)$', re.MULTILINE)
        unmarked_grammar = marked_rule.sub(lambda match: f"{match[1]} {bodies[int(match[2])]}", grammar)
        spelled_mark = " ".join(f'"{letter}"' for letter in self._mark)
        if self._mark in unmarked_grammar or spelled_mark in unmarked_grammar:
            raise ValueError("the pattern of a bounded string was not found in xgrammar's rules")
        return "\n".join(
            [unmarked_grammar, *(rule for shared in rules_by_class.values() for rule in shared.write_rules())]
        )


def write_common_string_rules() -> str:
    """A grammar with the rules that most bounded strings share, so that a compiler can compile them in advance."""
    shared = _SharedRules(_ANY_CHARACTER, "bounded_any_")
    bodies = [shared.write_rule_body(bounded) for bounded in _PRECOMPILED_STRINGS]
    strings = [f"string{index} ::= {body}" for index, body in enumerate(bodies)]
    root = " | ".join(rf'"{index}\"" string{index} "\""' for index in range(len(bodies)))
    return "\n".join([f"root ::= {root}", *strings, *shared.write_rules()])


class _SharedRules:
    """Rules that all strings of one character class share. prefix: beginning of the rules' names.

    A chain is a rule for required characters, followed by an end. The end is a tail, or unlimited characters (`rest`).
    """

    def __init__(self, characters: str, prefix: str):
        self._characters = characters
        self._prefix = prefix
        self._run_lengths: set[int] = set()  # Lengths of runs and of their halves, in blocks.
        self._max_tail_length = 0
        self._max_part_length = 0  # Length of the longest part of a block.
        # Number of characters in the longest chain before each end, by the end's name.
        self._chain_lengths: dict[str, int] = {}

    def write_rule_body(self, bounded: BoundedString) -> str:
        """The body of the rule for one string. The rule does not match the string's quotation marks."""
        optional, end = self._write_optional(None if bounded.high is None else bounded.high - bounded.low)
        if not bounded.low:
            return " ".join(optional)
        chain_length = min(bounded.low, BLOCK_LENGTH)
        self._chain_lengths[end] = max(self._chain_lengths.get(end, 0), chain_length)
        # The chain allows tokens that cross from the required to the optional characters.
        chain = [*self._write_exactly(bounded.low - chain_length), f"{self._prefix}chain{chain_length}_{end}"]
        alternatives = [chain]
        if bounded.low > BLOCK_LENGTH or len(optional) > 1:
            alternatives.append([*self._write_exactly(bounded.low), *optional])
        if bounded.low > BLOCK_LENGTH:
            half = self._write_exactly(HALF_BLOCK_LENGTH)
            alternatives.append([*half, *self._write_exactly(bounded.low - HALF_BLOCK_LENGTH), *optional])
        return " | ".join(f"({' '.join(alternative)})" for alternative in alternatives)

    def _write_optional(self, length: int | None) -> tuple[list[str], str]:
        """Returns (elements for up to `length` characters, name of the end of a chain). length: None for no limit."""
        if length is None:
            return [f"{self._prefix}rest"], "rest"
        num_blocks = max(length - MIN_TAIL_LENGTH, 0) // BLOCK_LENGTH
        tail = length - num_blocks * BLOCK_LENGTH
        self._max_tail_length = max(self._max_tail_length, tail)
        sizes = _split_into_runs(num_blocks)
        for size in sizes:
            self._add_run_lengths(size)
        end = f"tail{MIN_TAIL_LENGTH if sizes else tail}"
        return [*(f'({self._prefix}block{size} | "")' for size in sizes), f"{self._prefix}tail{tail}"], end

    def _write_exactly(self, length: int) -> list[str]:
        """Elements for exactly `length` characters. Masks allow no token that crosses from one element to the next."""
        num_blocks, part_length = divmod(length, BLOCK_LENGTH)
        self._add_run_lengths(num_blocks)
        self._max_part_length = max(self._max_part_length, part_length)
        elements = [f"{self._prefix}block{num_blocks}"] if num_blocks else []
        return elements + ([f"{self._prefix}part{part_length}"] if part_length else [])

    def write_rules(self) -> list[str]:
        """The rules of blocks, tails, parts and chains, one string per rule."""
        prefix, character = self._prefix, self._characters
        rules = [f'{prefix}tail0 ::= "" (= "\\"")']
        rules += [
            f'{prefix}tail{length} ::= "" | {character} {prefix}tail{length - 1} (= "\\"")'
            for length in range(1, self._max_tail_length + 1)
        ]
        # A string without a maximum length has a minimum length (see `parse_bounded_pattern`), and so a chain.
        if "rest" in self._chain_lengths:
            rules.append(f'{prefix}rest ::= "" | {character} {prefix}rest (= "\\"")')
        for end, max_length in self._chain_lengths.items():
            names = [f"{prefix}{end}", *(f"{prefix}chain{length}_{end}" for length in range(1, max_length + 1))]
            rules += [f'{name} ::= {character} {after} (= "\\"")' for after, name in pairwise(names)]
        for size in sorted(self._run_lengths):
            if size > 1:
                half = f"{prefix}block{size // 2}"
                rules.append(f"{prefix}block{size} ::= {half} {half}{f' {prefix}block1' * (size % 2)}")
        if self._run_lengths:
            rules.append(f'{prefix}block1 ::= {f"{character} " * (BLOCK_LENGTH - 1)}{prefix}last (= "\\x01")')
        names = [f"{prefix}last", *(f"{prefix}part{length}" for length in range(1, self._max_part_length + 1))]
        if self._max_part_length:
            rules.append(f'{prefix}part1 ::= {prefix}last (= "\\x01")')
            rules += [f'{name} ::= {character} {after} (= "\\x01")' for after, name in pairwise(names[1:])]
        if self._run_lengths or self._max_part_length:
            # xgrammar inlines rules that refer to no other rule, and drops their lookahead. Therefore blocks and parts
            # end with a reference to `last`.
            rules.append(f'{prefix}last ::= {character} (= "\\x01")')
        return rules

    def _add_run_lengths(self, size: int) -> None:
        while size and size not in self._run_lengths:
            self._run_lengths |= {size, 1}
            size //= 2


def _split_into_runs(number: int) -> list[int]:
    """Split `number` into sizes, largest first. Any number from 0 to `number` is the sum of some of the sizes."""
    sizes: list[int] = []
    while number:
        size = (number + 1) // 2
        sizes.append(size)
        number -= size
    return sizes


def parse_bounded_pattern(pattern: str) -> BoundedString | None:
    """Parse a pattern `^(?:[..]|[..]){low,high}$` or `^(?:[..]|[..]){low,}$`.

    Returns None for other patterns, for characters that JSON escapes, and for strings that xgrammar compiles fast.
    """
    match = _BOUNDED_PATTERN.fullmatch(pattern)
    if match is None:
        return None
    low, high = int(match[2]), int(match[3]) if match[3] else None
    matches = _RANGE_PATTERN.finditer(_without_brackets(match[1]))
    ranges = [(_code_point(bounds[1]), _code_point(bounds[2] or bounds[1])) for bounds in matches]
    if (high is not None and low > high) or not all(_is_unescaped(*bounds) for bounds in ranges):
        return None
    has_few_characters = sum(last - first + 1 for first, last in ranges) <= MAX_FEW_CHARACTERS
    if high is None and (low < 2 or has_few_characters):
        return None
    if has_few_characters and low >= MIN_AUTOMATON_LOW and (high or 0) <= MAX_AUTOMATON_LENGTH:
        return None
    return BoundedString(
        f"[{''.join(f'{_write_code_point(first)}-{_write_code_point(last)}' for first, last in ranges)}]", low, high
    )


def _without_brackets(classes: str) -> str:
    """Remove brackets and bars around classes. Literal brackets and bars stay, because they are escaped."""
    return re.sub(rf"({_CHARACTER})|[\[\]|]", lambda match: match[1] or "", classes)


def _code_point(text: str) -> int:
    return int(text[3:-1], 16) if text.startswith("\\u") else ord(text[-1])


def _is_unescaped(low: int, high: int) -> bool:
    return _FIRST_POINT <= low <= high <= _LAST_POINT and not any(
        low <= last and first <= high for first, last in _ESCAPED
    )


def _write_code_point(point: int) -> str:
    return f"\\U{point:08x}"
