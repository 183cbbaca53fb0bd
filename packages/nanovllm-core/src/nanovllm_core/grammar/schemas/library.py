"""The schemas of one document by number, and the shapes of any set of them. Schemas are read when first needed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

from nanovllm_core.grammar.schemas import regex, search
from nanovllm_core.grammar.schemas.document import Document, SchemaError, Spot
from nanovllm_core.grammar.schemas.json_values import JSON, key_of
from nanovllm_core.grammar.schemas.shapes import (
    ANY_VALUE,
    NEVER,
    Array,
    Conj,
    Constant,
    Number,
    Object,
    Shape,
    Text,
    conjunction,
    holds,
    item_at,
    meet_arrays,
    meet_numbers,
    meet_texts,
    stricter_high,
    with_origins,
)

# Steps of one conversion, of about 2 us each; usual schemas take less than a tenth. Without a limit, a few kilobytes
# of `oneOf`, whose work is quadratic, would take seconds.
MAX_STEPS = 400_000
# Most shapes of one set of schemas.
MAX_SHAPES = 4096
# Most pairs of shapes that one `meet` compares.
MAX_PAIRS = 200_000
# Levels of nested schemas that `possible` looks into.
MAX_LOOK = 6
# Most schemas in a chain in which reading each one requires the next.
MAX_CHAIN = 100


class LoopError(SchemaError):
    """A schema whose shapes depend on its own shapes."""


@dataclass(frozen=True, slots=True)
class Negation:
    """The values that are not valid against all of `conj`."""

    conj: Conj


class Library:
    """The schemas of a document, by number, and their shapes.

    reader: reads the keywords of one schema; it numbers the schemas that it finds, and asks for the shapes it needs.
    """

    def __init__(self, document: Document, reader: "Reader"):
        self.document = document
        self._reader = reader
        self._entries: list[Spot | Negation | None] = [None]
        self._numbers: dict[int | Negation, int] = {}
        self._shapes: dict[Conj, tuple[Shape, ...]] = {(): ANY_VALUE, (NEVER,): ()}
        self._reading: list[Conj] = []
        self._num_steps = 0

    def number(self, spot: Spot) -> Conj:
        """The schema at `spot` as a conjunction: () if it allows everything, (NEVER,) if nothing."""
        if spot.schema is True or spot.schema == {}:
            return ()
        if spot.schema is False:
            return (NEVER,)
        key = id(spot.schema)
        if key not in self._numbers:
            self._numbers[key] = len(self._entries)
            self._entries.append(spot)
        return (self._numbers[key],)

    def negation(self, conj: Conj) -> Conj:
        """The negation of `conj`, as a conjunction of one entry."""
        if not conj or conj == (NEVER,):
            return () if conj else (NEVER,)
        key = Negation(conj)
        if key not in self._numbers:
            self._numbers[key] = len(self._entries)
            self._entries.append(key)
        return (self._numbers[key],)

    def blame(self, conj: Conj) -> tuple[str, str]:
        """The place and the keyword that an error names when no value is valid against `conj`."""
        for index in conj:
            entry = self._entries[index]
            if isinstance(entry, Spot) and isinstance(entry.schema, dict):
                for keyword in ("enum", "const", "allOf", "oneOf", "anyOf", "not", "required", "type"):
                    if keyword in entry.schema:
                        return f"{entry.place}/{keyword}", keyword
        return self.place(conj), "schema"

    def count_steps(self, number: int = 1) -> None:
        """Count steps of the conversion. Raises SchemaError after `MAX_STEPS`."""
        self._num_steps += number
        if self._num_steps > MAX_STEPS:
            root = self.document.root.place
            raise SchemaError(root, "schema", f"takes more than {MAX_STEPS} steps to convert: use fewer alternatives")

    def place(self, conj: Conj) -> str:
        """The place of the first schema of `conj`."""
        for index in conj:
            entry = self._entries[index]
            while isinstance(entry, Negation):
                entry = self._entries[entry.conj[0]]
            if entry is not None:
                return entry.place
        return self.document.root.place

    def shapes(self, conj: Conj) -> tuple[Shape, ...]:
        """The shapes of the values that are valid against all of `conj`. Raises SchemaError."""
        if conj in self._shapes:
            return self._shapes[conj]
        if len(self._reading) > MAX_CHAIN:
            raise SchemaError(
                self.place(conj), "$ref", f"is in a chain of more than {MAX_CHAIN} schemas", is_invalid=True
            )
        if conj in self._reading:
            raise LoopError(self.place(conj), "$ref", "leads back to itself without end", is_invalid=True)
        self._reading.append(conj)
        try:
            common: tuple[Shape, ...] | None = None
            for index in conj:
                shapes = self._read(index) if len(conj) == 1 else self.shapes((index,))
                common = shapes if common is None else self.meet(common, shapes, self.place(conj))
        finally:
            self._reading.pop()
        self._shapes[conj] = common or ()
        return self._shapes[conj]

    def _read(self, index: int) -> tuple[Shape, ...]:
        entry = self._entries[index]
        if isinstance(entry, Negation):
            return self.complement(self.shapes(entry.conj), self.place(entry.conj))
        return () if entry is None else self._reader(self, entry)

    # Intersection.

    def meet(self, one: Sequence[Shape], other: Sequence[Shape], place: str) -> tuple[Shape, ...]:
        """The shapes of the values that are in both. Raises SchemaError, which names `place`, if there are too many."""
        self.count_steps()
        if one is ANY_VALUE:
            return tuple(other)
        if other is ANY_VALUE:
            return tuple(one)
        met: dict[Shape, None] = {}
        others = {shape.key for shape in other if isinstance(shape, Constant)}
        rest, other_rest = _variable(one), _variable(other)
        if len(one) * (len(other_rest) + 1) + len(rest) * len(other) > MAX_PAIRS:
            raise SchemaError(place, "anyOf", "has more combinations than are supported")
        for shape in one:
            if isinstance(shape, Constant):
                if shape.key in others or any(self._admits(s, shape.value) for s in other_rest):
                    met[shape] = None
                continue
            for second in other:
                if isinstance(second, Constant):
                    if self._admits(shape, second.value):
                        met[second] = None
                elif (common := self._meet(shape, second, place)) is not None:
                    met[with_origins(common, shape, second)] = None
        if len(met) > MAX_SHAPES:
            raise SchemaError(place, "anyOf", "has more combinations than are supported")
        return tuple(met)

    def _meet(self, one: Shape, other: Shape, place: str) -> Shape | None:
        self.count_steps()
        match one, other:
            case Number(), Number():
                return meet_numbers(one, other)
            case Text(), Text():
                return meet_texts(one, other)
            case Array(), Array():
                return meet_arrays(one, other)
            case Object(), Object():
                return self._meet_objects(one, other, place)
            case _:
                return None

    def _meet_objects(self, one: Object, other: Object, place: str) -> Object | None:
        low, high = max(one.low, other.low), stricter_high(one.high, other.high)
        if high is not None and low > high:
            return None
        names = dict.fromkeys([name for name, _ in one.properties] + [name for name, _ in other.properties])
        properties = tuple((name, conjunction(self.property(one, name), self.property(other, name))) for name in names)
        return Object(
            properties,
            tuple(dict.fromkeys(one.required + other.required)),
            self._meet_patterns(one, other, place),
            one.rest if other.rest is None else other.rest if one.rest is None else conjunction(one.rest, other.rest),
            conjunction(one.names, other.names),
            low,
            high,
        )

    def _meet_patterns(self, one: Object, other: Object, place: str) -> tuple[tuple[str, Conj], ...]:
        first, second = dict(one.patterns), dict(other.patterns)
        if first and second and first.keys() != second.keys() and (one.rest or other.rest):
            raise SchemaError(place, "patternProperties", "can't be joined with other patternProperties")
        met = {pattern: conjunction(conj, second.get(pattern, other.rest or ())) for pattern, conj in first.items()}
        met |= {pattern: conjunction(conj, one.rest or ()) for pattern, conj in second.items() if pattern not in first}
        return tuple(met.items())

    def property(self, shape: Object, name: str) -> Conj:
        """The schemas that apply to the property `name` in objects of this shape."""
        self.count_steps(1 + len(shape.properties) // 32)
        applied = [conj for known, conj in shape.properties if known == name]
        applied += [conj for pattern, conj in shape.patterns if self.is_found(pattern, name, shape)]
        if not applied:
            applied = [shape.rest or ()]
        if shape.names and not self.admits(shape.names, name):
            applied.append((NEVER,))
        joined: Conj = ()
        for conj in applied:
            joined = conjunction(joined, conj)
        return joined

    def is_found(self, pattern: str, text: str, shape: Shape) -> bool:
        """Whether `pattern` is found in `text`. Raises SchemaError if regex engines disagree about it."""
        in_all = search.is_found(regex.parse(pattern), text)
        if not in_all and search.is_found(regex.parse(pattern, any_engine=True), text):
            problem = f"{pattern!r} matches {text!r} in some regex engines only"
            raise SchemaError(self._pattern_place(shape), "pattern", problem)
        return in_all

    def _pattern_place(self, shape: Shape) -> str:
        return next((place for _, place in shape.places), self.document.root.place)

    # Membership.

    def admits(self, conj: Conj, value: JSON) -> bool:
        """Whether `value` is valid against all of `conj`."""
        return any(self._admits(shape, value) for shape in self.shapes(conj))

    def _admits(self, shape: Shape, value: JSON) -> bool:
        self.count_steps()
        match shape, value:
            case Constant(), _:
                return shape.key == key_of(value)
            case Number(), bool():
                return False
            case Number(), int() | float():
                return holds(shape, Fraction(value))
            case Text(), str():
                fits = shape.low <= len(value) and (shape.high is None or len(value) <= shape.high)
                return (
                    fits
                    and value not in shape.excluded
                    and all(self.is_found(pattern, value, shape) for pattern in shape.patterns)
                    and not any(self.is_found(pattern, value, shape) for pattern in shape.absent_patterns)
                )
            case Array(), list():
                return self._admits_items(shape, value)
            case Object(), dict():
                fits = shape.low <= len(value) and (shape.high is None or len(value) <= shape.high)
                return (
                    fits
                    and all(name in value for name in shape.required)
                    and all(self.admits(self.property(shape, name), inner) for name, inner in value.items())
                )
            case _:
                return False

    def _admits_items(self, shape: Array, value: list[JSON]) -> bool:
        if len(value) < shape.low or (shape.high is not None and len(value) > shape.high):
            return False
        if shape.unique and len({key_of(item) for item in value}) < len(value):
            return False
        for some in shape.contains:
            count = sum(self.admits(some.item, item) for item in value)
            if count < some.low or (some.high is not None and count > some.high):
                return False
        return all(self.admits(item_at(shape, index), item) for index, item in enumerate(value))

    # Complement.

    def complement(self, shapes: Iterable[Shape], place: str) -> tuple[Shape, ...]:
        """The shapes of the values that are in none of `shapes`. Raises SchemaError if shapes can't express them."""
        others: tuple[Shape, ...] = ANY_VALUE
        shapes = list(shapes)
        constants = {shape.key: shape for shape in shapes if isinstance(shape, Constant)}
        if constants:
            others = self.meet(others, self._without(list(constants.values()), place), place)
        for shape in _variable(shapes):
            if shape.narrowed:
                raise SchemaError(place, "not", "can't be negated: it has oneOf or unevaluated keywords inside")
            options = [free for free in ANY_VALUE if type(free) is not type(shape)]
            options += [replace(opposite, negated=True) for opposite in self._opposite(shape, place)]
            others = self.meet(others, options, place)
        return others

    def _without(self, constants: list[Constant], place: str) -> list[Shape]:
        keys = {shape.key for shape in constants}
        texts = frozenset(shape.value for shape in constants if isinstance(shape.value, str))
        values = [shape.value for shape in constants]
        numbers = frozenset(Fraction(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool))
        if any(isinstance(shape.value, dict | list) for shape in constants):
            raise SchemaError(place, "not", "can't be negated: it has an array or object as a constant")
        words = [free for free in ANY_VALUE if isinstance(free, Constant) and free.key not in keys]
        return [Object(), Array(), Text(excluded=texts), Number(excluded=numbers), *words]

    def _opposite(self, shape: Shape, place: str) -> list[Shape]:
        match shape:
            case Number():
                return _opposite_numbers(shape, place)
            case Text():
                return _opposite_texts(shape)
            case Array():
                return self._opposite_arrays(shape, place)
            case Object():
                return self._opposite_objects(shape, place)
            case _:
                raise AssertionError(shape)

    def _opposite_arrays(self, shape: Array, place: str) -> list[Shape]:
        if shape.unique or shape.rest or any(some.high is not None or some.low != 1 for some in shape.contains):
            raise SchemaError(place, "not", "can't be negated: it has items, uniqueItems or counted contains")
        opposite: list[Shape] = [Array(high=shape.low - 1)] if shape.low else []
        opposite += [] if shape.high is None else [Array(low=shape.high + 1)]
        opposite += [Array(rest=self.negation(some.item)) for some in shape.contains]
        for index, item in enumerate(shape.prefix):
            if item:
                opposite.append(Array(((),) * index + (self.negation(item),), low=index + 1))
        return opposite

    def _opposite_objects(self, shape: Object, place: str) -> list[Shape]:
        if shape.rest or shape.patterns or shape.names:
            keywords = "additionalProperties, patternProperties or propertyNames"
            raise SchemaError(place, "not", f"can't be negated: it has {keywords}")
        opposite: list[Shape] = [Object(high=shape.low - 1)] if shape.low else []
        opposite += [] if shape.high is None else [Object(low=shape.high + 1)]
        opposite += [Object(((name, (NEVER,)),)) for name in shape.required]
        for name, conj in shape.properties:
            if conj:
                opposite.append(Object(((name, self.negation(conj)),), (name,)))
        return opposite

    # Emptiness.

    def possible(self, shapes: Iterable[Shape], depth: int = MAX_LOOK) -> bool:
        """Whether the shapes may have a value. False is certain; True is not, because `depth` bounds the search."""
        return any(self._possible(shape, depth) for shape in shapes)

    def _possible(self, shape: Shape, depth: int) -> bool:
        self.count_steps()
        match shape:
            case Object() if depth:
                if shape.high is not None and shape.high < len(shape.required):
                    return False
                return all(self._inside(self.property(shape, name), depth) for name in shape.required)
            case Array() if depth:
                items = [item_at(shape, index) for index in range(min(shape.low, len(shape.prefix) + 1))]
                return all(self._inside(item, depth) for item in items)
            case Number(integer=True, low=Fraction() as low, high=Fraction() as high):
                least = -(-low.numerator // low.denominator) + (shape.open_low and low.denominator == 1)
                return least <= high.numerator // high.denominator - (shape.open_high and high.denominator == 1)
            case _:
                return True

    def _inside(self, conj: Conj, depth: int) -> bool:
        try:
            return self.possible(self.shapes(conj), depth - 1)
        except LoopError:
            return True  # The schema contains itself and is being read: assume that it has a value.


Reader: TypeAlias = Callable[[Library, Spot], tuple[Shape, ...]]


def _variable(shapes: Iterable[Shape]) -> list[Shape]:
    return [shape for shape in shapes if not isinstance(shape, Constant)]


def _opposite_numbers(shape: Number, place: str) -> list[Shape]:
    if shape.integer and not (shape.low is None and shape.high is None and not shape.multiples):
        raise SchemaError(place, "not", "can't be negated: it has bounds of an integer")
    if shape.integer or shape.multiples:
        raise SchemaError(place, "not", "can't be negated: it has type integer or multipleOf")
    opposite: list[Shape] = []
    if shape.low is not None:
        opposite.append(Number(high=shape.low, open_high=not shape.open_low))
    if shape.high is not None:
        opposite.append(Number(low=shape.high, open_low=not shape.open_high))
    return opposite + [Number(low=value, high=value) for value in shape.excluded]


def _opposite_texts(shape: Text) -> list[Shape]:
    opposite: list[Shape] = [Text(high=shape.low - 1)] if shape.low else []
    opposite += [] if shape.high is None else [Text(low=shape.high + 1)]
    opposite += [Text(absent_patterns=frozenset({pattern})) for pattern in shape.patterns]
    opposite += [Text(patterns=frozenset({pattern})) for pattern in shape.absent_patterns]
    return opposite + [Constant(text, key_of(text)) for text in shape.excluded]
