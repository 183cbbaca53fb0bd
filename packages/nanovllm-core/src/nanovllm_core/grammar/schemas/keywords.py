"""Finds the shapes of one schema from its keywords. A shape describes values of one JSON type."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain

from nanovllm_core.grammar.schemas import regex
from nanovllm_core.grammar.schemas.complements import complement_shapes
from nanovllm_core.grammar.schemas.document import LocatedSchema, SchemaError, escape_pointer_part
from nanovllm_core.grammar.schemas.json_values import JSON, describe_value, equality_key
from nanovllm_core.grammar.schemas.overlaps import OverlapIndex
from nanovllm_core.grammar.schemas.shape_resolver import Negation, ShapeResolver
from nanovllm_core.grammar.schemas.shapes import (
    ANY_OBJECT,
    ANY_VALUE_SHAPES,
    FALSE_SCHEMA,
    ArrayShape,
    Conjunction,
    ConstantShape,
    Contains,
    NumberShape,
    ObjectShape,
    Places,
    Shape,
    StringShape,
)

# Counts above MAX_COUNT, for example of minItems, are lowered to MAX_COUNT. MAX_NAMES limits the names in one keyword.
MAX_COUNT = 2**31 - 1
MAX_NAMES = 2_000
MAX_CONSTANTS = 2_000
NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
STRING_KEYWORDS = ("minLength", "maxLength", "pattern", "format")
ARRAY_KEYWORDS = ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains")
OBJECT_KEYWORDS = (
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties"),
)
SHAPES_BY_TYPE: dict[str, tuple[Shape, ...]] = {
    "object": (ANY_OBJECT,),
    "array": (ArrayShape(),),
    "string": (StringShape(),),
    "number": (NumberShape(),),
    "integer": (NumberShape(integer=True),),
    "boolean": (ConstantShape(True, "true"), ConstantShape(False, "false")),
    "null": (ConstantShape(None, "null"),),
}


def read_shapes(resolver: ShapeResolver, entry: LocatedSchema | Negation) -> tuple[Shape, ...]:
    """The shapes of the values that are valid against `entry`, a schema or a negation. Raises SchemaError."""
    if isinstance(entry, Negation):
        return complement_shapes(resolver, resolver.shapes(entry.conjunction), resolver.place(entry.conjunction))
    return _KeywordReader(resolver, entry).read_shapes()


class _KeywordReader:
    """Reads the keywords of one schema. A conjunction is a set of schemas: a value must satisfy every schema."""

    def __init__(self, resolver: ShapeResolver, located: LocatedSchema):
        if not isinstance(located.schema, dict):
            problem = f"must be an object or a boolean, not {describe_value(located.schema)}"
            raise SchemaError(located.place, "schema", problem, is_invalid=True)
        self.resolver = resolver
        self.located = located
        self.schema = located.schema

    def read_shapes(self) -> tuple[Shape, ...]:
        shapes = self.read_types()
        shapes = self.apply_constants(shapes)
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if keyword in self.schema:
                shapes = self.intersect(shapes, self.resolver.shapes(self.referenced_schema(keyword)))
        for conjunction in self.subschema_list("allOf"):
            shapes = self.intersect(shapes, self.resolver.shapes(conjunction))
        shapes = self.apply_dependencies(shapes)
        if "anyOf" in self.schema:
            options = [self.resolver.shapes(conjunction) for conjunction in self.subschema_list("anyOf")]
            shapes = self.intersect(shapes, list(dict.fromkeys(chain.from_iterable(options))))
        if "oneOf" in self.schema:
            shapes = self.apply_one_of(shapes)
        if "not" in self.schema:
            conjunction = self.single_subschema("not")
            shapes = self.intersect(shapes, self.complement(conjunction, "not"))
        shapes = self.apply_condition(shapes)
        return self.apply_unevaluated(shapes)

    def place_of(self, keyword: str) -> str:
        return f"{self.located.place}/{escape_pointer_part(keyword)}"

    def invalid_error(self, keyword: str, expected: str) -> SchemaError:
        problem = f"must be {expected}, not {describe_value(self.schema[keyword])}"
        return SchemaError(self.place_of(keyword), keyword, problem, is_invalid=True)

    def unsupported_error(self, keyword: str, problem: str) -> SchemaError:
        return SchemaError(self.place_of(keyword), keyword, problem)

    def subschema(self, value: JSON, *path: str) -> Conjunction:
        place = "/".join([self.located.place, *(escape_pointer_part(part) for part in path)])
        if not isinstance(value, dict | bool):
            raise SchemaError(place, path[0], f"must be a schema, not {describe_value(value)}", is_invalid=True)
        return self.resolver.conjunction_of(LocatedSchema(value, place, self.resolver.document.base_uri(self.located)))

    def single_subschema(self, keyword: str) -> Conjunction:
        """The schema at `keyword`. If the keyword is missing, the schema `true`, which means the same."""
        return self.subschema(self.schema.get(keyword, True), keyword)

    def subschema_list(self, keyword: str) -> list[Conjunction]:
        if keyword not in self.schema:
            return []
        values = self.schema[keyword]
        if not isinstance(values, list) or not values:
            raise self.invalid_error(keyword, "a non-empty array of schemas")
        return [self.subschema(value, keyword, str(index)) for index, value in enumerate(values)]

    def read_map(self, keyword: str) -> dict[str, JSON]:
        values = self.schema.get(keyword, {})
        if not isinstance(values, dict):
            raise self.invalid_error(keyword, "an object")
        if len(values) > MAX_NAMES:
            raise self.unsupported_error(keyword, f"has more than {MAX_NAMES} names")
        return values

    def read_strings(self, value: JSON, keyword: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value) or len(value) > MAX_NAMES:
            raise self.invalid_error(keyword, f"an array of at most {MAX_NAMES} strings")
        return tuple(dict.fromkeys(item for item in value if isinstance(item, str)))

    def read_count(self, keyword: str) -> int | None:
        value = self.schema.get(keyword)
        if value is None and keyword not in self.schema:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < 0:
            raise self.invalid_error(keyword, "an integer of at least 0")
        return min(value, MAX_COUNT)

    def read_number(self, keyword: str) -> Fraction | None:
        if keyword not in self.schema:
            return None
        value = self.schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid_error(keyword, "a number")
        return Fraction(value)

    def places_of(self, keywords: Sequence[str]) -> Places:
        return tuple((keyword, self.place_of(keyword)) for keyword in keywords if keyword in self.schema)

    def intersect(self, first: tuple[Shape, ...], second: Sequence[Shape]) -> tuple[Shape, ...]:
        return self.resolver.intersect(first, second, self.located.place)

    def complement(self, conjunction: Conjunction, keyword: str) -> tuple[Shape, ...]:
        try:
            return complement_shapes(self.resolver, self.resolver.shapes(conjunction), self.place_of(keyword))
        except SchemaError as error:
            if error.keyword != "not":
                raise
            problem = f"can't be enforced, because a schema in it {error.problem}"
            raise self.unsupported_error(keyword, problem) from error

    def read_types(self) -> tuple[Shape, ...]:
        declared = self.schema.get("type")
        shapes: tuple[Shape, ...] = ANY_VALUE_SHAPES
        if "type" in self.schema:
            names = declared if isinstance(declared, list) and declared else [declared]
            if not all(isinstance(name, str) and name in SHAPES_BY_TYPE for name in names):
                raise self.invalid_error("type", "one or several of " + ", ".join(SHAPES_BY_TYPE))
            if "number" in names:
                names = [name for name in names if name != "integer"]
            shapes = tuple(dict.fromkeys(shape for name in names for shape in SHAPES_BY_TYPE[str(name)]))
        readers = (
            (NUMBER_KEYWORDS, self.read_number_keywords),
            (STRING_KEYWORDS, self.read_string_keywords),
            (ARRAY_KEYWORDS, self.read_array_keywords),
            (OBJECT_KEYWORDS, self.read_object_keywords),
        )
        restricted: tuple[Shape, ...] = ANY_VALUE_SHAPES
        for keywords, reader in readers:
            if self.schema.keys().isdisjoint(keywords):
                continue
            shape = replace(reader(), places=self.places_of((*keywords, "minContains")))
            restricted = (*(other for other in restricted if type(other) is not type(shape)), shape)
        return self.intersect(shapes, restricted)

    def apply_constants(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        for keyword in ("enum", "const"):
            if keyword not in self.schema:
                continue
            values = [self.schema["const"]] if keyword == "const" else self.schema["enum"]
            if not isinstance(values, list):
                raise self.invalid_error(keyword, "an array")
            if len(values) > MAX_CONSTANTS:
                raise self.unsupported_error(keyword, f"has more than {MAX_CONSTANTS} values")
            places = self.places_of((keyword,))
            shapes = self.intersect(
                shapes, [ConstantShape(value, equality_key(value), places=places) for value in values]
            )
        return shapes

    def read_number_keywords(self) -> Shape:
        low, excludes_low = self.read_bound("minimum", "exclusiveMinimum", max)
        high, excludes_high = self.read_bound("maximum", "exclusiveMaximum", min)
        step = self.read_number("multipleOf")
        if step is not None and step <= 0:
            raise self.invalid_error("multipleOf", "a number above 0")
        if low is not None and high is not None and (low > high or (low == high and (excludes_low or excludes_high))):
            raise self.contradiction_error(next(k for k in NUMBER_KEYWORDS if k in self.schema))
        divisors = frozenset[Fraction]() if step is None else frozenset({step})
        return NumberShape(False, low, high, excludes_low, excludes_high, divisors)

    def read_bound(
        self, keyword: str, exclusive_keyword: str, pick_stricter: Callable[[Fraction, Fraction], Fraction]
    ) -> tuple[Fraction | None, bool]:
        """Returns (bound, whether the range excludes the bound). A bound of None means no limit."""
        bound = self.read_number(keyword)
        # Up to draft 4, the exclusive keyword is a boolean.
        if isinstance(self.schema.get(exclusive_keyword), bool):
            return bound, self.schema[exclusive_keyword] is True and bound is not None
        exclusive_bound = self.read_number(exclusive_keyword)
        if exclusive_bound is None or (bound is not None and pick_stricter(bound, exclusive_bound) != exclusive_bound):
            return bound, False
        return exclusive_bound, True

    def read_count_range(self, min_keyword: str, max_keyword: str) -> tuple[int, int | None]:
        low, high = self.read_count(min_keyword) or 0, self.read_count(max_keyword)
        if high is not None and low > high:
            raise self.contradiction_error(max_keyword)
        return low, high

    def contradiction_error(self, keyword: str) -> SchemaError:
        return self.unsupported_error(keyword, "contradicts the opposite bound: no value satisfies both")

    def read_string_keywords(self) -> Shape:
        low, high = self.read_count_range("minLength", "maxLength")
        patterns = frozenset[str]()
        if "pattern" in self.schema:
            patterns = frozenset({self.read_pattern(self.schema["pattern"], "pattern")})
        name = self.schema.get("format")
        if name is not None and not isinstance(name, str):
            raise self.invalid_error("format", "a string")
        return StringShape(low, high, patterns, format=name)

    def read_pattern(self, text: JSON, keyword: str) -> str:
        if not isinstance(text, str):
            raise self.invalid_error(keyword, "a string")
        try:
            regex.parse(text)
        except regex.RegexError as error:
            problem = f"has a pattern that can't be enforced: {error} ({describe_value(text)})"
            raise self.unsupported_error(keyword, problem) from error
        return text

    def read_array_keywords(self) -> Shape:
        low, high = self.read_count_range("minItems", "maxItems")
        unique = self.schema.get("uniqueItems", False)
        if not isinstance(unique, bool):
            raise self.invalid_error("uniqueItems", "true or false")
        items = self.schema.get("items")
        # Up to draft 2019-09, `items` may be a list of schemas. `additionalItems` then describes the other items.
        prefix = self.subschema_list("items") if isinstance(items, list) and items else []
        rest_keyword = "additionalItems" if isinstance(items, list) else "items"
        has_declared_rest = rest_keyword in self.schema
        rest = self.single_subschema(rest_keyword)
        if "prefixItems" in self.schema:
            prefix = self.subschema_list("prefixItems")
        contains = frozenset[Contains]()
        if "contains" in self.schema:
            min_count = self.read_count("minContains") if "minContains" in self.schema else 1
            contained = Contains(self.single_subschema("contains"), min_count or 0, self.read_count("maxContains"))
            contains = frozenset({contained}) if contained.low or contained.high is not None else contains
        return ArrayShape(tuple(prefix), rest, low, high, unique, contains, has_declared_rest)

    def read_object_keywords(self) -> Shape:
        low, high = self.read_count_range("minProperties", "maxProperties")
        properties = {
            name: self.subschema(value, "properties", name) for name, value in self.read_map("properties").items()
        }
        patterns: dict[str, Conjunction] = {}
        for text, value in self.read_map("patternProperties").items():
            patterns[self.read_pattern(text, "patternProperties")] = self.subschema(value, "patternProperties", text)
        required = self.read_strings(self.schema["required"], "required") if "required" in self.schema else ()
        rest = self.single_subschema("additionalProperties") if "additionalProperties" in self.schema else None
        names = self.single_subschema("propertyNames")
        return ObjectShape(tuple(properties.items()), required, tuple(patterns.items()), rest, names, low, high)

    def referenced_schema(self, keyword: str) -> Conjunction:
        value = self.schema[keyword]
        document = self.resolver.document
        if keyword == "$dynamicRef":
            return self.resolver.conjunction_of(document.resolve_dynamic_reference(self.located, value))
        if keyword == "$recursiveRef":
            raise self.unsupported_error(keyword, "depends on the chain of references; use $ref instead")
        return self.resolver.conjunction_of(document.resolve_reference(self.located, value, keyword))

    def apply_dependencies(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, value in self.read_map(keyword).items():
                without_name = ObjectShape(((name, FALSE_SCHEMA),))
                if isinstance(value, list):
                    required_names = self.read_strings(value, keyword)
                    with_name: list[Shape] = [ObjectShape(required=(name, *required_names))]
                else:
                    conjunction = self.subschema(value, keyword, name)
                    with_name = list(
                        self.intersect((ObjectShape(required=(name,)),), self.resolver.shapes(conjunction))
                    )
                other_types = [shape for shape in ANY_VALUE_SHAPES if not isinstance(shape, ObjectShape)]
                shapes = self.intersect(shapes, [*other_types, without_name, *with_name])
        return shapes

    def apply_one_of(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        """Restricts `shapes` to values that are valid against exactly one schema of `oneOf`."""
        options = [(conjunction, self.resolver.shapes(conjunction)) for conjunction in self.subschema_list("oneOf")]
        overlaps = OverlapIndex([option for _, option in options])
        valid_for_one: dict[Shape, None] = {}
        complements: dict[int, tuple[Shape, ...]] = {}  # By the option's index.
        for index, (_, option) in enumerate(options):
            for shape in self.intersect(shapes, option):
                only_in_option: tuple[Shape, ...] = (shape,)
                for other_index in overlaps.find(shape):
                    conjunction, other = options[other_index]
                    if other_index != index and self.may_overlap(only_in_option, other):
                        # If excluding undeclared properties separates the options, no complement is needed.
                        declared_only = tuple(_without_undeclared_properties(part) for part in only_in_option)
                        if declared_only != only_in_option and not self.may_overlap(declared_only, other):
                            only_in_option = declared_only
                            continue
                        if other_index not in complements:
                            complements[other_index] = self.complement(conjunction, "oneOf")
                        only_in_option = self.intersect(only_in_option, complements[other_index])
                valid_for_one.update(dict.fromkeys(only_in_option))
        return tuple(valid_for_one)

    def may_overlap(self, first: Sequence[Shape], second: Sequence[Shape]) -> bool:
        return self.resolver.may_have_value(self.resolver.intersect(first, second, self.place_of("oneOf")))

    def apply_condition(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        if "if" not in self.schema or not ("then" in self.schema or "else" in self.schema):
            return shapes
        condition = self.single_subschema("if")
        then_shapes = self.intersect(
            self.resolver.shapes(condition), self.resolver.shapes(self.single_subschema("then"))
        )
        else_shapes = self.intersect(
            self.complement(condition, "if"), self.resolver.shapes(self.single_subschema("else"))
        )
        return self.intersect(shapes, list(dict.fromkeys([*then_shapes, *else_shapes])))

    def apply_unevaluated(self, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        for keyword, shape_type in (("unevaluatedProperties", ObjectShape), ("unevaluatedItems", ArrayShape)):
            if keyword not in self.schema:
                continue
            conjunction = self.single_subschema(keyword)
            places = self.places_of((keyword,))
            restricted: list[Shape] = []
            for shape in shapes:
                if isinstance(shape, shape_type) and shape.comes_from_negation and conjunction:
                    raise self.unsupported_error(
                        keyword,
                        "can't be enforced next to a keyword 'not', 'if' or 'oneOf' that restricts properties or items",
                    )
                if isinstance(shape, ObjectShape) and shape_type is ObjectShape and shape.rest is None:
                    shape = replace(shape, rest=conjunction, omits_allowed_values=True, places=shape.places + places)
                elif isinstance(shape, ArrayShape) and shape_type is ArrayShape and not shape.has_declared_rest:
                    shape = replace(shape, rest=conjunction, omits_allowed_values=True, places=shape.places + places)
                    shape = replace(shape, has_declared_rest=True)
                restricted.append(shape)
            shapes = tuple(restricted)
        return shapes


def _without_undeclared_properties(shape: Shape) -> Shape:
    """Restricts an object shape to declared and required properties. Returns other shapes unchanged."""
    if isinstance(shape, ObjectShape) and shape.rest is None and not shape.patterns and shape.properties:
        declared = dict(shape.properties)
        undeclared_required = tuple((name, ()) for name in shape.required if name not in declared)
        return replace(
            shape, properties=shape.properties + undeclared_required, rest=FALSE_SCHEMA, omits_allowed_values=True
        )
    return shape
