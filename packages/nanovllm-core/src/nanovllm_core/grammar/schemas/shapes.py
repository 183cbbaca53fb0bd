"""Shapes: descriptions of values of one JSON type. A schema allows the values of any of its shapes.

Items and properties refer to their schemas by number, so that recursive schemas have finite shapes.
A bound or count of None means no limit.
"""

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TypeAlias

from nanovllm_core.grammar.schemas.json_values import JSON

# Schemas against which a value must be valid, all of them: sorted numbers from `ShapeResolver`. () allows any value.
SchemaSet: TypeAlias = tuple[int, ...]
# Number of the schema that allows no value.
NEVER = 0
# Pairs (keyword, JSON pointer to the keyword in the document).
Places: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """Values of one JSON type.

    places: keywords that the shape comes from, for error messages.
    is_narrowed: the shape lacks some values that the schema allows. Such a shape can't be negated.
    is_negated: the shape comes from a negation, whose properties and items remain unevaluated in JSON Schema's sense.
    """

    places: Places = field(default=(), compare=False, kw_only=True)
    is_narrowed: bool = field(default=False, compare=False, kw_only=True)
    is_negated: bool = field(default=False, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Constant(Shape):
    """One value. key: `key_of(value)`, equal for equal values."""

    value: JSON = field(compare=False)
    key: str


@dataclass(frozen=True, slots=True)
class Number(Shape):
    """Numbers from `low` to `high`.

    integer: only numbers without a fraction.
    excludes_low, excludes_high: whether the range excludes the bound.
    divisors: each number is a multiple of every divisor.
    excluded: numbers that the shape does not include.
    """

    integer: bool = False
    low: Fraction | None = None
    high: Fraction | None = None
    excludes_low: bool = False
    excludes_high: bool = False
    divisors: frozenset[Fraction] = frozenset()
    excluded: frozenset[Fraction] = frozenset()


@dataclass(frozen=True, slots=True)
class Text(Shape):
    """Strings of `low` to `high` code points, without those in `excluded`.

    patterns, absent_patterns: all of `patterns` and none of `absent_patterns` are found in the string.
    format: the grammar writes strings in this format, although other strings are valid. None for no format.
    """

    low: int = 0
    high: int | None = None
    patterns: frozenset[str] = frozenset()
    absent_patterns: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    format: str | None = None


@dataclass(frozen=True, slots=True)
class Contains:
    """A condition on an array: `low` to `high` items are valid against `item_schemas`."""

    item_schemas: SchemaSet
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Array(Shape):
    """Arrays of `low` to `high` items, which are distinct if `unique`.

    prefix: schemas of the first items.
    rest: schemas of all other items.
    rest_is_declared: `rest` comes from a keyword, so that unevaluatedItems does not apply.
    """

    prefix: tuple[SchemaSet, ...] = ()
    rest: SchemaSet = ()
    low: int = 0
    high: int | None = None
    unique: bool = False
    contains: frozenset[Contains] = frozenset()
    rest_is_declared: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Object(Shape):
    """Objects of `low` to `high` properties, whose names are valid against `name_schemas`.

    properties: pairs (name, schemas of the value).
    patterns: pairs (pattern that is found in the name, schemas of the value).
    rest: schemas of all other properties; None if no keyword is about them.
    """

    properties: tuple[tuple[str, SchemaSet], ...] = ()
    required: tuple[str, ...] = ()
    patterns: tuple[tuple[str, SchemaSet], ...] = ()
    rest: SchemaSet | None = None
    name_schemas: SchemaSet = ()
    low: int = 0
    high: int | None = None


# The shapes of a schema without restrictions.
ANY_VALUE: tuple[Shape, ...] = (
    Object(),
    Array(),
    Text(),
    Number(),
    Constant(True, "true"),
    Constant(False, "false"),
    Constant(None, "null"),
)


def conjunction(first: SchemaSet, second: SchemaSet) -> SchemaSet:
    """The set of all schemas in `first` and `second`."""
    if NEVER in first or NEVER in second:
        return (NEVER,)
    return first if not second else tuple(sorted({*first, *second}))


def lower_maximum(first: int | None, second: int | None) -> int | None:
    """The stricter of two upper bounds."""
    return second if first is None else first if second is None else min(first, second)


def intersect_numbers(first: Number, second: Number) -> Number | None:
    """The numbers that are in `first` and `second`; None if there are none."""
    lows = [(s.low, s.excludes_low) for s in (first, second) if s.low is not None]
    highs = [(s.high, not s.excludes_high) for s in (first, second) if s.high is not None]
    low, excludes_low = max(lows, default=(None, False))
    high, includes_high = min(highs, default=(None, True))
    if low is not None and high is not None and (low > high or (low == high and (excludes_low or not includes_high))):
        return None
    return Number(
        first.integer or second.integer,
        low,
        high,
        excludes_low,
        not includes_high,
        first.divisors | second.divisors,
        first.excluded | second.excluded,
    )


def includes_number(shape: Number, value: Fraction) -> bool:
    """Whether `value` is one of the shape's numbers."""
    if shape.low is not None and (value < shape.low or (shape.excludes_low and value == shape.low)):
        return False
    if shape.high is not None and (value > shape.high or (shape.excludes_high and value == shape.high)):
        return False
    if (shape.integer and value.denominator != 1) or value in shape.excluded:
        return False
    return all((value / step).denominator == 1 for step in shape.divisors)


def intersect_strings(first: Text, second: Text) -> Text | None:
    """The strings that are in `first` and `second`; None if their lengths exclude each other."""
    low, high = max(first.low, second.low), lower_maximum(first.high, second.high)
    if high is not None and low > high:
        return None
    return Text(
        low,
        high,
        first.patterns | second.patterns,
        first.absent_patterns | second.absent_patterns,
        first.excluded | second.excluded,
        first.format or second.format,
    )


def intersect_arrays(first: Array, second: Array) -> Array | None:
    """The arrays that are in `first` and `second`; None if their lengths exclude each other."""
    low, high = max(first.low, second.low), lower_maximum(first.high, second.high)
    if high is not None and low > high:
        return None
    count = max(len(first.prefix), len(second.prefix))
    return Array(
        tuple(conjunction(schemas_of_item(first, index), schemas_of_item(second, index)) for index in range(count)),
        conjunction(first.rest, second.rest),
        low,
        high,
        first.unique or second.unique,
        first.contains | second.contains,
        first.rest_is_declared or second.rest_is_declared,
    )


def schemas_of_item(shape: Array, index: int) -> SchemaSet:
    """The schemas of the item at `index`."""
    return shape.prefix[index] if index < len(shape.prefix) else shape.rest


def with_origins_of(shape: Shape, *origins: Shape) -> Shape:
    """`shape` with the places and flags of `origins`, the shapes that it was made from."""
    return replace(
        shape,
        places=tuple(dict.fromkeys(place for origin in origins for place in origin.places)),
        is_narrowed=any(origin.is_narrowed for origin in origins),
        is_negated=any(origin.is_negated for origin in origins),
    )


def allows_count(shape: Text | Array | Object, count: int) -> bool:
    """Whether `count` characters, items or properties are within the shape's limits."""
    return shape.low <= count and (shape.high is None or count <= shape.high)


def keyword_place(shape: Shape, keyword: str) -> str | None:
    """The place of `keyword` if the shape comes from it; else None."""
    return next((place for name, place in shape.places if name == keyword), None)
