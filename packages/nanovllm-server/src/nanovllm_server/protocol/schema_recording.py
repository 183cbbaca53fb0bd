"""Derives the JSON schema of requests from the code that reads requests.

The code reads example requests through a special field reader, which records the allowed values of each field.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.field_reader import ANYTHING, FieldReader, Schema
from nanovllm_server.protocol.json import JSON

# Reads and validates a request. `record_schema` ignores the result.
ReadObject: TypeAlias = Callable[[FieldReader], object]
# The path from a request to a nested value: field names and array indices.
KeyPath: TypeAlias = tuple[str | int, ...]


def record_schema(read: ReadObject, examples: Sequence[dict[str, JSON]]) -> Schema:
    """Returns the JSON schema (2020-12) of the objects that `read` accepts. Raises ApiError for an invalid example.

    The examples must contain every nested object and array. A field is required if `read` refuses examples without
    the field.
    """
    root = _ObjectNode()
    for example in examples:
        read(_RecordingReader(example, root))
    for example in examples:
        for node, keys in _iterate_objects(root, example, ()):
            fields = cast(dict[str, JSON], _get_nested(example, keys))
            node.update_required({name for name in fields if _is_required(read, example, (*keys, name))})
    return root.schema()


@dataclass(slots=True)
class _ObjectNode:
    """The fields of one object in the request, collected from all examples.

    alternatives: schemas by field; a value must match at least one of the field's schemas.
    children: nested objects by field; an array has one child for all its objects.
    required: fields that `read` requires in every example; None before the first example.
    """

    alternatives: dict[str, list[Schema]] = field(default_factory=dict[str, list[Schema]])
    children: dict[str, "_ObjectNode"] = field(default_factory=dict[str, "_ObjectNode"])
    required: frozenset[str] | None = None

    def record(self, name: str, documented_schema: Schema) -> None:
        alternatives = self.alternatives.setdefault(name, [])
        if documented_schema and documented_schema not in alternatives:
            alternatives.append(documented_schema)

    def child(self, name: str) -> "_ObjectNode":
        return self.children.setdefault(name, _ObjectNode())

    def update_required(self, names: set[str]) -> None:
        self.required = frozenset(names if self.required is None else self.required & names)

    def schema(self) -> Schema:
        required = self.required or frozenset()
        # Fields that accept only null are unsupported, and the schema leaves them out.
        only_null: tuple[list[Schema], ...] = ([{"enum": [None]}], [{"type": "null"}])
        names = [name for name, alternatives in self.alternatives.items() if alternatives not in only_null]
        properties: dict[str, JSON] = {}
        for name in names:
            alternatives = [self._with_child(name, schema) for schema in copy.deepcopy(self.alternatives[name])] or [{}]
            documented_schema: Schema = alternatives[0] if len(alternatives) == 1 else {"anyOf": [*alternatives]}
            properties[name] = documented_schema if name in required else _with_null(documented_schema)
        schema: Schema = {"type": "object", "properties": properties}
        if required:
            schema["required"] = [name for name in names if name in required]
        return schema

    def _with_child(self, name: str, documented_schema: Schema) -> Schema:
        """Adds the schema of the field's nested objects to the field's schema."""
        if name not in self.children:
            return documented_schema
        types, child = documented_schema.get("type"), self.children[name].schema()
        if types == "array" or (isinstance(types, list) and "array" in types):
            return {**documented_schema, "items": child}
        return {**child, **documented_schema} if types == "object" else documented_schema


class _RecordingReader(FieldReader):
    """A field reader that records what its methods accept."""

    def __init__(self, values: dict[str, JSON], node: _ObjectNode, path: str = ""):
        super().__init__(values, path)
        self._node = node

    def raw(self, name: str, documented_schema: Schema = ANYTHING) -> JSON:
        self._node.record(name, documented_schema)
        return super().raw(name)

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        self._node.record(name, {"type": "integer", "minimum": low, **({} if high is None else {"maximum": high})})
        return super().integer(name, low, high)

    def number(self, name: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        minimum = "exclusiveMinimum" if above_low else "minimum"
        self._node.record(name, {"type": "number", minimum: low, "maximum": high})
        return super().number(name, low, high, above_low=above_low)

    def boolean(self, name: str) -> bool | None:
        self._node.record(name, {"type": "boolean"})
        return super().boolean(name)

    def text(self, name: str, max_length: int | None = None, documented_schema: Schema = ANYTHING) -> str | None:
        length_limit: Schema = {} if max_length is None else {"maxLength": max_length}
        self._node.record(name, {"type": "string", **length_limit, **documented_schema})
        return super().text(name, max_length)

    def one_of(self, name: str, choices: Sequence[str]) -> str | None:
        self._node.record(name, {"type": "string", "enum": [*choices]})
        return super().one_of(name, choices)

    def array(
        self, name: str, expected: str, max_items: int | None = None, items: Schema = ANYTHING
    ) -> list[JSON] | None:
        documented_schema: Schema = {"type": "array"}
        if max_items is not None:
            documented_schema["maxItems"] = max_items
        if items:
            documented_schema["items"] = items
        self._node.record(name, documented_schema)
        return super().array(name, expected, max_items)

    def mapping(self, name: str) -> dict[str, JSON] | None:
        self._node.record(name, {"type": "object"})
        return super().mapping(name)

    def _make_reader(self, name: str, value: dict[str, JSON], path: str) -> FieldReader:
        return _RecordingReader(value, self._node.child(name), path)


def _with_null(documented_schema: Schema) -> Schema:
    if "const" in documented_schema:
        return {"enum": [documented_schema["const"], None]}
    if "anyOf" in documented_schema:
        return {**documented_schema, "anyOf": [*cast(list[JSON], documented_schema["anyOf"]), {"type": "null"}]}
    types, values = documented_schema.get("type"), documented_schema.get("enum")
    nullable = dict(documented_schema)
    if types is not None:
        nullable["type"] = [*(types if isinstance(types, list) else [types]), "null"]
    if isinstance(values, list) and None not in values:
        nullable["enum"] = [*values, None]
    return nullable


def _iterate_objects(node: _ObjectNode, value: JSON, keys: KeyPath) -> Iterator[tuple[_ObjectNode, KeyPath]]:
    """Yields (node, path from the request) of `value` and its nested objects, except objects without a node."""
    match value:
        case dict():
            yield node, keys
            for name, child in value.items():
                if name in node.children:
                    yield from _iterate_objects(node.children[name], child, (*keys, name))
        case list():
            for index, item in enumerate(value):
                yield from _iterate_objects(node, item, (*keys, index))
        case _:
            return


def _is_required(read: ReadObject, example: dict[str, JSON], keys: KeyPath) -> bool:
    without_field = copy.deepcopy(example)
    del cast(dict[str, JSON], _get_nested(without_field, keys[:-1]))[str(keys[-1])]
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")
    try:
        read(FieldReader(without_field))
    except ApiError as error:
        return error.param == path
    return False


def _get_nested(value: JSON, keys: KeyPath) -> JSON:
    for key in keys:
        value = cast(dict[str | int, JSON], value)[key]
    return value
