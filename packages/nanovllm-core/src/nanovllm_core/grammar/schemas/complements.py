"""Finds complements of shapes, for schemas with `not`, `oneOf` and `if`. A shape describes values of one JSON type."""

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

from nanovllm_core.grammar.schemas.document import SchemaError
from nanovllm_core.grammar.schemas.json_values import equality_key
from nanovllm_core.grammar.schemas.shape_resolver import ShapeResolver
from nanovllm_core.grammar.schemas.shapes import (
    ANY_VALUE_SHAPES,
    FALSE_SCHEMA,
    ArrayShape,
    ConstantShape,
    NumberShape,
    ObjectShape,
    Shape,
    StringShape,
)


def complement_shapes(resolver: ShapeResolver, shapes: Iterable[Shape], place: str) -> tuple[Shape, ...]:
    """The shapes of all values that `shapes` exclude. Raises SchemaError if shapes can't describe these values."""
    remaining: tuple[Shape, ...] = ANY_VALUE_SHAPES
    shapes = list(shapes)
    constants = {shape.key: shape for shape in shapes if isinstance(shape, ConstantShape)}
    if constants:
        remaining = resolver.intersect(remaining, _complement_of_constants(list(constants.values()), place), place)
    for shape in (shape for shape in shapes if not isinstance(shape, ConstantShape)):
        if shape.omits_allowed_values:
            raise SchemaError(place, "not", "can't be negated: it has oneOf or unevaluated keywords inside")
        allowed = [unrestricted for unrestricted in ANY_VALUE_SHAPES if type(unrestricted) is not type(shape)]
        allowed += [replace(other, comes_from_negation=True) for other in _complement_of_shape(resolver, shape, place)]
        remaining = resolver.intersect(remaining, allowed, place)
    return remaining


def _complement_of_constants(constants: list[ConstantShape], place: str) -> list[Shape]:
    keys = {shape.key for shape in constants}
    texts = frozenset(shape.value for shape in constants if isinstance(shape.value, str))
    values = [shape.value for shape in constants]
    numbers = frozenset(Fraction(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    if any(isinstance(shape.value, dict | list) for shape in constants):
        raise SchemaError(place, "not", "can't be negated: it has an array or object as a constant")
    other_constants = [
        shape for shape in ANY_VALUE_SHAPES if isinstance(shape, ConstantShape) and shape.key not in keys
    ]
    return [ObjectShape(), ArrayShape(), StringShape(excluded=texts), NumberShape(excluded=numbers), *other_constants]


def _complement_of_shape(resolver: ShapeResolver, shape: Shape, place: str) -> list[Shape]:
    match shape:
        case NumberShape():
            return _complement_of_number(shape, place)
        case StringShape():
            return _complement_of_string(shape)
        case ArrayShape():
            return _complement_of_array(resolver, shape, place)
        case ObjectShape():
            return _complement_of_object(resolver, shape, place)
        case _:
            raise AssertionError(shape)


def _complement_of_array(resolver: ShapeResolver, shape: ArrayShape, place: str) -> list[Shape]:
    has_count_bounds = any(contained.high is not None or contained.low != 1 for contained in shape.contains)
    if shape.unique or shape.rest or has_count_bounds:
        raise SchemaError(place, "not", "can't be negated: it has items, uniqueItems, minContains or maxContains")
    complement = _complement_of_counts(shape)
    complement += [ArrayShape(rest=resolver.negation(contained.item_schemas)) for contained in shape.contains]
    for index, item_schemas in enumerate(shape.prefix):
        if item_schemas:
            complement.append(ArrayShape(((),) * index + (resolver.negation(item_schemas),), low=index + 1))
    return complement


def _complement_of_object(resolver: ShapeResolver, shape: ObjectShape, place: str) -> list[Shape]:
    if shape.rest or shape.patterns or shape.name_schemas:
        keywords = "additionalProperties, patternProperties or propertyNames"
        raise SchemaError(place, "not", f"can't be negated: it has {keywords}")
    complement = _complement_of_counts(shape)
    complement += [ObjectShape(((name, FALSE_SCHEMA),)) for name in shape.required]
    for name, conjunction in shape.properties:
        if conjunction:
            complement.append(ObjectShape(((name, resolver.negation(conjunction)),), (name,)))
    return complement


def _complement_of_counts(shape: StringShape | ArrayShape | ObjectShape) -> list[Shape]:
    """The shapes of values with too few or too many characters, items or properties for `shape`."""
    shape_type = type(shape)
    complement: list[Shape] = [shape_type(high=shape.low - 1)] if shape.low else []
    return complement + ([] if shape.high is None else [shape_type(low=shape.high + 1)])


def _complement_of_number(shape: NumberShape, place: str) -> list[Shape]:
    if shape.integer and not (shape.low is None and shape.high is None and not shape.divisors):
        raise SchemaError(place, "not", "can't be negated: it has type integer and a bound or multipleOf")
    if shape.integer or shape.divisors:
        raise SchemaError(place, "not", "can't be negated: it has type integer or multipleOf")
    complement: list[Shape] = []
    if shape.low is not None:
        complement.append(NumberShape(high=shape.low, excludes_high=not shape.excludes_low))
    if shape.high is not None:
        complement.append(NumberShape(low=shape.high, excludes_low=not shape.excludes_high))
    return complement + [NumberShape(low=value, high=value) for value in shape.excluded]


def _complement_of_string(shape: StringShape) -> list[Shape]:
    complement = _complement_of_counts(shape)
    complement += [StringShape(forbidden_patterns=frozenset({pattern})) for pattern in sorted(shape.patterns)]
    complement += [StringShape(patterns=frozenset({pattern})) for pattern in sorted(shape.forbidden_patterns)]
    return complement + [ConstantShape(text, equality_key(text)) for text in sorted(shape.excluded)]
