"""Converts shapes to plans: forms of values that xgrammar can enforce. Rejects shapes that have no such form.

Plans permit only valid values, but not all of them. Objects have declared properties in order, unless the schema allows
others. Strings with a pattern or length have no escapes. Items for `contains` come first.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, permutations
from math import ceil, comb, floor, perm
from typing import TypeAlias

from nanovllm_core.grammar.schemas import keys
from nanovllm_core.grammar.schemas.document import SchemaError
from nanovllm_core.grammar.schemas.json_values import JSON
from nanovllm_core.grammar.schemas.library import Library
from nanovllm_core.grammar.schemas.shapes import (
    FREE,
    NEVER,
    Array,
    Conj,
    Constant,
    Number,
    Object,
    Shape,
    Text,
    both,
    higher,
    where,
)
from nanovllm_core.grammar.schemas.strings import as_text, format_pattern

# Most constants that replace a keyword without another form.
MAX_WRITTEN_OUT = 2_000
# Most enum values for which `uniqueItems` is written out.
MAX_DISTINCT = 200
# Largest number of items that xgrammar counts.
MAX_ITEMS = 100_000
MAX_MULTIPLE = 1024
# Largest integer in xgrammar, and largest bound of other numbers that is exact.
INT64 = 2**63 - 1
EXACT = 2**53
# xgrammar writes numbers with bounds with at most six fraction digits.
GRID = 10**6


@dataclass(frozen=True, slots=True)
class Constants:
    """One of several constant values."""

    values: tuple[JSON, ...]


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers between bounds; None for no bound. multiple: None for any number."""

    integer: bool
    low: Fraction | None
    high: Fraction | None
    open_low: bool
    open_high: bool
    multiple: int | None


@dataclass(frozen=True, slots=True)
class Texts:
    """Strings that match a pattern in xgrammar's syntax; None for any string."""

    pattern: str | None


@dataclass(frozen=True, slots=True)
class Items:
    """Arrays of `low` to `high` items. prefix: schemas of the first items. rest: schema of the others."""

    prefix: tuple[Conj, ...]
    rest: Conj
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Properties:
    """Objects of `low` to `high` properties.

    named: triples (name, schema, is required), in order.
    others: pairs (pattern of names or None for any name, schema).
    """

    named: tuple[tuple[str, Conj, bool], ...]
    others: tuple[tuple[str | None, Conj], ...]
    low: int
    high: int | None


Plan: TypeAlias = Constants | Numbers | Texts | Items | Properties


def plans(library: Library, conj: Conj) -> tuple[Plan, ...] | None:
    """The plans of the values that are valid against `conj`; None if every value is. Raises SchemaError."""
    shapes = library.shapes(conj)
    if set(shapes) == set(FREE):
        return None
    shapes = _implied_types(shapes)
    constants = [shape for shape in shapes if isinstance(shape, Constant)]
    planned: list[Plan] = []
    place = library.place(conj)
    for shape in shapes:
        match shape:
            case Number():
                planned.extend(_numbers(shape, place))
            case Text():
                planned.extend(_texts(shape, place))
            case Array():
                planned.extend(_arrays(library, shape, place))
            case Object():
                planned.extend(_objects(library, shape, place))
            case _:
                pass
    if constants:
        for shape in constants:
            _check_constant(shape, place)
        planned.append(Constants(tuple(shape.value for shape in constants)))
    return tuple(planned)


