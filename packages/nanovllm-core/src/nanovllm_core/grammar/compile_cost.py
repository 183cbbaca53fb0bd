"""Estimates what xgrammar's compilation of a JSON grammar costs, before the grammar is compiled.

The cost is counted in steps. A step takes about 1 us with a vocabulary of 49,000 tokens. The estimate depends on the
grammar only, so every machine refuses the same schemas.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from nanovllm_core.grammar.bounded_strings import write_common_string_rules

# Maximum number of steps of one compilation.
MAX_COMPILE_STEPS = 320_000

STEPS_PER_LITERAL_CHARACTER = 4
# A literal character takes longer in a grammar with many rules: one step per this number of pairs (character, rule).
CHARACTER_RULE_PAIRS_PER_STEP = 300
STEPS_PER_RULE = 40
# xgrammar compares each rule with others: one step per this number of pairs of rules.
RULE_PAIRS_PER_STEP = 60
# Before each property, xgrammar visits all optional properties that may follow: one step per this number of visits.
VISITS_PER_STEP = 20
# A wide state allows many characters. In each wide state, xgrammar tests most tokens of the vocabulary.
STEPS_PER_WIDE_STATE = 6_500
# A loop over many characters allows most tokens without a test.
STEPS_PER_WIDE_LOOP = 1_000
STEPS_PER_NARROW_STATE = 50

# Maximum depth of the references that `_make_key_finder` follows to find equal rules.
MAX_REFERENCE_DEPTH = 100

_NAME = r"[A-Za-z_][\w.-]*"
_RULE = re.compile(rf"^({_NAME}) ::= (.*)$", re.MULTILINE)
_LITERAL = re.compile(r'"((?:\\.|[^"\\])*)"')
# A character class (group 1), and whether a loop repeats it (group 2).
_CLASS = re.compile(r"\[((?:\\.|[^\]\\])*)\](\*)?")
_LITERAL_OR_CLASS = re.compile(rf"{_LITERAL.pattern}|{_CLASS.pattern}")
# A class in which this pattern occurs has many characters.
_WIDE_CLASS = re.compile(r"^\^|\\U\{?0*10|\\u\{?(?:d7ff|ffff|7ff)|\\u\{10ffff|\\U000007ff")
_REFERENCE = re.compile(_NAME)
_FIRST_REFERENCE = re.compile(rf"^\(\(({_NAME})\) \|")
_COUNT = re.compile(r"\{(\d+), ?(-?\d*)\}")


@dataclass(frozen=True, slots=True)
class CompileCost:
    """Estimated steps of compiling a grammar, by their cause.

    literal_steps: for characters of property names, enums and constants.
    string_steps: for automaton states of patterns, of length limits and of the names of undeclared properties.
    rule_steps: for rules, pairs of rules, pairs of a rule and a character, and visits (see `_count_visits`).
    """

    literal_steps: int
    string_steps: int
    rule_steps: int
    num_literal_characters: int
    num_rules: int

    @property
    def total(self) -> int:
        """Steps of all causes."""
        return self.literal_steps + self.string_steps + self.rule_steps


def check_compile_cost(grammar: str) -> None:
    """Raises ValueError if compiling `grammar`, xgrammar's printed rules, would take over `MAX_COMPILE_STEPS`."""
    cost = estimate_compile_cost(grammar)
    if cost.total <= MAX_COMPILE_STEPS:
        return
    advice_by_steps = {
        cost.literal_steps: f"its property names, enum and const values have {cost.num_literal_characters} characters "
        "when written out: use fewer or shorter ones",
        cost.string_steps: "most steps are for strings: set additionalProperties to false, or use fewer different "
        "values of pattern, minLength and maxLength",
        cost.rule_steps: f"it has {cost.num_rules} grammar rules: use fewer properties, or fewer alternatives",
    }
    raise ValueError(
        f"it takes about {cost.total} steps, but may take at most {MAX_COMPILE_STEPS}; "
        f"{advice_by_steps[max(advice_by_steps)]}"
    )


