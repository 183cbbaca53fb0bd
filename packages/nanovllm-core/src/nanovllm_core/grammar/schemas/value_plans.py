"""Turns shapes into plans. A plan describes values that an xgrammar grammar can express.

A plan may allow fewer values than the schema: properties keep their declared order, strings with a pattern or length
have no escapes, and the items that `contains` requires come first.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, permutations
from math import ceil, comb, floor, perm
from typing import TypeAlias

from nanovllm_core.grammar.schemas.document import SchemaError
from nanovllm_core.grammar.schemas.formats import FORMATS
from nanovllm_core.grammar.schemas.json_values import JSON
from nanovllm_core.grammar.schemas.search import CountSteps
from nanovllm_core.grammar.schemas.shape_resolver import ShapeResolver
from nanovllm_core.grammar.schemas.shapes import (
    ANY_VALUE_SHAPES,
    FALSE_SCHEMA,
    ArrayShape,
    Conjunction,
    ConstantShape,
    NumberShape,
    ObjectShape,
    Shape,
    StringShape,
    join_conjunctions,
    keyword_place,
    min_of_maxima,
)
from nanovllm_core.grammar.schemas.string_patterns import string_pattern
from nanovllm_core.grammar.schemas.undeclared_properties import plan_undeclared_properties

# Maximum number of constants that replace a keyword such as multipleOf or uniqueItems.
MAX_ENUMERATED_VALUES = 2_000
# Maximum number of enum values for the items of an array with uniqueItems.
MAX_UNIQUE_ENUM_VALUES = 200
# Maximum value of minItems and maxItems in xgrammar.
MAX_ITEMS = 100_000
# Maximum multipleOf of an integer without bounds, and maximum denominator of a multipleOf for integers.
MAX_UNBOUNDED_MULTIPLE = 1024
# Maximum magnitude of integers in xgrammar.
MAX_INT64 = 2**63 - 1
# Maximum magnitude of the bounds of type number in xgrammar.
MAX_EXACT_INTEGER = 2**53
# xgrammar writes a bounded number with up to 6 fraction digits.
DECIMAL_SCALE = 10**6


@dataclass(frozen=True, slots=True)
class ConstantsPlan:
    """A list of values, as in an enum."""

    values: tuple[JSON, ...]


@dataclass(frozen=True, slots=True)
class NumberPlan:
    """Numbers from `low` to `high`. divisor: all numbers are multiples of this integer; None for any number."""

    integer: bool
    low: Fraction | None = None
    high: Fraction | None = None
    excludes_low: bool = False
    excludes_high: bool = False
    divisor: int | None = None


@dataclass(frozen=True, slots=True)
class StringPlan:
    """Strings that match a pattern in xgrammar's syntax. pattern: None for any string."""

    pattern: str | None


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """Arrays of `low` to `high` items; no maximum if `high` is None.

    prefix: schemas of the first items. rest: schemas of every other item.
    """

    prefix: tuple[Conjunction, ...]
    rest: Conjunction
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """Objects of `low` to `high` properties; no maximum if `high` is None.

    named: tuples (name, schemas of the value, whether the property is required), in the order of the output.
    name_patterns: pairs (pattern, schemas of the value) for undeclared properties. A pattern of None means any name.
    """

    named: tuple[tuple[str, Conjunction, bool], ...]
    name_patterns: tuple[tuple[str | None, Conjunction], ...]
    low: int
    high: int | None


Plan: TypeAlias = ConstantsPlan | NumberPlan | StringPlan | ArrayPlan | ObjectPlan


def plan_values(resolver: ShapeResolver, conjunction: Conjunction) -> tuple[Plan, ...] | None:
    """Plan the values that are valid against `conjunction`; None if all values are valid. Raises SchemaError."""
    shapes = resolver.shapes(conjunction)
    if len(shapes) == len(ANY_VALUE_SHAPES) and set(shapes) == set(ANY_VALUE_SHAPES):
        return None
    shapes = _infer_types(shapes)
    planned: list[Plan] = []
    place = resolver.place(conjunction)
    for shape in shapes:
        match shape:
            case NumberShape():
                planned.extend(_plan_numbers(shape, place))
            case StringShape():
                planned.extend(_plan_strings(shape, place, resolver.count_steps))
            case ArrayShape():
                planned.extend(_plan_arrays(resolver, shape, place))
            case ObjectShape():
                planned.extend(_plan_objects(resolver, shape, place))
            case _:
                pass
    constants = [shape for shape in shapes if isinstance(shape, ConstantShape)]
    for shape in constants:
        _check_constant(shape, place)
    return (*planned, ConstantsPlan(tuple(shape.value for shape in constants))) if constants else tuple(planned)


