"""The schemas of one document by number, and the shapes of any set of them. Schemas are read when first needed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

from nanovllm_core.grammar.schemas import regex, search
from nanovllm_core.grammar.schemas.document import Document, LocatedSchema, SchemaError
from nanovllm_core.grammar.schemas.json_values import JSON, key_of
from nanovllm_core.grammar.schemas.shapes import (
    ANY_VALUE,
    NEVER,
    Array,
    Constant,
    Number,
    Object,
    SchemaSet,
    Shape,
    Text,
    conjunction,
    includes_number,
    intersect_arrays,
    intersect_numbers,
    intersect_strings,
    lower_maximum,
    schemas_of_item,
    with_origins_of,
)

# Steps of one conversion, of about 2 us each; usual schemas take less than a tenth. Without a limit, a few kilobytes
# of `oneOf`, whose work is quadratic, would take seconds.
MAX_STEPS = 400_000
# Most shapes of one set of schemas.
MAX_SHAPES = 4096
# Most pairs of shapes that one `intersect` compares.
MAX_PAIRS = 200_000
# Levels of nested schemas that `may_have_value` looks into.
MAX_EMPTINESS_DEPTH = 6
# Most schemas in a chain in which reading each one requires the next.
MAX_REFERENCE_CHAIN = 100


class LoopError(SchemaError):
    """A schema whose shapes depend on its own shapes."""


@dataclass(frozen=True, slots=True)
class Negation:
    """The values that are not valid against all of `schema_set`."""

    schema_set: SchemaSet


class ShapeResolver:
    """The schemas of a document, by number, and their shapes.

    reader: reads the keywords of one schema; it numbers the schemas that it finds, and asks for the shapes it needs.
    """

    def __init__(self, document: Document, reader: "KeywordReader"):
        self.document = document
        self._reader = reader
        self._entries: list[LocatedSchema | Negation | None] = [None]
        self._numbers_by_schema: dict[int | Negation, int] = {}
        self._shapes: dict[SchemaSet, tuple[Shape, ...]] = {(): ANY_VALUE, (NEVER,): ()}
        self._sets_in_progress: list[SchemaSet] = []
        self._num_steps = 0

    def schema_set_of(self, located: LocatedSchema) -> SchemaSet:
        """The schema at `located` as a conjunction: () if it allows everything, (NEVER,) if nothing."""
        if located.schema is True or located.schema == {}:
            return ()
        if located.schema is False:
            return (NEVER,)
        key = id(located.schema)
        if key not in self._numbers_by_schema:
            self._numbers_by_schema[key] = len(self._entries)
            self._entries.append(located)
        return (self._numbers_by_schema[key],)

    def negation(self, schema_set: SchemaSet) -> SchemaSet:
        """The negation of `schema_set`, as a conjunction of one entry."""
        if not schema_set or schema_set == (NEVER,):
            return () if schema_set else (NEVER,)
        key = Negation(schema_set)
        if key not in self._numbers_by_schema:
            self._numbers_by_schema[key] = len(self._entries)
            self._entries.append(key)
        return (self._numbers_by_schema[key],)

    def place_and_keyword(self, schema_set: SchemaSet) -> tuple[str, str]:
        """The place and the keyword that an error names when no value is valid against `schema_set`."""
        for index in schema_set:
            entry = self._entries[index]
            if isinstance(entry, LocatedSchema) and isinstance(entry.schema, dict):
                for keyword in ("enum", "const", "allOf", "oneOf", "anyOf", "not", "required", "type"):
                    if keyword in entry.schema:
                        return f"{entry.place}/{keyword}", keyword
        return self.place(schema_set), "schema"

    def count_steps(self, schema_set_of: int = 1) -> None:
        """Count steps of the conversion. Raises SchemaError after `MAX_STEPS`."""
        self._num_steps += schema_set_of
        if self._num_steps > MAX_STEPS:
            root = self.document.root.place
            raise SchemaError(root, "schema", f"takes more than {MAX_STEPS} steps to convert: use fewer alternatives")

    def place(self, schema_set: SchemaSet) -> str:
        """The place of the first schema of `schema_set`."""
        for index in schema_set:
            entry = self._entries[index]
            while isinstance(entry, Negation):
                entry = self._entries[entry.schema_set[0]]
            if entry is not None:
                return entry.place
        return self.document.root.place

    def shapes(self, schema_set: SchemaSet) -> tuple[Shape, ...]:
        """The shapes of the values that are valid against all of `schema_set`. Raises SchemaError."""
        if schema_set in self._shapes:
            return self._shapes[schema_set]
        if len(self._sets_in_progress) > MAX_REFERENCE_CHAIN:
            raise SchemaError(
                self.place(schema_set),
                "$ref",
                f"is in a chain of more than {MAX_REFERENCE_CHAIN} schemas",
                is_invalid=True,
            )
        if schema_set in self._sets_in_progress:
            raise LoopError(self.place(schema_set), "$ref", "leads back to itself without end", is_invalid=True)
        self._sets_in_progress.append(schema_set)
        try:
            intersection: tuple[Shape, ...] | None = None
            for index in schema_set:
                shapes = self._read(index) if len(schema_set) == 1 else self.shapes((index,))
                intersection = (
                    shapes if intersection is None else self.intersect(intersection, shapes, self.place(schema_set))
                )
        finally:
            self._sets_in_progress.pop()
        self._shapes[schema_set] = intersection or ()
        return self._shapes[schema_set]

    def _read(self, index: int) -> tuple[Shape, ...]:
        entry = self._entries[index]
        if isinstance(entry, Negation):
            return self.complement(self.shapes(entry.schema_set), self.place(entry.schema_set))
        return () if entry is None else self._reader(self, entry)

    # Intersection.

    def intersect(self, one: Sequence[Shape], other: Sequence[Shape], place: str) -> tuple[Shape, ...]:
        """The shapes of the values that are in both. Raises SchemaError, which names `place`, if there are too many."""
        self.count_steps()
        if one is ANY_VALUE:
            return tuple(other)
        if other is ANY_VALUE:
            return tuple(one)
        intersection: dict[Shape, None] = {}
        other_keys = {shape.key for shape in other if isinstance(shape, Constant)}
        rest, other_rest = _without_constants(one), _without_constants(other)
        if len(one) * (len(other_rest) + 1) + len(rest) * len(other) > MAX_PAIRS:
            raise SchemaError(place, "anyOf", "has more combinations than are supported")
        for shape in one:
            if isinstance(shape, Constant):
                if shape.key in other_keys or any(self._shape_admits(s, shape.value) for s in other_rest):
                    intersection[shape] = None
                continue
            for second in other:
                if isinstance(second, Constant):
                    if self._shape_admits(shape, second.value):
                        intersection[second] = None
                elif (overlap := self._intersect_shapes(shape, second, place)) is not None:
                    intersection[with_origins_of(overlap, shape, second)] = None
        if len(intersection) > MAX_SHAPES:
            raise SchemaError(place, "anyOf", "has more combinations than are supported")
        return tuple(intersection)

    def _intersect_shapes(self, one: Shape, other: Shape, place: str) -> Shape | None:
        self.count_steps()
        match one, other:
            case Number(), Number():
                return intersect_numbers(one, other)
            case Text(), Text():
                return intersect_strings(one, other)
            case Array(), Array():
                return intersect_arrays(one, other)
            case Object(), Object():
                return self._intersect_objects(one, other, place)
            case _:
                return None

    def _intersect_objects(self, one: Object, other: Object, place: str) -> Object | None:
        low, high = max(one.low, other.low), lower_maximum(one.high, other.high)
        if high is not None and low > high:
            return None
        names = dict.fromkeys([name for name, _ in one.properties] + [name for name, _ in other.properties])
        properties = tuple(
            (name, conjunction(self.schemas_of_property(one, name), self.schemas_of_property(other, name)))
            for name in names
        )
        return Object(
            properties,
            tuple(dict.fromkeys(one.required + other.required)),
            self._intersect_patterns(one, other, place),
            one.rest if other.rest is None else other.rest if one.rest is None else conjunction(one.rest, other.rest),
            conjunction(one.names, other.names),
            low,
            high,
        )

    def _intersect_patterns(self, one: Object, other: Object, place: str) -> tuple[tuple[str, SchemaSet], ...]:
        first, second = dict(one.patterns), dict(other.patterns)
        if first and second and first.keys() != second.keys() and (one.rest or other.rest):
            raise SchemaError(place, "patternProperties", "can't be joined with other patternProperties")
        intersection = {
            pattern: conjunction(schema_set, second.get(pattern, other.rest or ()))
            for pattern, schema_set in first.items()
        }
        intersection |= {
            pattern: conjunction(schema_set, one.rest or ())
            for pattern, schema_set in second.items()
            if pattern not in first
        }
        return tuple(intersection.items())

    def schemas_of_property(self, shape: Object, name: str) -> SchemaSet:
        """The schemas that apply to the property `name` in objects of this shape."""
        self.count_steps(1 + len(shape.properties) // 32)
        schema_sets = [schema_set for known, schema_set in shape.properties if known == name]
        schema_sets += [schema_set for pattern, schema_set in shape.patterns if self.is_found(pattern, name, shape)]
        if not schema_sets:
            schema_sets = [shape.rest or ()]
        if shape.names and not self.admits(shape.names, name):
            schema_sets.append((NEVER,))
        joined: SchemaSet = ()
        for schema_set in schema_sets:
            joined = conjunction(joined, schema_set)
        return joined

    def is_found(self, pattern: str, text: str, shape: Shape) -> bool:
        """Whether `pattern` is found in `text`. Raises SchemaError if regex engines disagree about it."""
        is_found_by_all = search.is_found(regex.parse(pattern), text)
        if not is_found_by_all and search.is_found(regex.parse(pattern, any_engine=True), text):
            problem = f"{pattern!r} matches {text!r} in some regex engines only"
            raise SchemaError(self._pattern_place(shape), "pattern", problem)
        return is_found_by_all

    def _pattern_place(self, shape: Shape) -> str:
        return next((place for _, place in shape.places), self.document.root.place)

    # Membership.

    def admits(self, schema_set: SchemaSet, value: JSON) -> bool:
        """Whether `value` is valid against all of `schema_set`."""
        return any(self._shape_admits(shape, value) for shape in self.shapes(schema_set))

    def _shape_admits(self, shape: Shape, value: JSON) -> bool:
        self.count_steps()
        match shape, value:
            case Constant(), _:
                return shape.key == key_of(value)
            case Number(), bool():
                return False
            case Number(), int() | float():
                return includes_number(shape, Fraction(value))
            case Text(), str():
                has_valid_size = shape.low <= len(value) and (shape.high is None or len(value) <= shape.high)
                return (
                    has_valid_size
                    and value not in shape.excluded
                    and all(self.is_found(pattern, value, shape) for pattern in shape.patterns)
                    and not any(self.is_found(pattern, value, shape) for pattern in shape.absent_patterns)
                )
            case Array(), list():
                return self._admits_items(shape, value)
            case Object(), dict():
                has_valid_size = shape.low <= len(value) and (shape.high is None or len(value) <= shape.high)
                return (
                    has_valid_size
                    and all(name in value for name in shape.required)
                    and all(self.admits(self.schemas_of_property(shape, name), inner) for name, inner in value.items())
                )
            case _:
                return False

    def _admits_items(self, shape: Array, value: list[JSON]) -> bool:
        if len(value) < shape.low or (shape.high is not None and len(value) > shape.high):
            return False
        if shape.unique and len({key_of(item) for item in value}) < len(value):
            return False
        for contained in shape.contains:
            count = sum(self.admits(contained.item, item) for item in value)
            if count < contained.low or (contained.high is not None and count > contained.high):
                return False
        return all(self.admits(schemas_of_item(shape, index), item) for index, item in enumerate(value))

    # Complement.

    def complement(self, shapes: Iterable[Shape], place: str) -> tuple[Shape, ...]:
        """The shapes of the values that are in none of `shapes`. Raises SchemaError if shapes can't express them."""
        remaining: tuple[Shape, ...] = ANY_VALUE
        shapes = list(shapes)
        constants = {shape.key: shape for shape in shapes if isinstance(shape, Constant)}
        if constants:
            remaining = self.intersect(remaining, self._complement_of_constants(list(constants.values()), place), place)
        for shape in _without_constants(shapes):
            if shape.is_narrowed:
                raise SchemaError(place, "not", "can't be negated: it has oneOf or unevaluated keywords inside")
            options = [unrestricted for unrestricted in ANY_VALUE if type(unrestricted) is not type(shape)]
            options += [replace(complement, is_negated=True) for complement in self._complement_of_shape(shape, place)]
            remaining = self.intersect(remaining, options, place)
        return remaining

    def _complement_of_constants(self, constants: list[Constant], place: str) -> list[Shape]:
        keys = {shape.key for shape in constants}
        texts = frozenset(shape.value for shape in constants if isinstance(shape.value, str))
        values = [shape.value for shape in constants]
        numbers = frozenset(Fraction(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool))
        if any(isinstance(shape.value, dict | list) for shape in constants):
            raise SchemaError(place, "not", "can't be negated: it has an array or object as a constant")
        literals = [
            unrestricted
            for unrestricted in ANY_VALUE
            if isinstance(unrestricted, Constant) and unrestricted.key not in keys
        ]
        return [Object(), Array(), Text(excluded=texts), Number(excluded=numbers), *literals]

    def _complement_of_shape(self, shape: Shape, place: str) -> list[Shape]:
        match shape:
            case Number():
                return _complement_of_number(shape, place)
            case Text():
                return _complement_of_string(shape)
            case Array():
                return self._complement_of_array(shape, place)
            case Object():
                return self._complement_of_object(shape, place)
            case _:
                raise AssertionError(shape)

    def _complement_of_array(self, shape: Array, place: str) -> list[Shape]:
        if (
            shape.unique
            or shape.rest
            or any(contained.high is not None or contained.low != 1 for contained in shape.contains)
        ):
            raise SchemaError(place, "not", "can't be negated: it has items, uniqueItems or counted contains")
        complement: list[Shape] = [Array(high=shape.low - 1)] if shape.low else []
        complement += [] if shape.high is None else [Array(low=shape.high + 1)]
        complement += [Array(rest=self.negation(contained.item)) for contained in shape.contains]
        for index, item in enumerate(shape.prefix):
            if item:
                complement.append(Array(((),) * index + (self.negation(item),), low=index + 1))
        return complement

    def _complement_of_object(self, shape: Object, place: str) -> list[Shape]:
        if shape.rest or shape.patterns or shape.names:
            keywords = "additionalProperties, patternProperties or propertyNames"
            raise SchemaError(place, "not", f"can't be negated: it has {keywords}")
        complement: list[Shape] = [Object(high=shape.low - 1)] if shape.low else []
        complement += [] if shape.high is None else [Object(low=shape.high + 1)]
        complement += [Object(((name, (NEVER,)),)) for name in shape.required]
        for name, schema_set in shape.properties:
            if schema_set:
                complement.append(Object(((name, self.negation(schema_set)),), (name,)))
        return complement

    # Emptiness.

    def may_have_value(self, shapes: Iterable[Shape], depth: int = MAX_EMPTINESS_DEPTH) -> bool:
        """Whether the shapes may have a value. False is certain; True is not, because `depth` bounds the search."""
        return any(self._shape_may_have_value(shape, depth) for shape in shapes)

    def _shape_may_have_value(self, shape: Shape, depth: int) -> bool:
        self.count_steps()
        match shape:
            case Object() if depth:
                if shape.high is not None and shape.high < len(shape.required):
                    return False
                return all(
                    self._set_may_have_value(self.schemas_of_property(shape, name), depth) for name in shape.required
                )
            case Array() if depth:
                items = [schemas_of_item(shape, index) for index in range(min(shape.low, len(shape.prefix) + 1))]
                return all(self._set_may_have_value(item, depth) for item in items)
            case Number(integer=True, low=Fraction() as low, high=Fraction() as high):
                least = -(-low.numerator // low.denominator) + (shape.excludes_low and low.denominator == 1)
                return least <= high.numerator // high.denominator - (shape.excludes_high and high.denominator == 1)
            case _:
                return True

    def _set_may_have_value(self, schema_set: SchemaSet, depth: int) -> bool:
        try:
            return self.may_have_value(self.shapes(schema_set), depth - 1)
        except LoopError:
            return True  # The schema contains itself and is being read: assume that it has a value.


KeywordReader: TypeAlias = Callable[[ShapeResolver, LocatedSchema], tuple[Shape, ...]]


def _without_constants(shapes: Iterable[Shape]) -> list[Shape]:
    return [shape for shape in shapes if not isinstance(shape, Constant)]


def _complement_of_number(shape: Number, place: str) -> list[Shape]:
    if shape.integer and not (shape.low is None and shape.high is None and not shape.multiples):
        raise SchemaError(place, "not", "can't be negated: it has bounds of an integer")
    if shape.integer or shape.multiples:
        raise SchemaError(place, "not", "can't be negated: it has type integer or multipleOf")
    complement: list[Shape] = []
    if shape.low is not None:
        complement.append(Number(high=shape.low, excludes_high=not shape.excludes_low))
    if shape.high is not None:
        complement.append(Number(low=shape.high, excludes_low=not shape.excludes_high))
    return complement + [Number(low=value, high=value) for value in shape.excluded]


def _complement_of_string(shape: Text) -> list[Shape]:
    complement: list[Shape] = [Text(high=shape.low - 1)] if shape.low else []
    complement += [] if shape.high is None else [Text(low=shape.high + 1)]
    complement += [Text(absent_patterns=frozenset({pattern})) for pattern in shape.patterns]
    complement += [Text(patterns=frozenset({pattern})) for pattern in shape.absent_patterns]
    return complement + [Constant(text, key_of(text)) for text in shape.excluded]
