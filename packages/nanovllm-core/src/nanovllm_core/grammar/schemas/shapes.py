"""Defines shapes. A shape describes values of one JSON type. A schema allows the values of all its shapes.

A shape refers to the schemas of its items and properties by number, because schemas may be recursive.
A bound of None means no limit.
"""

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TypeAlias

from nanovllm_core.grammar.schemas.json_values import JSON

# Sorted numbers of schemas. A value must be valid against all these schemas. The empty tuple allows any value.
Conjunction: TypeAlias = tuple[int, ...]
# The conjunction of the schema `false`, which allows no value.
FALSE_SCHEMA: Conjunction = (0,)
# Pairs (keyword, JSON pointer to the keyword in the document).
Places: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """Values of one JSON type.

    places: the keywords that define the shape, with their places, for error messages.
    omits_allowed_values: the shape lacks some values that the schema allows, so the shape can't be negated.
    comes_from_negation: the shape is part of a complement. JSON Schema then treats all properties and items as
        unevaluated.
    """

    places: Places = field(default=(), compare=False, kw_only=True)
    omits_allowed_values: bool = field(default=False, compare=False, kw_only=True)
    comes_from_negation: bool = field(default=False, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class ConstantShape(Shape):
    """One value. key: `json_values.equality_key(value)`."""

    value: JSON = field(compare=False)
    key: str


@dataclass(frozen=True, slots=True)
class NumberShape(Shape):
    """Numbers from `low` to `high`, except the numbers in `excluded`.

    excludes_low, excludes_high: the range excludes `low` or `high`.
    divisors: each number is a multiple of every divisor.
    """

    integer: bool = False
    low: Fraction | None = None
    high: Fraction | None = None
    excludes_low: bool = False
    excludes_high: bool = False
    divisors: frozenset[Fraction] = frozenset()
    excluded: frozenset[Fraction] = frozenset()


@dataclass(frozen=True, slots=True)
class StringShape(Shape):
    """Strings of `low` to `high` code points, except the strings in `excluded`.

    The order of a set of strings differs between processes. Sort the sets, so that a schema has the same result in all.
    patterns, forbidden_patterns: a search in the string finds each of `patterns`, and none of `forbidden_patterns`.
    format: value of the keyword `format`. The grammar enforces a known format if the shape has no pattern.
        `ShapeResolver.admits` ignores formats.
    """

    low: int = 0
    high: int | None = None
    patterns: frozenset[str] = frozenset()
    forbidden_patterns: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    format: str | None = None


@dataclass(frozen=True, slots=True)
class Contains:
    """Requires that `low` to `high` items of an array are valid against `item_schemas`."""

    item_schemas: Conjunction
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class ArrayShape(Shape):
    """Arrays of `low` to `high` items.

    prefix: schemas of the first items, one conjunction per item.
    rest: schemas of every other item.
    has_declared_rest: a keyword defines `rest`, so the keyword unevaluatedItems does not apply to this array.
    """

    prefix: tuple[Conjunction, ...] = ()
    rest: Conjunction = ()
    low: int = 0
    high: int | None = None
    unique: bool = False
    contains: frozenset[Contains] = frozenset()
    has_declared_rest: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class ObjectShape(Shape):
    """Objects of `low` to `high` properties, whose names are valid against `name_schemas`.

    patterns: pairs (pattern, schemas of the value). A pair applies to each name in which a search finds the pattern.
    rest: schemas of every other property; None if no keyword mentions other properties.
    """

    properties: tuple[tuple[str, Conjunction], ...] = ()
    required: tuple[str, ...] = ()
    patterns: tuple[tuple[str, Conjunction], ...] = ()
    rest: Conjunction | None = None
    name_schemas: Conjunction = ()
    low: int = 0
    high: int | None = None


ANY_OBJECT = ObjectShape()
ANY_VALUE_SHAPES: tuple[Shape, ...] = (
    ANY_OBJECT,
    ArrayShape(),
    StringShape(),
    NumberShape(),
    ConstantShape(True, "true"),
    ConstantShape(False, "false"),
    ConstantShape(None, "null"),
)


def join_conjunctions(first: Conjunction, second: Conjunction) -> Conjunction:
    """The conjunction of all schemas in `first` and `second`."""
    if FALSE_SCHEMA in (first, second):
        return FALSE_SCHEMA
    return first if not second else tuple(sorted({*first, *second}))


def min_of_maxima(first: int | None, second: int | None) -> int | None:
    """The stricter of two upper bounds."""
    return second if first is None else first if second is None else min(first, second)


def intersect_numbers(first: NumberShape, second: NumberShape) -> NumberShape | None:
    """The numbers in both `first` and `second`; None if the ranges do not overlap."""
    lows = [(s.low, s.excludes_low) for s in (first, second) if s.low is not None]
    highs = [(s.high, not s.excludes_high) for s in (first, second) if s.high is not None]
    low, excludes_low = max(lows, default=(None, False))
    high, includes_high = min(highs, default=(None, True))
    if low is not None and high is not None and (low > high or (low == high and (excludes_low or not includes_high))):
        return None
    return NumberShape(
        first.integer or second.integer,
        low,
        high,
        excludes_low,
        not includes_high,
        first.divisors | second.divisors,
        first.excluded | second.excluded,
    )


def includes_number(shape: NumberShape, value: Fraction) -> bool:
    """Whether `shape` allows `value`."""
    if shape.low is not None and (value < shape.low or (shape.excludes_low and value == shape.low)):
        return False
    if shape.high is not None and (value > shape.high or (shape.excludes_high and value == shape.high)):
        return False
    if (shape.integer and value.denominator != 1) or value in shape.excluded:
        return False
    return all((value / divisor).denominator == 1 for divisor in shape.divisors)


def intersect_strings(first: StringShape, second: StringShape) -> StringShape | None:
    """The strings in both `first` and `second`; None if the length limits do not overlap."""
    low, high = max(first.low, second.low), min_of_maxima(first.high, second.high)
    if high is not None and low > high:
        return None
    return StringShape(
        low,
        high,
        first.patterns | second.patterns,
        first.forbidden_patterns | second.forbidden_patterns,
        first.excluded | second.excluded,
        first.format or second.format,
    )


def intersect_arrays(first: ArrayShape, second: ArrayShape) -> ArrayShape | None:
    """The arrays in both `first` and `second`; None if the length limits do not overlap."""
    low, high = max(first.low, second.low), min_of_maxima(first.high, second.high)
    if high is not None and low > high:
        return None
    count = max(len(first.prefix), len(second.prefix))
    return ArrayShape(
        tuple(
            join_conjunctions(schemas_of_item(first, index), schemas_of_item(second, index)) for index in range(count)
        ),
        join_conjunctions(first.rest, second.rest),
        low,
        high,
        first.unique or second.unique,
        first.contains | second.contains,
        first.has_declared_rest or second.has_declared_rest,
    )


def schemas_of_item(shape: ArrayShape, index: int) -> Conjunction:
    """The schemas against which the item at `index` must be valid."""
    return shape.prefix[index] if index < len(shape.prefix) else shape.rest


def with_origins_of(shape: Shape, *origins: Shape) -> Shape:
    """Give `shape` the places and flags of `origins`."""
    return replace(
        shape,
        places=tuple(dict.fromkeys(place for origin in origins for place in origin.places)),
        omits_allowed_values=any(origin.omits_allowed_values for origin in origins),
        comes_from_negation=any(origin.comes_from_negation for origin in origins),
    )


def allows_count(shape: StringShape | ArrayShape | ObjectShape, count: int) -> bool:
    """Whether a string, array or object of `shape` may have `count` characters, items or properties."""
    return shape.low <= count and (shape.high is None or count <= shape.high)


def keyword_place(shape: Shape, keyword: str) -> str | None:
    """The place of `keyword`; None if `keyword` does not define the shape."""
    return next((place for name, place in shape.places if name == keyword), None)
