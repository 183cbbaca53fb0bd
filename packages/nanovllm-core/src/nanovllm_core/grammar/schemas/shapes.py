"""What a value may be, one JSON type at a time: shapes, and which values two shapes have in common.

A schema is a list of shapes of which any may be met. What stands inside arrays and objects is named by `Conj`, the
schemas that all apply there: it is read when it is needed, so that recursive schemas end. This room must not know
keywords, nor how a grammar is written.
"""

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal as Kind
from typing import TypeAlias

from nanovllm_core.grammar.schemas.json_values import JSON

# Which schemas all apply, by their numbers in a Library, in order. () is none, and so anything.
Conj: TypeAlias = tuple[int, ...]
# The schema that nothing meets has this number in every library.
NEVER = 0
Places: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a value may be.

    places: where the keywords that say so stand, by keyword. narrowed: it has fewer values than the schema, so that
    what it lacks is not what the schema excludes. negated: it was made by negating, so names in it are not evaluated.
    """

    places: Places = field(default=(), compare=False, kw_only=True)
    narrowed: bool = field(default=False, compare=False, kw_only=True)
    negated: bool = field(default=False, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Constant(Shape):
    """This value and no other. key: what tells it from others."""

    value: JSON = field(compare=False)
    key: str


@dataclass(frozen=True, slots=True)
class Number(Shape):
    """Numbers (integer: only those without a fraction) between bounds that belong to it unless they are open."""

    integer: bool = False
    low: Fraction | None = None
    high: Fraction | None = None
    open_low: bool = False
    open_high: bool = False
    multiples: frozenset[Fraction] = frozenset()
    excluded: frozenset[Fraction] = frozenset()


@dataclass(frozen=True, slots=True)
class Text(Shape):
    """Strings of `low` to `high` code points in which all of `found` and none of `absent` are found (patterns)."""

    low: int = 0
    high: int | None = None
    found: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    # No limit of what is valid, only of what is written.
    format: str | None = None


@dataclass(frozen=True, slots=True)
class Contains:
    """`low` to `high` items meet `item`."""

    item: Conj
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Array(Shape):
    """Arrays of `low` to `high` items: the first ones as in `prefix`, others as in `rest`.

    rest_said: whether a keyword speaks of those others, which decides what unevaluatedItems speaks of.
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
    """Objects of `low` to `high` properties, whose names all meet `names`.

    properties: by name. patterns: by a pattern found in the name. rest: of those that are in neither; None: not said.
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
    """What meets both."""
    if NEVER in one or NEVER in other:
        return (NEVER,)
    return one if not other else tuple(sorted({*one, *other}))


def higher(one: int | None, other: int | None) -> int | None:
    """The stricter of two upper bounds."""
    return other if one is None else one if other is None else min(one, other)


def meet_numbers(one: Number, other: Number) -> Number | None:
    """Numbers that are both."""
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
    """Whether `value` is one of these."""
    if shape.low is not None and (value < shape.low or (shape.open_low and value == shape.low)):
        return False
    if shape.high is not None and (value > shape.high or (shape.open_high and value == shape.high)):
        return False
    if (shape.integer and value.denominator != 1) or value in shape.excluded:
        return False
    return all((value / step).denominator == 1 for step in shape.multiples)


def meet_texts(one: Text, other: Text) -> Text | None:
    """Strings that are both."""
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
    """Arrays that are both."""
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
    """What the item of that index meets."""
    return shape.prefix[index] if index < len(shape.prefix) else shape.rest


def marked(shape: Shape, *origins: Shape) -> Shape:
    """`shape`, known to come from `origins`."""
    return replace(
        shape,
        places=tuple(dict.fromkeys(place for origin in origins for place in origin.places)),
        narrowed=any(origin.narrowed for origin in origins),
        negated=any(origin.negated for origin in origins),
    )


def where(shape: Shape, keyword: str) -> str | None:
    """Where the keyword stands that this shape comes from."""
    return next((place for name, place in shape.places if name == keyword), None)
