"""Shapes, which are sets of values of one JSON type, and their intersections.

A schema is a union of shapes. The schemas of items and properties are given by number (`Conj`) and read when needed, so
that recursive schemas terminate.
"""

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal as Kind
from typing import TypeAlias

from nanovllm_core.grammar.schemas.json_values import JSON

# A conjunction: the sorted numbers, in a Library, of schemas that all apply. () allows any value.
Conj: TypeAlias = tuple[int, ...]
# In every library the number of the schema that no value meets.
NEVER = 0
Places: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """A set of values of one JSON type.

    places: pairs (keyword, place) of the keywords that it comes from.
    narrowed: it has fewer values than the schema, so its complement is not the schema's.
    negated: it results from a negation, so its property names do not count as evaluated.
    """

    places: Places = field(default=(), compare=False, kw_only=True)
    narrowed: bool = field(default=False, compare=False, kw_only=True)
    negated: bool = field(default=False, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Constant(Shape):
    """A single value. key: `key_of(value)`, by which constants are compared."""

    value: JSON = field(compare=False)
    key: str


@dataclass(frozen=True, slots=True)
class Number(Shape):
    """Numbers between bounds, which are included unless open. integer: only numbers without a fraction."""

    integer: bool = False
    low: Fraction | None = None
    high: Fraction | None = None
    open_low: bool = False
    open_high: bool = False
    multiples: frozenset[Fraction] = frozenset()
    excluded: frozenset[Fraction] = frozenset()


@dataclass(frozen=True, slots=True)
class Text(Shape):
    """Strings of `low` to `high` code points in which all patterns of `found` and none of `absent` match."""

    low: int = 0
    high: int | None = None
    found: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    # The format does not affect validity, only which strings are written.
    format: str | None = None


@dataclass(frozen=True, slots=True)
class Contains:
    """A condition on arrays: `low` to `high` items are valid against `item`."""

    item: Conj
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Array(Shape):
    """Arrays of `low` to `high` items. prefix: schemas of the first items. rest: schema of the others.

    rest_said: whether a keyword sets `rest`; unevaluatedItems does not apply then.
    """

    prefix: tuple[Conj, ...] = ()
    rest: Conj = ()
    low: int = 0
    high: int | None = None
    unique: bool = False
    contains: frozenset[Contains] = frozenset()
    rest_said: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Object(Shape):
    """Objects of `low` to `high` properties, whose names are all valid against `names`.

    properties, patterns: schemas by name, and by a pattern found in the name.
    rest: schema of all other properties; None if no keyword sets it.
    """

    properties: tuple[tuple[str, Conj], ...] = ()
    required: tuple[str, ...] = ()
    patterns: tuple[tuple[str, Conj], ...] = ()
    rest: Conj | None = None
    names: Conj = ()
    low: int = 0
    high: int | None = None


FREE: tuple[Shape, ...] = (
    Object(),
    Array(),
    Text(),
    Number(),
    Constant(True, "true"),
    Constant(False, "false"),
    Constant(None, "null"),
)
TypeName: TypeAlias = Kind["object", "array", "string", "integer", "number", "boolean", "null"]


def both(one: Conj, other: Conj) -> Conj:
    """The conjunction of two conjunctions."""
    if NEVER in one or NEVER in other:
        return (NEVER,)
    return one if not other else tuple(sorted({*one, *other}))


def higher(one: int | None, other: int | None) -> int | None:
    """The stricter of two upper bounds."""
    return other if one is None else one if other is None else min(one, other)


def meet_numbers(one: Number, other: Number) -> Number | None:
    """The intersection of two number shapes; None if it is empty."""
    lows = [(s.low, s.open_low) for s in (one, other) if s.low is not None]
    highs = [(s.high, not s.open_high) for s in (one, other) if s.high is not None]
    low, open_low = max(lows, default=(None, False))
    high, closed_high = min(highs, default=(None, True))
    if low is not None and high is not None and (low > high or (low == high and (open_low or not closed_high))):
        return None
    return Number(
        one.integer or other.integer,
        low,
        high,
        open_low,
        not closed_high,
        one.multiples | other.multiples,
        one.excluded | other.excluded,
    )


def holds(shape: Number, value: Fraction) -> bool:
    """Whether `value` is in the shape."""
    if shape.low is not None and (value < shape.low or (shape.open_low and value == shape.low)):
        return False
    if shape.high is not None and (value > shape.high or (shape.open_high and value == shape.high)):
        return False
    if (shape.integer and value.denominator != 1) or value in shape.excluded:
        return False
    return all((value / step).denominator == 1 for step in shape.multiples)


def meet_texts(one: Text, other: Text) -> Text | None:
    """The intersection of two string shapes; None if it is empty."""
    low, high = max(one.low, other.low), higher(one.high, other.high)
    if high is not None and low > high:
        return None
    return Text(
        low,
        high,
        one.found | other.found,
        one.absent | other.absent,
        one.excluded | other.excluded,
        one.format or other.format,
    )


def meet_arrays(one: Array, other: Array) -> Array | None:
    """The intersection of two array shapes; None if it is empty."""
    low, high = max(one.low, other.low), higher(one.high, other.high)
    if high is not None and low > high:
        return None
    count = max(len(one.prefix), len(other.prefix))
    return Array(
        tuple(both(item_at(one, index), item_at(other, index)) for index in range(count)),
        both(one.rest, other.rest),
        low,
        high,
        one.unique or other.unique,
        one.contains | other.contains,
        one.rest_said or other.rest_said,
    )


def item_at(shape: Array, index: int) -> Conj:
    """The schemas that apply to the item at `index`."""
    return shape.prefix[index] if index < len(shape.prefix) else shape.rest


def marked(shape: Shape, *origins: Shape) -> Shape:
    """`shape` with the places and flags of `origins`."""
    return replace(
        shape,
        places=tuple(dict.fromkeys(place for origin in origins for place in origin.places)),
        narrowed=any(origin.narrowed for origin in origins),
        negated=any(origin.negated for origin in origins),
    )


def where(shape: Shape, keyword: str) -> str | None:
    """The place of `keyword` if the shape comes from it; else None."""
    return next((place for name, place in shape.places if name == keyword), None)
