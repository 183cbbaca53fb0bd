"""Patterns for the names of undeclared properties."""

from nanovllm_core.grammar.schemas import regex, search
from nanovllm_core.grammar.schemas.document import SchemaError
from nanovllm_core.grammar.schemas.pattern_writer import write_pattern
from nanovllm_core.grammar.schemas.shape_resolver import ShapeResolver
from nanovllm_core.grammar.schemas.shapes import NEVER, Constant, Object, SchemaSet, Text, keyword_place
from nanovllm_core.grammar.schemas.string_patterns import exclude_strings, string_tree


def plan_undeclared_properties(
    resolver: ShapeResolver, shape: Object, rest: SchemaSet, place: str
) -> tuple[list[tuple[str, SchemaSet, bool]], list[tuple[str | None, SchemaSet]]]:
    """Plans undeclared properties: those with a known name, and those whose names match a pattern (None for any name).

    Returns lists of (name, schemas of the value, False: not required) and of (pattern or None, schemas of the value).
    """
    declared = [name for name, _ in shape.properties]
    if shape.patterns:
        return [], _plan_pattern_properties(shape, declared, place)
    if rest == (NEVER,):
        return [], []
    if not shape.name_schemas:
        if not declared:
            return [], [(None, rest)]
        return [], [(write_pattern(exclude_strings(declared)), rest)]
    named: list[tuple[str, SchemaSet, bool]] = []
    patterns: list[tuple[str | None, SchemaSet]] = []
    for name_shape in resolver.shapes(shape.name_schemas):
        match name_shape:
            case Constant(value=str() as name) if name not in declared:
                named.append((name, rest, False))
            case Text():
                tree = _name_tree(name_shape, declared, shape, place)
                if tree != regex.NO_STRING:
                    patterns.append((write_pattern(tree), rest))
            case _:
                pass
    return named, patterns


def _name_tree(name_shape: Text, declared: list[str], shape: Object, place: str) -> regex.Node:
    error_place = keyword_place(shape, "propertyNames") or place
    tree = string_tree(name_shape, error_place)
    matching = [name for name in declared if search.is_found(_anchored(tree), name)]
    if not matching:
        return tree
    if tree == regex.restrict_alphabet(regex.ANY_STRING):
        return exclude_strings(matching)
    raise SchemaError(error_place, "propertyNames", f"matches the name of a declared property: {matching[0]!r}")


def _anchored(tree: regex.Node) -> regex.Node:
    return regex.concatenate([regex.Anchor(True), tree, regex.Anchor(False)])


def _plan_pattern_properties(shape: Object, declared: list[str], place: str) -> list[tuple[str | None, SchemaSet]]:
    error_place = keyword_place(shape, "patternProperties") or place
    allowed = [(pattern, schema_set) for pattern, schema_set in shape.patterns if schema_set != (NEVER,)]
    if len({schema_set for _, schema_set in shape.patterns}) > 1:
        raise SchemaError(error_place, "patternProperties", "with several patterns can't be enforced")
    if shape.name_schemas:
        raise SchemaError(error_place, "patternProperties", "can't be enforced beside propertyNames")
    planned: list[tuple[str | None, SchemaSet]] = []
    for pattern, schema_set in allowed:
        tree = string_tree(Text(patterns=frozenset({pattern})), error_place)
        for name in declared:
            if search.is_found(regex.parse(pattern, any_engine=True), name):
                problem = f"matches the name of a declared property: {pattern!r} and {name!r}"
                raise SchemaError(error_place, "patternProperties", problem)
        if tree != regex.NO_STRING:
            planned.append((write_pattern(tree), schema_set))
    return planned