def _implied_types(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """Without `type`, restrict to the types that keywords constrain: `properties` implies an object."""
    free = set(FREE)
    if not all(
        any(type(kind) is type(s) and (kind == s or not isinstance(kind, Constant)) for s in shapes) for kind in FREE
    ):
        return shapes
    said = tuple(
        shape for shape in shapes if shape not in free and not shape.negated and not isinstance(shape, Constant)
    )
    return said or shapes


def _refused(shape: Shape, keyword: str, place: str, problem: str) -> SchemaError:
    return SchemaError(where(shape, keyword) or place, keyword, problem)


# Numbers.


def _check_constant(shape: Constant, place: str) -> None:
    """Raise SchemaError for integers beyond 64 bits, which xgrammar would change."""
    waiting = [shape.value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            waiting.extend(value.values() if isinstance(value, dict) else value)
        elif type(value) is int and abs(value) > INT64:
            keyword = "const" if where(shape, "const") else "enum"
            raise _refused(shape, keyword, place, f"has an integer beyond 64 bits: {str(value)[:40]}")


def _numbers(shape: Number, place: str) -> list[Plan]:
    if shape.excluded:
        return _around(shape, place)
    step = _step(shape, place)
    if shape.integer or (step is not None and step.denominator == 1):
        return _integers(shape, step, place)
    if step is not None:
        raise _refused(shape, "multipleOf", place, "can't be enforced for numbers with a fraction; use integers")
    low, high = shape.low, shape.high
    open_low, open_high = shape.open_low, shape.open_high
    if low is not None and low < -EXACT:
        low, open_low = Fraction(-EXACT), False
    if high is not None and high > EXACT:
        high, open_high = Fraction(EXACT), False
    keyword = next((k for k, _ in shape.places if k in BOUNDS), "minimum")
    if (low is not None and low > EXACT) or (high is not None and high < -EXACT):
        raise _refused(shape, keyword, place, "is beyond what can be enforced: 2**53")
    if low is not None and high is not None and not _on_grid(low, high, open_low, open_high):
        raise _refused(shape, keyword, place, "leaves no number of at most 6 fraction digits")
    return [Numbers(False, low, high, open_low, open_high, None)]


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _on_grid(low: Fraction, high: Fraction, open_low: bool, open_high: bool) -> bool:
    first, last = ceil(low * GRID), floor(high * GRID)
    first += open_low and Fraction(first, GRID) == low
    last -= open_high and Fraction(last, GRID) == high
    return first <= last


def _around(shape: Number, place: str) -> list[Plan]:
    """The ranges between excluded numbers."""
    whole = replace(shape, excluded=frozenset())
    planned: list[Plan] = []
    low, open_low = shape.low, shape.open_low
    for value in sorted(shape.excluded):
        if (shape.low is not None and value < shape.low) or (shape.high is not None and value > shape.high):
            continue
        if low is None or low < value:
            planned.extend(_numbers(replace(whole, low=low, open_low=open_low, high=value, open_high=True), place))
        low, open_low = value, True
    if shape.high is None or low is None or low < shape.high:
        planned.extend(_numbers(replace(whole, low=low, open_low=open_low), place))
    return planned


def _step(shape: Number, place: str) -> Fraction | None:
    """The number of which every value must be a multiple; None for no such number."""
    step: Fraction | None = None
    for other in shape.multiples:
        # The least common multiple of fractions in lowest terms.
        if step is None:
            step = other
        else:
            top = step.numerator * other.denominator
            bottom = other.numerator * step.denominator
            ratio = Fraction(top, bottom)
            step *= ratio.denominator
    if step is not None and shape.integer and step.denominator != 1:
        # An integer is a multiple of n/d in lowest terms if it is a multiple of n. Floats have large d: reject these.
        if step.denominator > MAX_MULTIPLE:
            raise _refused(shape, "multipleOf", place, "of a number with a fraction can't be enforced for integers")
        step = Fraction(step.numerator)
    return step


def _integers(shape: Number, step: Fraction | None, place: str) -> list[Plan]:
    low = None if shape.low is None else ceil(shape.low) + (shape.open_low and shape.low.denominator == 1)
    high = None if shape.high is None else floor(shape.high) - (shape.open_high and shape.high.denominator == 1)
    if (low is not None and low > INT64) or (high is not None and high < -INT64):
        raise _refused(shape, next((k for k, _ in shape.places if k in BOUNDS), "minimum"), place, "is beyond 64 bits")
    if low is not None and high is not None and low > high:
        return []
    if step is not None and step != 1:
        return _multiples(shape, int(step), low, high, place)
    return [
        Numbers(
            True,
            None if low is None else Fraction(max(low, -INT64)),
            None if high is None else Fraction(min(high, INT64)),
            False,
            False,
            None,
        )
    ]


def _multiples(shape: Number, step: int, low: int | None, high: int | None, place: str) -> list[Plan]:
    if low is None and high is None:
        if step > MAX_MULTIPLE:
            raise _refused(shape, "multipleOf", place, f"above {MAX_MULTIPLE} can be enforced between bounds only")
        if _ends_with_zeros(step):
            return [Numbers(True, None, None, False, False, step)]
        # Digits written so far may not be completable to a multiple by zeros, so write all multiples out.
        low, high = -(MAX_WRITTEN_OUT // 2 - 1) * step, MAX_WRITTEN_OUT // 2 * step
    if low is None or high is None:
        raise _refused(shape, "multipleOf", place, "can be enforced with both bounds or with none; give the other one")
    first, last = -(-low // step), high // step
    if last - first >= MAX_WRITTEN_OUT:
        raise _refused(shape, "multipleOf", place, f"between bounds leaves more than {MAX_WRITTEN_OUT} values")
    return [Constants(tuple(index * step for index in range(first, last + 1)))] if first <= last else []


def _ends_with_zeros(step: int) -> bool:
    """Whether appending enough zeros makes any number a multiple of `step`."""
    return 10 ** step.bit_length() % step == 0


# Strings.


def _texts(shape: Text, place: str) -> list[Plan]:
    if not (shape.low or shape.high is not None or shape.found or shape.absent or shape.excluded):
        pattern = None if shape.format is None else format_pattern(shape.format)
        return [Texts(pattern)]
    pattern = as_text(shape, place)
    return [] if pattern is None else [Texts(pattern)]


# Arrays.


def _arrays(library: Library, shape: Array, place: str) -> list[Plan]:
    high = shape.high
    if shape.rest == (NEVER,):
        high = higher(high, len(shape.prefix))
    if (NEVER,) in shape.prefix:
        high = higher(high, shape.prefix.index((NEVER,)))
    prefix, wanted = _with_contained(shape, high, place)
    low = max(shape.low, wanted)
    if high is not None and low > high:
        return []
    if low > MAX_ITEMS:
        raise _refused(shape, "minItems", place, f"above {MAX_ITEMS} is not supported")
    if high is not None:
        high = min(high, MAX_ITEMS)
        prefix = prefix[:high]
    if shape.unique and (high is None or high > 1):
        return [_distinct(library, shape, prefix, low, high, place)]
    rest = (NEVER,) if high is not None and high <= len(prefix) else shape.rest
    return [Items(tuple(prefix), rest, low, high)]


def _with_contained(shape: Array, high: int | None, place: str) -> tuple[list[Conj], int]:
    """Put the items that `contains` requires first. Returns the schemas of the first items and the required number."""
    prefix = list(shape.prefix)
    position = 0
    for some in sorted(shape.contains, key=lambda some: some.item):
        if some.high is not None and (high is None or high > some.high):
            raise _refused(shape, "contains", place, "can't be enforced with maxContains below maxItems")
        if some.low > MAX_WRITTEN_OUT:
            raise _refused(shape, "contains", place, f"can't be enforced with minContains above {MAX_WRITTEN_OUT}")
        prefix += [shape.rest] * (position + some.low - len(prefix))
        for index in range(position, position + some.low):
            prefix[index] = both(prefix[index], some.item)
        position += some.low
    return prefix, position


def _distinct(library: Library, shape: Array, prefix: list[Conj], low: int, high: int | None, place: str) -> Plan:
    """All arrays of distinct items if these are few, else those with items in the order of the schema."""
    items = library.shapes(shape.rest)
    values = [item.value for item in items if isinstance(item, Constant)]
    most = min(len(values) if high is None else high, len(values))
    if not prefix and len(values) == len(items) and len(values) <= MAX_DISTINCT:
        for ways, count in ((permutations, perm), (combinations, comb)):
            if sum(count(len(values), length) for length in range(low, most + 1)) <= MAX_WRITTEN_OUT:
                return Constants(tuple(list(some) for length in range(low, most + 1) for some in ways(values, length)))
    problem = f"can be enforced only where items are an enum with at most {MAX_WRITTEN_OUT} choices of them"
    raise _refused(shape, "uniqueItems", place, f"{problem}; leave it out")


# Objects.


def _objects(library: Library, shape: Object, place: str) -> list[Plan]:
    known = dict(shape.properties)
    missing = tuple((name, library.property(shape, name)) for name in shape.required if name not in known)
    shape = replace(shape, properties=shape.properties + missing)
    named = [(name, library.property(shape, name), name in shape.required) for name, _ in shape.properties]
    named = [(name, conj, needed) for name, conj, needed in named if conj != (NEVER,) or needed]
    if any(conj == (NEVER,) for _, conj, _ in named):
        return []
    rest = shape.rest
    if rest is None:
        # No keyword allows other properties: exclude them if some are declared and enough for `minProperties`.
        rest = (NEVER,) if (shape.properties or shape.patterns) and shape.low <= len(named) else ()
    others: list[tuple[str | None, Conj]] = []
    if shape.high is None or shape.high > 0:
        more, others = keys.others(library, shape, rest, place)
        named += more
    if shape.high is not None and (shape.high < len(shape.required) or (shape.high == 0 and shape.low)):
        return []
    low = shape.low if shape.low > sum(needed for *_, needed in named) else 0
    if low > 1 and others:
        problem = "above 1 can't be enforced with properties that are not declared, as their names may come twice"
        raise _refused(shape, "minProperties", place, problem)
    high = shape.high
    if high is not None and not others and high >= len(named):
        high = None
    if high == 0:
        named, others, high = [], [], None
    return [Properties(tuple(named), tuple(others), low, high)]
