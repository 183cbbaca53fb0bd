"""Reads the keywords of one schema and returns the shapes of the values that it allows."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from nanovllm_core.grammar.schemas import regex
from nanovllm_core.grammar.schemas.document import SchemaError, Spot, escaped
from nanovllm_core.grammar.schemas.json_values import JSON, key_of, show
from nanovllm_core.grammar.schemas.library import Library
from nanovllm_core.grammar.schemas.shapes import (
    ANY_VALUE,
    NEVER,
    Array,
    Conj,
    Constant,
    Contains,
    Number,
    Object,
    Places,
    Shape,
    Text,
)

MAX_COUNT = 2**31 - 1
MAX_NAMES = 2_000
MAX_CONSTANTS = 2_000
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
TEXTS = ("minLength", "maxLength", "pattern", "format")
ARRAYS = ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains")
OBJECTS = (
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties"),
)
TYPES: dict[str, tuple[Shape, ...]] = {
    "object": (Object(),),
    "array": (Array(),),
    "string": (Text(),),
    "number": (Number(),),
    "integer": (Number(integer=True),),
    "boolean": (Constant(True, "true"), Constant(False, "false")),
    "null": (Constant(None, "null"),),
}


def read(library: Library, spot: Spot) -> tuple[Shape, ...]:
    """The shapes of the values that are valid against the schema at `spot`. Raises SchemaError."""
    return _Reader(library, spot).read()


class _Reader:
    """Reads one schema, keyword by keyword."""

    def __init__(self, library: Library, spot: Spot):
        if not isinstance(spot.schema, dict):
            raise SchemaError(
                spot.place, "schema", f"must be an object or a boolean, not {show(spot.schema)}", is_invalid=True
            )
        self.library = library
        self.spot = spot
        self.schema = spot.schema

    def read(self) -> tuple[Shape, ...]:
        shapes = self.of_types()
        shapes = self.constants(shapes)
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if keyword in self.schema:
                shapes = self.meet(shapes, self.library.shapes(self.reference(keyword)))
        for conj in self.several("allOf"):
            shapes = self.meet(shapes, self.library.shapes(conj))
        shapes = self.dependent(shapes)
        if "anyOf" in self.schema:
            options = [shape for conj in self.several("anyOf") for shape in self.library.shapes(conj)]
            shapes = self.meet(shapes, list(dict.fromkeys(options)))
        if "oneOf" in self.schema:
            shapes = self.one_of(shapes)
        if "not" in self.schema:
            conj = self.one("not")
            shapes = self.meet(shapes, self.complement(conj, "not"))
        shapes = self.conditional(shapes)
        return self.unevaluated(shapes)

    # Places, errors and typed access to keywords.

    def place(self, keyword: str) -> str:
        return f"{self.spot.place}/{escaped(keyword)}"

    def wrong(self, keyword: str, expected: str) -> SchemaError:
        problem = f"must be {expected}, not {show(self.schema[keyword])}"
        return SchemaError(self.place(keyword), keyword, problem, is_invalid=True)

    def refused(self, keyword: str, problem: str) -> SchemaError:
        return SchemaError(self.place(keyword), keyword, problem)

    def child(self, value: JSON, *path: str) -> Conj:
        place = "/".join([self.spot.place, *(escaped(part) for part in path)])
        if not isinstance(value, dict | bool):
            raise SchemaError(place, path[0], f"must be a schema, not {show(value)}", is_invalid=True)
        return self.library.number(Spot(value, place, self.library.document.base(self.spot)))

    def one(self, keyword: str) -> Conj:
        return self.child(self.schema[keyword], keyword)

    def several(self, keyword: str) -> list[Conj]:
        if keyword not in self.schema:
            return []
        values = self.schema[keyword]
        if not isinstance(values, list) or not values:
            raise self.wrong(keyword, "a non-empty array of schemas")
        return [self.child(value, keyword, str(index)) for index, value in enumerate(values)]

    def named(self, keyword: str) -> dict[str, JSON]:
        values = self.schema.get(keyword, {})
        if not isinstance(values, dict):
            raise self.wrong(keyword, "an object")
        if len(values) > MAX_NAMES:
            raise self.refused(keyword, f"has more than {MAX_NAMES} names")
        return values

    def strings(self, value: JSON, keyword: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value) or len(value) > MAX_NAMES:
            raise self.wrong(keyword, f"an array of at most {MAX_NAMES} strings")
        return tuple(dict.fromkeys(item for item in value if isinstance(item, str)))

    def count(self, keyword: str) -> int | None:
        value = self.schema.get(keyword)
        if value is None and keyword not in self.schema:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < 0:
            raise self.wrong(keyword, "an integer of at least 0")
        return min(value, MAX_COUNT)

    def number(self, keyword: str) -> Fraction | None:
        if keyword not in self.schema:
            return None
        value = self.schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(keyword, "a number")
        return Fraction(value)

    def places(self, keywords: Sequence[str]) -> Places:
        return tuple((keyword, self.place(keyword)) for keyword in keywords if keyword in self.schema)

    def meet(self, one: tuple[Shape, ...], other: Sequence[Shape]) -> tuple[Shape, ...]:
        return self.library.meet(one, other, self.spot.place)

    def complement(self, conj: Conj, keyword: str) -> tuple[Shape, ...]:
        try:
            return self.library.complement(self.library.shapes(conj), self.place(keyword))
        except SchemaError as error:
            if error.keyword != "not":
                raise
            problem = f"can't be enforced, because a schema in it {error.problem}"
            raise self.refused(keyword, problem) from error

    # Keywords.

    def of_types(self) -> tuple[Shape, ...]:
        kinds = self.schema.get("type")
        shapes: tuple[Shape, ...] = ANY_VALUE
        if "type" in self.schema:
            named = kinds if isinstance(kinds, list) and kinds else [kinds]
            if not all(isinstance(kind, str) and kind in TYPES for kind in named):
                raise self.wrong("type", "one or several of " + ", ".join(TYPES))
            if "number" in named:
                named = [kind for kind in named if kind != "integer"]
            shapes = tuple(dict.fromkeys(shape for kind in named for shape in TYPES[str(kind)]))
        readers = ((NUMBERS, self.numbers), (TEXTS, self.texts), (ARRAYS, self.arrays), (OBJECTS, self.objects))
        limits: list[Shape] = list(ANY_VALUE)
        for keywords, reader in readers:
            if not any(keyword in self.schema for keyword in keywords):
                continue
            shape = reader()
            limits = [limit for limit in limits if shape is None or type(limit) is not type(shape)]
            limits += [] if shape is None else [replace(shape, places=self.places((*keywords, "minContains")))]
        return shapes if limits == list(ANY_VALUE) else self.meet(shapes, limits)

    def constants(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        for keyword in ("enum", "const"):
            if keyword not in self.schema:
                continue
            values = [self.schema["const"]] if keyword == "const" else self.schema["enum"]
            if not isinstance(values, list):
                raise self.wrong(keyword, "an array")
            if len(values) > MAX_CONSTANTS:
                raise self.refused(keyword, f"has more than {MAX_CONSTANTS} values")
            places = self.places((keyword,))
            shapes = self.meet(shapes, [Constant(value, key_of(value), places=places) for value in values])
        return shapes

    def numbers(self) -> Shape | None:
        low, high = self.number("minimum"), self.number("maximum")
        open_low = open_high = False
        # Up to draft 4, a boolean says whether the range excludes its bound.
        if isinstance(self.schema.get("exclusiveMinimum"), bool):
            open_low = self.schema["exclusiveMinimum"] is True and low is not None
        elif (bound := self.number("exclusiveMinimum")) is not None and (low is None or bound >= low):
            low, open_low = bound, True
        if isinstance(self.schema.get("exclusiveMaximum"), bool):
            open_high = self.schema["exclusiveMaximum"] is True and high is not None
        elif (bound := self.number("exclusiveMaximum")) is not None and (high is None or bound <= high):
            high, open_high = bound, True
        step = self.number("multipleOf")
        if step is not None and step <= 0:
            raise self.wrong("multipleOf", "a number above 0")
        if low is not None and high is not None and (low > high or (low == high and (open_low or open_high))):
            raise self.nothing(next(k for k in NUMBERS if k in self.schema))
        steps = frozenset[Fraction]() if step is None else frozenset({step})
        return Number(False, low, high, open_low, open_high, steps)

    def nothing(self, keyword: str) -> SchemaError:
        return self.refused(keyword, "and its counterpart allow nothing")

    def texts(self) -> Shape | None:
        low, high = self.count("minLength") or 0, self.count("maxLength")
        if high is not None and low > high:
            raise self.nothing("maxLength")
        patterns = frozenset[str]()
        if "pattern" in self.schema:
            patterns = frozenset({self.pattern(self.schema["pattern"], "pattern")})
        name = self.schema.get("format")
        if name is not None and not isinstance(name, str):
            raise self.wrong("format", "a string")
        return Text(low, high, patterns, format=name)

    def pattern(self, text: JSON, keyword: str) -> str:
        if not isinstance(text, str):
            raise self.wrong(keyword, "a string")
        try:
            regex.parse(text)
        except regex.RegexError as error:
            raise self.refused(keyword, f"has a pattern that can't be enforced: {error} ({show(text)})") from error
        return text

    def arrays(self) -> Shape | None:
        low, high = self.count("minItems") or 0, self.count("maxItems")
        if high is not None and low > high:
            raise self.nothing("maxItems")
        unique = self.schema.get("uniqueItems", False)
        if not isinstance(unique, bool):
            raise self.wrong("uniqueItems", "true or false")
        prefix: list[Conj] = []
        rest, rest_is_declared = (), False
        if isinstance(self.schema.get("items"), list):  # Drafts up to 2019-09.
            prefix = self.several("items") if self.schema["items"] else []
            if "additionalItems" in self.schema:
                rest, rest_is_declared = self.one("additionalItems"), True
        elif "items" in self.schema:
            rest, rest_is_declared = self.one("items"), True
        if "prefixItems" in self.schema:
            prefix = self.several("prefixItems")
        contains = frozenset[Contains]()
        if "contains" in self.schema:
            low_count = self.count("minContains")
            bounds = Contains(self.one("contains"), 1 if low_count is None else low_count, self.count("maxContains"))
            contains = frozenset({bounds}) if bounds.low or bounds.high is not None else contains
        return Array(tuple(prefix), rest, low, high, unique, contains, rest_is_declared)

    def objects(self) -> Shape | None:
        low, high = self.count("minProperties") or 0, self.count("maxProperties")
        if high is not None and low > high:
            raise self.nothing("maxProperties")
        properties = {name: self.child(value, "properties", name) for name, value in self.named("properties").items()}
        patterns: dict[str, Conj] = {}
        for text, value in self.named("patternProperties").items():
            try:
                regex.parse(text)
            except regex.RegexError as error:
                problem = f"has a pattern that can't be enforced: {error} ({show(text)})"
                raise self.refused("patternProperties", problem) from error
            patterns[text] = self.child(value, "patternProperties", text)
        required = self.strings(self.schema["required"], "required") if "required" in self.schema else ()
        rest = self.one("additionalProperties") if "additionalProperties" in self.schema else None
        names = self.one("propertyNames") if "propertyNames" in self.schema else ()
        return Object(tuple(properties.items()), required, tuple(patterns.items()), rest, names, low, high)

    def reference(self, keyword: str) -> Conj:
        value = self.schema[keyword]
        document = self.library.document
        if keyword == "$dynamicRef":
            return self.library.number(document.dynamic(self.spot, value))
        if keyword == "$recursiveRef":
            raise self.refused(keyword, "depends on the schemas that lead to it, which can't be enforced; use $ref")
        return self.library.number(document.refer(self.spot, value, keyword))

    def dependent(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, value in self.named(keyword).items():
                absent = Object(((name, (NEVER,)),))
                if isinstance(value, list):
                    needed = self.strings(value, keyword)
                    present: list[Shape] = [Object(required=(name, *needed))]
                else:
                    conj = self.child(value, keyword, name)
                    present = list(self.meet((Object(required=(name,)),), self.library.shapes(conj)))
                others = [free for free in ANY_VALUE if not isinstance(free, Object)]
                shapes = self.meet(shapes, [*others, absent, *present])
        return shapes

    def one_of(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        options = [(conj, self.library.shapes(conj)) for conj in self.several("oneOf")]
        found: dict[Shape, None] = {}
        for index, (_, option) in enumerate(options):
            for shape in self.meet(shapes, option):
                exclusive: tuple[Shape, ...] = (shape,)
                for other, (conj, second) in enumerate(options):
                    if other != index and self.overlap(exclusive, second):
                        closed = tuple(_closed(s) for s in exclusive)
                        if self.overlap(closed, second):
                            exclusive = self.meet(exclusive, self.complement(conj, "oneOf"))
                        else:
                            exclusive = closed
                found.update(dict.fromkeys(exclusive))
        return tuple(found)

    def overlap(self, one: Sequence[Shape], other: Sequence[Shape]) -> bool:
        return self.library.possible(self.library.meet(one, other, self.place("oneOf")))

    def conditional(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        if "if" not in self.schema or not ("then" in self.schema or "else" in self.schema):
            return shapes
        condition = self.one("if")
        met = self.library.shapes(condition)
        if "then" in self.schema:
            met = self.meet(met, self.library.shapes(self.one("then")))
        unmet = self.complement(condition, "if")
        if "else" in self.schema:
            unmet = self.meet(unmet, self.library.shapes(self.one("else")))
        return self.meet(shapes, list(dict.fromkeys([*met, *unmet])))

    def unevaluated(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        for keyword, kind in (("unevaluatedProperties", Object), ("unevaluatedItems", Array)):
            if keyword not in self.schema:
                continue
            conj = self.one(keyword)
            places = self.places((keyword,))
            closed: list[Shape] = []
            for shape in shapes:
                if isinstance(shape, kind) and shape.negated and conj:
                    raise self.refused(
                        keyword, "can't be enforced beside a not, if or oneOf with keywords for properties or items"
                    )
                if isinstance(shape, Object) and kind is Object and shape.rest is None:
                    shape = replace(shape, rest=conj, narrowed=True, places=shape.places + places)
                elif isinstance(shape, Array) and kind is Array and not shape.rest_is_declared:
                    shape = replace(
                        shape, rest=conj, rest_is_declared=True, narrowed=True, places=shape.places + places
                    )
                closed.append(shape)
            shapes = tuple(closed)
        return shapes


def _closed(shape: Shape) -> Shape:
    """Restricts an object shape to properties that are declared or required. Returns other shapes unchanged."""
    if isinstance(shape, Object) and shape.rest is None and not shape.patterns and shape.properties:
        known = dict(shape.properties)
        needed = tuple((name, ()) for name in shape.required if name not in known)
        return replace(shape, properties=shape.properties + needed, rest=(NEVER,), narrowed=True)
    return shape
