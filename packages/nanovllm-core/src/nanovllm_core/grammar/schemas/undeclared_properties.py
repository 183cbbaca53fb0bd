"""Finds the names and values of properties that a schema allows but does not declare."""

from nanovllm_core.grammar.schemas import regex, search
from nanovllm_core.grammar.schemas.document import SchemaError
from nanovllm_core.grammar.schemas.pattern_writer import write_pattern
from nanovllm_core.grammar.schemas.shape_resolver import ShapeResolver
from nanovllm_core.grammar.schemas.shapes import (
    FALSE_SCHEMA,
    Conjunction,
    ConstantShape,
    ObjectShape,
    StringShape,
    keyword_place,
)
from nanovllm_core.grammar.schemas.string_patterns import (
    MAX_LATER_PREFIXES,
    MAX_PREFIXES,
    exclude_strings,
    string_tree,
)

# Number of objects with both declared and undeclared properties that may use MAX_PREFIXES prefixes in
# `exclude_strings`. Later objects of a schema use MAX_LATER_PREFIXES prefixes, which forbids more names.
MAX_EXACT_OBJECTS = 4


def plan_undeclared_properties(
    resolver: ShapeResolver, shape: ObjectShape, rest: Conjunction, place: str
) -> tuple[list[tuple[str, Conjunction, bool]], list[tuple[str | None, Conjunction]]]:
    """Finds undeclared properties with known names, and undeclared properties whose names match a pattern.

    rest: schemas of the values of undeclared properties.
    Returns two lists. The first has tuples (name, schemas of the value, False). False: the property is not required.
    The second has pairs (pattern of names, schemas of the value). A pattern of None matches any name.
    """
    declared = [name for name, _ in shape.properties]
    if shape.patterns:
        return [], _plan_pattern_properties(resolver, shape, declared, place)
    if rest == FALSE_SCHEMA:
        return [], []
    if not shape.name_schemas:
        if not declared:
            return [], [(None, rest)]
        resolver.num_open_objects += 1
        is_later_object = resolver.num_open_objects > MAX_EXACT_OBJECTS
        names = exclude_strings(declared, MAX_LATER_PREFIXES if is_later_object else MAX_PREFIXES)
        return [], [(write_pattern(names), rest)]
    named: list[tuple[str, Conjunction, bool]] = []
    patterns: list[tuple[str | None, Conjunction]] = []
    for name_shape in resolver.shapes(shape.name_schemas):
        match name_shape:
            case ConstantShape(value=str() as name) if name not in declared:
                named.append((name, rest, False))
            case StringShape():
                tree = _name_tree(resolver, name_shape, declared, shape, place)
                if tree != regex.NO_STRING:
                    patterns.append((write_pattern(tree), rest))
            case _:
                pass
    return named, patterns


def _name_tree(
    resolver: ShapeResolver, name_shape: StringShape, declared: list[str], shape: ObjectShape, place: str
) -> regex.Node:
    error_place = keyword_place(shape, "propertyNames") or place
    tree = string_tree(name_shape, error_place, resolver.count_steps)
    matching = [name for name in declared if search.matches_whole(tree, name, resolver.count_steps)]
    if not matching:
        return tree
    if tree == regex.restrict_characters(regex.ANY_STRING):
        return exclude_strings(matching)
    raise SchemaError(error_place, "propertyNames", f"matches the name of a declared property: {matching[0]!r}")


def _plan_pattern_properties(
    resolver: ShapeResolver, shape: ObjectShape, declared: list[str], place: str
) -> list[tuple[str | None, Conjunction]]:
    error_place = keyword_place(shape, "patternProperties") or place
    allowed = [(pattern, conjunction) for pattern, conjunction in shape.patterns if conjunction != FALSE_SCHEMA]
    if len({conjunction for _, conjunction in shape.patterns}) > 1:
        raise SchemaError(
            error_place, "patternProperties", "with different schemas for several patterns can't be enforced"
        )
    if shape.name_schemas:
        raise SchemaError(error_place, "patternProperties", "can't be enforced beside propertyNames")
    planned: list[tuple[str | None, Conjunction]] = []
    for pattern, conjunction in allowed:
        tree = string_tree(StringShape(patterns=frozenset({pattern})), error_place, resolver.count_steps)
        for name in declared:
            if search.is_found(regex.parse(pattern, is_permissive=True), name, resolver.count_steps):
                problem = f"matches the name of a declared property: {pattern!r} and {name!r}"
                raise SchemaError(error_place, "patternProperties", problem)
        if tree != regex.NO_STRING:
            planned.append((write_pattern(tree), conjunction))
    return planned
