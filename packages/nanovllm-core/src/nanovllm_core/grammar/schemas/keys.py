"""Plans the properties of an object that are not declared: by name, or by patterns of their names."""

from nanovllm_core.grammar.schemas import regex, search
from nanovllm_core.grammar.schemas.document import SchemaError
from nanovllm_core.grammar.schemas.library import Library
from nanovllm_core.grammar.schemas.shapes import NEVER, Conj, Constant, Object, Text, where
from nanovllm_core.grammar.schemas.spelling import write
from nanovllm_core.grammar.schemas.strings import all_but, as_tree


def others(
    library: Library, shape: Object, rest: Conj, place: str
) -> tuple[list[tuple[str, Conj, bool]], list[tuple[str | None, Conj]]]:
    """The undeclared properties of an object: optional ones by name, and schemas by a pattern of names."""
    declared = [name for name, _ in shape.properties]
    if shape.patterns:
        return [], _by_pattern(shape, declared, place)
    if rest == (NEVER,):
        return [], []
    if not shape.names:
        if not declared:
            return [], [(None, rest)]
        return [], [(write(all_but(declared)), rest)]
    named: list[tuple[str, Conj, bool]] = []
    patterns: list[tuple[str | None, Conj]] = []
    for names in library.shapes(shape.names):
        match names:
            case Constant(value=str() as name) if name not in declared:
                named.append((name, rest, False))
            case Text():
                tree = _names(names, declared, shape, place)
                if tree != regex.NOTHING:
                    patterns.append((write(tree), rest))
            case _:
                pass
    return named, patterns


def _names(names: Text, declared: list[str], shape: Object, place: str) -> regex.Node:
    where_from = where(shape, "propertyNames") or place
    tree = as_tree(names, where_from)
    hidden = [name for name in declared if search.found(_anchored(tree), name)]
    if not hidden:
        return tree
    if tree == regex.narrow(regex.ANYTHING):
        return all_but(hidden)
    raise SchemaError(where_from, "propertyNames", f"matches the name of a declared property: {hidden[0]!r}")


def _anchored(tree: regex.Node) -> regex.Node:
    return regex.seq([regex.Anchor(True), tree, regex.Anchor(False)])


def _by_pattern(shape: Object, declared: list[str], place: str) -> list[tuple[str | None, Conj]]:
    where_from = where(shape, "patternProperties") or place
    kept = [(pattern, conj) for pattern, conj in shape.patterns if conj != (NEVER,)]
    if len({conj for _, conj in shape.patterns}) > 1:
        raise SchemaError(where_from, "patternProperties", "with several patterns can't be enforced")
    if shape.names:
        raise SchemaError(where_from, "patternProperties", "can't be enforced beside propertyNames")
    found: list[tuple[str | None, Conj]] = []
    for pattern, conj in kept:
        tree = as_tree(Text(found=frozenset({pattern})), where_from)
        for name in declared:
            if search.found(regex.parse(pattern, widest=True), name):
                problem = f"matches the name of a declared property: {pattern!r} and {name!r}"
                raise SchemaError(where_from, "patternProperties", problem)
        if tree != regex.NOTHING:
            found.append((write(tree), conj))
    return found
