"""Finds the types that a JSON schema declares for its values."""

from nanovllm_core.grammar.schemas.json_values import JSON

# The search stops after this number of subschemas, type names and constants together.
MAX_STEPS = 10_000
MAX_REFERENCE_LENGTH = 1_000
# Maximum number of references to follow. A chain of references may be circular.
MAX_REFERENCES = 8
TYPE_NAMES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def declared_types(schema: JSON, root: JSON) -> set[str]:
    """The types that `schema` and its subschemas in `$ref`, `anyOf`, `oneOf` and `allOf` declare.

    If `type` is missing, a schema declares the types of its `enum` or `const`.
    root: schema to which references in `schema` are relative.
    """
    types: set[str] = set()
    pending, seen, steps = [schema], set[int](), 0
    while pending and steps < MAX_STEPS:
        steps += 1
        schema = pending.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        direct_types = _direct_types(schema, MAX_STEPS - steps)
        steps += len(direct_types)
        types.update(direct_types)
        for keyword in ("anyOf", "oneOf", "allOf"):
            subschemas = schema.get(keyword)
            if isinstance(subschemas, list):
                pending.extend(subschemas[: MAX_STEPS - steps])
        pending.append(_referenced_schema(schema, root))
    return types


def follow_references(schema: JSON, root: JSON) -> JSON:
    """Follows references from `schema` to a schema without a reference. `root` contains the referenced schemas."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        schema = _referenced_schema(schema, root)
    return schema


def _direct_types(schema: dict[str, JSON], limit: int) -> list[str]:
    match schema.get("type"):
        case str() as name:
            return [name]
        case list() as names if names:
            return [name for name in names[:limit] if isinstance(name, str)]
        case _:
            constants = schema.get("enum")
            if not isinstance(constants, list):
                constants = [schema["const"]] if "const" in schema else []
            return [TYPE_NAMES[type(constant)] for constant in constants[:limit]]


def _referenced_schema(schema: dict[str, JSON], root: JSON) -> JSON:
    """The schema that `$ref` names by a JSON pointer; None if `$ref` is missing or not a JSON pointer."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/") or len(reference) > MAX_REFERENCE_LENGTH:
        return None
    target = root
    for name in reference[2:].split("/"):
        if not isinstance(target, dict):
            return None
        target = target.get(name.replace("~1", "/").replace("~0", "~"))
    return target