def _infer_types(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """If all types are allowed, keep only types that a keyword restricts: `properties` alone implies an object."""
    if len(shapes) < len(ANY_VALUE_SHAPES):
        return shapes
    unrestricted_shapes = set(ANY_VALUE_SHAPES)
    if not all(
        any(type(other) is type(shape) and (other == shape or not isinstance(other, ConstantShape)) for shape in shapes)
        for other in unrestricted_shapes
    ):
        return shapes
    restricted = tuple(
        shape
        for shape in shapes
        if shape not in unrestricted_shapes and not shape.comes_from_negation and not isinstance(shape, ConstantShape)
    )
    return restricted or shapes


def _error_at(shape: Shape, keyword: str, place: str, problem: str) -> SchemaError:
    return SchemaError(keyword_place(shape, keyword) or place, keyword, problem)


def _check_constant(shape: ConstantShape, place: str) -> None:
    """Raises SchemaError for integers beyond 64 bits, because xgrammar changes such integers to floats."""
    pending = [shape.value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list):
            pending.extend(value.values() if isinstance(value, dict) else value)
        # JSON decoders may turn such integers into floats. Every float of this size is an integer.
        elif isinstance(value, int | float) and abs(value) > MAX_INT64:
            keyword = "const" if keyword_place(shape, "const") else "enum"
            raise _error_at(shape, keyword, place, f"has an integer beyond 64 bits: {str(value)[:40]}")


def _plan_numbers(shape: NumberShape, place: str) -> list[Plan]:
    if shape.excluded:
        return _plan_between_excluded(shape, place)
    step = _common_multiple(shape, place)
    if shape.integer or (step is not None and step.denominator == 1):
        return _plan_integers(shape, step, place)
    if step is not None:
        raise _error_at(shape, "multipleOf", place, "can't be enforced for numbers with a fraction; use integers")
    low, high = shape.low, shape.high
    excludes_low, excludes_high = shape.excludes_low, shape.excludes_high
    if low is not None and low < -MAX_EXACT_INTEGER:
        low, excludes_low = Fraction(-MAX_EXACT_INTEGER), False
    if high is not None and high > MAX_EXACT_INTEGER:
        high, excludes_high = Fraction(MAX_EXACT_INTEGER), False
    if (low is not None and low > MAX_EXACT_INTEGER) or (high is not None and high < -MAX_EXACT_INTEGER):
        raise _error_at(shape, _bound_keyword(shape), place, "is beyond what can be enforced: 2**53")
    if low is not None and high is not None and not _has_writable_number(low, high, excludes_low, excludes_high):
        raise _error_at(shape, _bound_keyword(shape), place, "leaves no number of at most 6 fraction digits")
    return [NumberPlan(False, low, high, excludes_low, excludes_high)]


def _bound_keyword(shape: NumberShape) -> str:
    """The first keyword that defines a bound, for errors."""
    keywords = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    return next((keyword for keyword, _ in shape.places if keyword in keywords), "minimum")


def _has_writable_number(low: Fraction, high: Fraction, excludes_low: bool, excludes_high: bool) -> bool:
    first, last = ceil(low * DECIMAL_SCALE), floor(high * DECIMAL_SCALE)
    first += excludes_low and Fraction(first, DECIMAL_SCALE) == low
    last -= excludes_high and Fraction(last, DECIMAL_SCALE) == high
    return first <= last


def _plan_between_excluded(shape: NumberShape, place: str) -> list[Plan]:
    """Plan the ranges between the excluded numbers."""
    without_excluded = replace(shape, excluded=frozenset())
    planned: list[Plan] = []
    low, excludes_low = shape.low, shape.excludes_low
    for value in sorted(shape.excluded):
        if (shape.low is not None and value < shape.low) or (shape.high is not None and value > shape.high):
            continue
        if low is None or low < value:
            gap = replace(without_excluded, low=low, excludes_low=excludes_low, high=value, excludes_high=True)
            planned.extend(_plan_numbers(gap, place))
        low, excludes_low = value, True
    if shape.high is None or low is None or low < shape.high:
        planned.extend(_plan_numbers(replace(without_excluded, low=low, excludes_low=excludes_low), place))
    return planned


def _common_multiple(shape: NumberShape, place: str) -> Fraction | None:
    """The least common multiple of `shape.divisors`; None if there are no divisors."""
    step: Fraction | None = None
    for divisor in shape.divisors:
        step = divisor if step is None else step * (step / divisor).denominator
    if step is not None and shape.integer and step.denominator != 1:
        # An integer is a multiple of n/d (in lowest terms) if it is a multiple of n.
        # A large d shows that n/d is a rounded float, such as 0.1, which binary floats can't store.
        if step.denominator > MAX_UNBOUNDED_MULTIPLE:
            raise _error_at(shape, "multipleOf", place, "is a fraction, which can't be enforced for integers")
        step = Fraction(step.numerator)
    return step


def _plan_integers(shape: NumberShape, step: Fraction | None, place: str) -> list[Plan]:
    low = None if shape.low is None else ceil(shape.low) + (shape.excludes_low and shape.low.denominator == 1)
    high = None if shape.high is None else floor(shape.high) - (shape.excludes_high and shape.high.denominator == 1)
    if (low is not None and low > MAX_INT64) or (high is not None and high < -MAX_INT64):
        raise _error_at(shape, _bound_keyword(shape), place, "is beyond 64 bits")
    if low is not None and high is not None and low > high:
        return []
    if step is not None and step != 1:
        return _plan_multiples(shape, int(step), low, high, place)
    low_bound = None if low is None else Fraction(max(low, -MAX_INT64))
    return [NumberPlan(True, low_bound, None if high is None else Fraction(min(high, MAX_INT64)))]


def _plan_multiples(shape: NumberShape, step: int, low: int | None, high: int | None, place: str) -> list[Plan]:
    if low is None and high is None:
        if step > MAX_UNBOUNDED_MULTIPLE:
            problem = f"is above {MAX_UNBOUNDED_MULTIPLE}, which can be enforced only with both bounds"
            raise _error_at(shape, "multipleOf", place, problem)
        if _divides_power_of_ten(step):
            return [NumberPlan(True, divisor=step)]
        # For any other `step`, appended zeros may never yield a multiple, so the grammar could not end the number.
        low, high = -(MAX_ENUMERATED_VALUES // 2 - 1) * step, MAX_ENUMERATED_VALUES // 2 * step
    if low is None or high is None:
        problem = "can be enforced with both bounds or without bounds; give the other bound"
        raise _error_at(shape, "multipleOf", place, problem)
    first, last = -(-low // step), high // step
    if last - first >= MAX_ENUMERATED_VALUES:
        problem = f"between bounds leaves more than {MAX_ENUMERATED_VALUES} values"
        raise _error_at(shape, "multipleOf", place, problem)
    return [ConstantsPlan(tuple(index * step for index in range(first, last + 1)))] if first <= last else []


def _divides_power_of_ten(step: int) -> bool:
    """Whether appending enough zeros makes every integer a multiple of `step`."""
    return 10 ** step.bit_length() % step == 0


def _plan_strings(shape: StringShape, place: str, count_steps: CountSteps) -> list[Plan]:
    limits = shape.low, shape.patterns, shape.forbidden_patterns, shape.excluded, shape.format in FORMATS
    if not any(limits) and shape.high is None:
        return [StringPlan(None)]
    pattern = string_pattern(shape, place, count_steps)
    return [] if pattern is None else [StringPlan(pattern)]


def _plan_arrays(resolver: ShapeResolver, shape: ArrayShape, place: str) -> list[Plan]:
    high = shape.high
    if shape.rest == FALSE_SCHEMA:
        high = min_of_maxima(high, len(shape.prefix))
    if FALSE_SCHEMA in shape.prefix:
        high = min_of_maxima(high, shape.prefix.index(FALSE_SCHEMA))
    prefix, num_contained = _add_contained_items(shape, high, place)
    low = max(shape.low, num_contained)
    if high is not None and low > high:
        return []
    if low > MAX_ITEMS:
        raise _error_at(shape, "minItems", place, f"is above {MAX_ITEMS}, which is not supported")
    if high is not None:
        high = min(high, MAX_ITEMS)
        prefix = prefix[:high]
    if shape.unique and (high is None or high > 1):
        return [_plan_unique_items(resolver, shape, prefix, low, high, place)]
    rest = FALSE_SCHEMA if high is not None and high <= len(prefix) else shape.rest
    return [ArrayPlan(tuple(prefix), rest, low, high)]


def _add_contained_items(shape: ArrayShape, high: int | None, place: str) -> tuple[list[Conjunction], int]:
    """Returns (schemas of the first items, including `contains`; number of items that `contains` requires)."""
    prefix = list(shape.prefix)
    position = 0
    for contains in sorted(shape.contains, key=lambda contains: contains.item_schemas):
        if contains.high is not None and (high is None or high > contains.high):
            raise _error_at(shape, "contains", place, "can't be enforced with maxContains below maxItems")
        if contains.low > MAX_ENUMERATED_VALUES:
            problem = f"can't be enforced with minContains above {MAX_ENUMERATED_VALUES}"
            raise _error_at(shape, "contains", place, problem)
        prefix += [shape.rest] * (position + contains.low - len(prefix))
        for index in range(position, position + contains.low):
            prefix[index] = join_conjunctions(prefix[index], contains.item_schemas)
        position += contains.low
    return prefix, position


def _plan_unique_items(
    resolver: ShapeResolver, shape: ArrayShape, prefix: list[Conjunction], low: int, high: int | None, place: str
) -> Plan:
    """List all arrays of distinct enum values. If there are too many, list only arrays with items in enum order."""
    items = resolver.shapes(shape.rest)
    values = [item.value for item in items if isinstance(item, ConstantShape)]
    max_length = min(len(values) if high is None else high, len(values))
    if not prefix and len(values) == len(items) and len(values) <= MAX_UNIQUE_ENUM_VALUES:
        for arrange, count in ((permutations, perm), (combinations, comb)):
            lengths = range(low, max_length + 1)
            if sum(count(len(values), length) for length in lengths) <= MAX_ENUMERATED_VALUES:
                return ConstantsPlan(tuple(list(array) for length in lengths for array in arrange(values, length)))
    problem = f"can be enforced only if items are an enum that allows at most {MAX_ENUMERATED_VALUES} arrays"
    raise _error_at(shape, "uniqueItems", place, f"{problem}; leave it out")


def _plan_objects(resolver: ShapeResolver, shape: ObjectShape, place: str) -> list[Plan]:
    declared = dict(shape.properties)
    undeclared_required = tuple(
        (name, resolver.schemas_of_property(shape, name)) for name in shape.required if name not in declared
    )
    shape = replace(shape, properties=shape.properties + undeclared_required)
    named = [(name, resolver.schemas_of_property(shape, name), name in shape.required) for name, _ in shape.properties]
    if any(conjunction == FALSE_SCHEMA and is_required for _, conjunction, is_required in named):
        return []
    named = [prop for prop in named if prop[1] != FALSE_SCHEMA]
    rest = shape.rest
    if rest is None:
        # No keyword mentions undeclared properties. If properties are declared and suffice for `low`, allow only these.
        rest = FALSE_SCHEMA if (shape.properties or shape.patterns) and shape.low <= len(named) else ()
    name_patterns: list[tuple[str | None, Conjunction]] = []
    if shape.high is None or shape.high > 0:
        undeclared_with_name, name_patterns = plan_undeclared_properties(resolver, shape, rest, place)
        named += undeclared_with_name
    if shape.high is not None and (shape.high < len(shape.required) or (shape.high == 0 and shape.low)):
        return []
    low = shape.low if shape.low > sum(is_required for *_, is_required in named) else 0
    if low > 1 and name_patterns:
        problem = "above 1 can't be enforced with undeclared properties, because a name may occur twice"
        raise _error_at(shape, "minProperties", place, problem)
    high = shape.high
    if high is not None and not name_patterns and high >= len(named):
        high = None
    if high == 0:
        named, name_patterns, high = [], [], None
    return [ObjectPlan(tuple(named), tuple(name_patterns), low, high)]