def estimate_compile_cost(grammar: str) -> CompileCost:
    """Estimate the steps of compiling a grammar. grammar: xgrammar's printed rules."""
    bodies: dict[str, str] = dict(_RULE.findall(grammar))
    num_literal_characters = sum(map(len, _LITERAL.findall(grammar)))
    num_rules = len(bodies)
    return CompileCost(
        num_literal_characters * STEPS_PER_LITERAL_CHARACTER,
        _count_string_steps(bodies),
        num_rules * STEPS_PER_RULE
        + num_rules * num_rules // RULE_PAIRS_PER_STEP
        + num_literal_characters * num_rules // CHARACTER_RULE_PAIRS_PER_STEP
        + _count_visits(bodies) // VISITS_PER_STEP,
        num_literal_characters,
        num_rules,
    )


def _count_visits(bodies: dict[str, str]) -> int:
    """The number of rules that xgrammar visits: the total length of the chains of all rules.

    A rule's chain is the rule, then the rule that is its first alternative, and so on.
    """
    chain_lengths: dict[str, int] = {}
    for name in bodies:
        chain: list[str] = []
        link: str | None = name
        while link is not None and link not in chain_lengths:
            chain.append(link)
            chain_lengths[link] = 0  # Ends the chain at a loop.
            match = _FIRST_REFERENCE.match(bodies.get(link, ""))
            link = match[1] if match else None
        length = 0 if link is None else chain_lengths[link]
        for link in reversed(chain):
            length += 1
            chain_lengths[link] = length
    return sum(chain_lengths.values())


def _count_string_steps(bodies: dict[str, str]) -> int:
    """Steps of rules with character classes. Equal rules count once, because xgrammar's cache shares them."""
    common_rules = dict(_RULE.findall(write_common_string_rules()))
    find_key = _make_key_finder(bodies)
    steps_by_key: dict[int | str, int] = {}
    for name, body in bodies.items():
        body = body.partition(" (=(")[0]  # Without the lookahead.
        if "[" in body and common_rules.get(name) != bodies[name] and not name.startswith(("basic_", "whitespace")):
            key = find_key(name)
            if key not in steps_by_key:
                steps_by_key[key] = _count_class_steps(body)
    return sum(steps_by_key.values())


def _make_key_finder(bodies: dict[str, str]) -> Callable[[str], int | str]:
    """A function that returns equal keys for rules with equal texts. The names of rules make no difference."""
    keys: dict[str, int | str] = {}
    in_progress: list[str] = []

    def find_key(name: str) -> int | str:
        if name not in keys:
            # Recursive references get this key. The key stays if the name has no rule or is nested too deep.
            keys[name] = name
            if name in bodies and len(in_progress) < MAX_REFERENCE_DEPTH:
                in_progress.append(name)
                parts = _LITERAL.sub("", _CLASS.sub("", bodies[name]))
                references = tuple(find_key(reference) for reference in _REFERENCE.findall(parts))
                in_progress.pop()
                keys[name] = hash(
                    (_REFERENCE.sub("", parts), tuple(_LITERAL_OR_CLASS.findall(bodies[name])), references)
                )
        return keys[name]

    return find_key


def _count_class_steps(body: str) -> int:
    is_automaton = body.startswith("Regex(")
    max_count = max((int(count) for bounds in _COUNT.findall(body) for count in bounds if count.isdecimal()), default=1)
    steps = 0
    for characters, loop in _CLASS.findall(body):
        is_wide = _WIDE_CLASS.search(characters) is not None
        steps_per_state = STEPS_PER_WIDE_LOOP if loop else STEPS_PER_WIDE_STATE
        steps += steps_per_state if is_wide else STEPS_PER_NARROW_STATE
    return steps * (min(max(max_count, 1), 128) if is_automaton else 1)
