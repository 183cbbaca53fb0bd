"""Finds the shapes of the values that are valid against several schemas. A shape describes values of one JSON type."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

from nanovllm_core.grammar.schemas import regex, search
from nanovllm_core.grammar.schemas.document import Document, LocatedSchema, SchemaError
from nanovllm_core.grammar.schemas.json_values import JSON, equality_key
from nanovllm_core.grammar.schemas.shapes import (
    ANY_OBJECT,
    ANY_VALUE_SHAPES,
    FALSE_SCHEMA,
    ArrayShape,
    Conjunction,
    ConstantShape,
    NumberShape,
    ObjectShape,
    Shape,
    StringShape,
    allows_count,
    includes_number,
    intersect_arrays,
    intersect_numbers,
    intersect_strings,
    join_conjunctions,
    min_of_maxima,
    schemas_of_item,
    with_origins_of,
)

# Maximum number of steps, such as intersections of two shapes, in one schema's conversion. A step takes about 2.5 us.
# Published schemas take less than 50,000 steps. Without a limit, a few kilobytes of `oneOf` would take seconds.
MAX_STEPS = 120_000
# Maximum number of shapes of one conjunction.
MAX_SHAPES = 4096
# Maximum number of pairs of shapes that one call of `intersect` compares.
MAX_PAIRS = 200_000
# Maximum depth of nested schemas that `may_have_value` examines.
MAX_EMPTINESS_DEPTH = 6
# Maximum length of a chain of schemas in which the shapes of each schema depend on the next schema.
MAX_REFERENCE_CHAIN = 100


class LoopError(SchemaError):
    """The shapes of a schema depend on themselves."""


@dataclass(frozen=True, slots=True)
class Negation:
    """Allows the values that at least one schema of `conjunction` excludes."""

    conjunction: Conjunction


class ShapeResolver:
    """Finds and caches the shapes of each conjunction.

    A conjunction is a tuple of numbers. Each schema and each negation gets its number at its first use.
    """

    def __init__(self, document: Document, reader: "SchemaReader"):
        self.document = document
        self._reader = reader
        # The index of an entry is its number. Number 0 is the schema `false`.
        self._entries: list[LocatedSchema | Negation] = [replace(document.root, schema=False)]
        # The key of a schema is its `id`, because dicts are not hashable.
        self._entry_numbers: dict[int | Negation, int] = {}
        self._shapes: dict[Conjunction, tuple[Shape, ...]] = {(): ANY_VALUE_SHAPES, FALSE_SCHEMA: ()}
        self._conjunctions_in_progress: list[Conjunction] = []
        self._num_steps = 0
        # Counts object plans with declared and undeclared properties, for the module `undeclared_properties`.
        self.num_open_objects = 0
        # Maps the `id` of a shape to (shape, schemas by property name). The shape stays alive, so its `id` is unique.
        self._properties_by_shape_id: dict[int, tuple[ObjectShape, dict[str, Conjunction]]] = {}

    def conjunction_of(self, located: LocatedSchema) -> Conjunction:
        """The conjunction that consists of the schema `located`; () for the schemas `true` and {}."""
        if located.schema is True or located.schema == {}:
            return ()
        if located.schema is False:
            return FALSE_SCHEMA
        return self._number_entry(id(located.schema), located)

    def negation(self, conjunction: Conjunction) -> Conjunction:
        """A conjunction of one negation, which allows the values that `conjunction` excludes."""
        if not conjunction or conjunction == FALSE_SCHEMA:
            return () if conjunction else FALSE_SCHEMA
        negation = Negation(conjunction)
        return self._number_entry(negation, negation)

    def _number_entry(self, key: int | Negation, entry: LocatedSchema | Negation) -> Conjunction:
        if key not in self._entry_numbers:
            self._entry_numbers[key] = len(self._entries)
            self._entries.append(entry)
        return (self._entry_numbers[key],)

    def place_and_keyword(self, conjunction: Conjunction) -> tuple[str, str]:
        """Returns (place, keyword) to name in the error message of a conjunction that allows no value."""
        for index in conjunction:
            entry = self._entries[index]
            if isinstance(entry, LocatedSchema) and isinstance(entry.schema, dict):
                for keyword in ("enum", "const", "allOf", "oneOf", "anyOf", "not", "required", "type"):
                    if keyword in entry.schema:
                        return f"{entry.place}/{keyword}", keyword
        return self.place(conjunction), "schema"

    def count_steps(self, num_steps: int = 1) -> None:
        """Add to the steps of the conversion. Raises SchemaError if there are more than `MAX_STEPS`."""
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            root = self.document.root.place
            raise SchemaError(root, "schema", f"takes more than {MAX_STEPS} steps to convert: use fewer alternatives")

    def place(self, conjunction: Conjunction) -> str:
        """JSON pointer to the first schema of `conjunction`."""
        entry = self._entries[conjunction[0]] if conjunction else self.document.root
        while isinstance(entry, Negation):
            entry = self._entries[entry.conjunction[0]]
        return entry.place

    def shapes(self, conjunction: Conjunction) -> tuple[Shape, ...]:
        """The shapes of the values that are valid against all schemas of `conjunction`. Raises SchemaError."""
        if conjunction in self._shapes:
            return self._shapes[conjunction]
        if len(self._conjunctions_in_progress) > MAX_REFERENCE_CHAIN:
            problem = f"is in a chain of more than {MAX_REFERENCE_CHAIN} schemas"
            raise SchemaError(self.place(conjunction), "$ref", problem, is_invalid=True)
        if conjunction in self._conjunctions_in_progress:
            raise LoopError(self.place(conjunction), "$ref", "leads back to itself without end", is_invalid=True)
        self._conjunctions_in_progress.append(conjunction)
        try:
            first_index, *other_indices = conjunction
            if not other_indices:
                shapes = self._reader(self, self._entries[first_index])
            else:
                shapes = self.shapes((first_index,))
                for index in other_indices:
                    shapes = self.intersect(shapes, self.shapes((index,)), self.place(conjunction))
        finally:
            self._conjunctions_in_progress.pop()
        self._shapes[conjunction] = shapes
        return shapes

    def intersect(self, first: Sequence[Shape], second: Sequence[Shape], place: str) -> tuple[Shape, ...]:
        """The shapes of the values in both `first` and `second`. Raises SchemaError at `place` for too many shapes."""
        self.count_steps()
        if first is ANY_VALUE_SHAPES:
            return tuple(second)
        if second is ANY_VALUE_SHAPES:
            return tuple(first)
        intersection: dict[Shape, None] = {}
        second_keys = {shape.key for shape in second if isinstance(shape, ConstantShape)}
        first_general, second_general = _without_constants(first), _without_constants(second)
        if len(first) * (len(second_general) + 1) + len(first_general) * len(second) > MAX_PAIRS:
            raise SchemaError(place, "anyOf", "has more combinations than are supported")
        for shape in first:
            if isinstance(shape, ConstantShape):
                if shape.key in second_keys or any(
                    self._shape_admits(general, shape.value) for general in second_general
                ):
                    intersection[shape] = None
                continue
            for other_shape in second:
                if isinstance(other_shape, ConstantShape):
                    if self._shape_admits(shape, other_shape.value):
                        intersection[other_shape] = None
                elif (overlap := self._intersect_shapes(shape, other_shape, place)) is not None:
                    intersection[with_origins_of(overlap, shape, other_shape)] = None
        if len(intersection) > MAX_SHAPES:
            raise SchemaError(place, "anyOf", "has more combinations than are supported")
        return tuple(intersection)

    def _intersect_shapes(self, first: Shape, second: Shape, place: str) -> Shape | None:
        self.count_steps()
        match first, second:
            case NumberShape(), NumberShape():
                return intersect_numbers(first, second)
            case StringShape(), StringShape():
                return intersect_strings(first, second)
            case ArrayShape(), ArrayShape():
                return intersect_arrays(first, second)
            case ObjectShape(), ObjectShape():
                return self._intersect_objects(first, second, place)
            case _:
                return None

    def _intersect_objects(self, first: ObjectShape, second: ObjectShape, place: str) -> ObjectShape | None:
        if first is ANY_OBJECT:
            return second
        low, high = max(first.low, second.low), min_of_maxima(first.high, second.high)
        if high is not None and low > high:
            return None
        names = dict.fromkeys([name for name, _ in first.properties] + [name for name, _ in second.properties])
        properties = tuple(
            (name, join_conjunctions(self.schemas_of_property(first, name), self.schemas_of_property(second, name)))
            for name in names
        )
        return ObjectShape(
            properties,
            tuple(dict.fromkeys(first.required + second.required)),
            self._intersect_patterns(first, second, place),
            first.rest
            if second.rest is None
            else second.rest
            if first.rest is None
            else join_conjunctions(first.rest, second.rest),
            join_conjunctions(first.name_schemas, second.name_schemas),
            low,
            high,
        )

    def _intersect_patterns(
        self, first: ObjectShape, second: ObjectShape, place: str
    ) -> tuple[tuple[str, Conjunction], ...]:
        first_patterns, second_patterns = dict(first.patterns), dict(second.patterns)
        if (
            first_patterns
            and second_patterns
            and first_patterns.keys() != second_patterns.keys()
            and (first.rest or second.rest)
        ):
            raise SchemaError(
                place, "patternProperties", "can't be combined with the patternProperties of another schema"
            )
        return tuple(
            (
                pattern,
                join_conjunctions(
                    first_patterns.get(pattern, first.rest or ()), second_patterns.get(pattern, second.rest or ())
                ),
            )
            for pattern in first_patterns | second_patterns
        )

    def schemas_of_property(self, shape: ObjectShape, name: str) -> Conjunction:
        """The schemas against which the property `name` must be valid in objects of `shape`."""
        self.count_steps()
        properties = self._properties_by_name(shape)
        if not shape.patterns and not shape.name_schemas:
            return properties.get(name, shape.rest or ())
        conjunctions = [properties[name]] if name in properties else []
        conjunctions += [conjunction for pattern, conjunction in shape.patterns if self.is_found(pattern, name, shape)]
        if not conjunctions:
            conjunctions = [shape.rest or ()]
        if shape.name_schemas and not self.admits(shape.name_schemas, name):
            conjunctions.append(FALSE_SCHEMA)
        joined: Conjunction = ()
        for conjunction in conjunctions:
            joined = join_conjunctions(joined, conjunction)
        return joined

    def _properties_by_name(self, shape: ObjectShape) -> dict[str, Conjunction]:
        if id(shape) not in self._properties_by_shape_id:
            self.count_steps(1 + len(shape.properties) // 32)
            self._properties_by_shape_id[id(shape)] = shape, dict(shape.properties)
        return self._properties_by_shape_id[id(shape)][1]

    def is_found(self, pattern: str, text: str, shape: Shape) -> bool:
        """Whether a search for `pattern` in `text` succeeds. Raises SchemaError if regex engines disagree."""
        is_found_by_all = search.is_found(regex.parse(pattern), text, self.count_steps)
        if not is_found_by_all and search.is_found(regex.parse(pattern, is_permissive=True), text, self.count_steps):
            problem = f"{pattern!r} matches {text!r} in some regex engines only"
            place = next((place for _, place in shape.places), self.document.root.place)
            raise SchemaError(place, "pattern", problem)
        return is_found_by_all

    def admits(self, conjunction: Conjunction, value: JSON) -> bool:
        """Whether `value` is valid against all schemas of `conjunction`."""
        return any(self._shape_admits(shape, value) for shape in self.shapes(conjunction))

    def _shape_admits(self, shape: Shape, value: JSON) -> bool:
        self.count_steps()
        match shape, value:
            case ConstantShape(), _:
                return shape.key == equality_key(value)
            case NumberShape(), bool():
                return False
            case NumberShape(), int() | float():
                return includes_number(shape, Fraction(value))
            case StringShape(), str():
                return (
                    allows_count(shape, len(value))
                    and value not in shape.excluded
                    and all(self.is_found(pattern, value, shape) for pattern in sorted(shape.patterns))
                    and not any(self.is_found(pattern, value, shape) for pattern in sorted(shape.forbidden_patterns))
                )
            case ArrayShape(), list():
                return self._admits_items(shape, value)
            case ObjectShape(), dict():
                return (
                    allows_count(shape, len(value))
                    and all(name in value for name in shape.required)
                    and all(self.admits(self.schemas_of_property(shape, name), inner) for name, inner in value.items())
                )
            case _:
                return False

    def _admits_items(self, shape: ArrayShape, value: list[JSON]) -> bool:
        if not allows_count(shape, len(value)):
            return False
        if shape.unique and len({equality_key(item) for item in value}) < len(value):
            return False
        for contained in shape.contains:
            count = sum(self.admits(contained.item_schemas, item) for item in value)
            if count < contained.low or (contained.high is not None and count > contained.high):
                return False
        return all(self.admits(schemas_of_item(shape, index), item) for index, item in enumerate(value))

    def may_have_value(self, shapes: Iterable[Shape], depth: int = MAX_EMPTINESS_DEPTH) -> bool:
        """Returns False only if the shapes allow no value. True may be wrong, because `depth` bounds the search."""
        return any(self._shape_may_have_value(shape, depth) for shape in shapes)

    def _shape_may_have_value(self, shape: Shape, depth: int) -> bool:
        self.count_steps()
        match shape:
            case ObjectShape() if depth:
                if shape.high is not None and shape.high < len(shape.required):
                    return False
                return all(
                    self._conjunction_may_have_value(self.schemas_of_property(shape, name), depth)
                    for name in shape.required
                )
            case ArrayShape() if depth:
                items = [schemas_of_item(shape, index) for index in range(min(shape.low, len(shape.prefix) + 1))]
                return all(self._conjunction_may_have_value(item, depth) for item in items)
            case NumberShape(integer=True, low=Fraction() as low, high=Fraction() as high):
                smallest = -(-low.numerator // low.denominator) + (shape.excludes_low and low.denominator == 1)
                return smallest <= high.numerator // high.denominator - (shape.excludes_high and high.denominator == 1)
            case _:
                return True

    def _conjunction_may_have_value(self, conjunction: Conjunction, depth: int) -> bool:
        try:
            return self.may_have_value(self.shapes(conjunction), depth - 1)
        except LoopError:
            return True  # The schema contains itself: assume that it has a value.


SchemaReader: TypeAlias = Callable[[ShapeResolver, LocatedSchema | Negation], tuple[Shape, ...]]


def _without_constants(shapes: Iterable[Shape]) -> list[Shape]:
    return [shape for shape in shapes if not isinstance(shape, ConstantShape)]
