"""Derives the JSON schema (2020-12) of requests from the code that reads them, so that the two can't differ.

The code reads example requests through a field reader that records which values each field accepts.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.field_reader import ANYTHING, FieldReader
from nanovllm_server.protocol.json import JSON

Schema: TypeAlias = dict[str, JSON]
Read: TypeAlias = Callable[[FieldReader], object]


def describe(read: Read, examples: Sequence[dict[str, JSON]]) -> Schema:
    """The schema of the objects that `read` accepts. Raises ApiError if `read` refuses an example.

    Nested objects and arrays are described if an example contains them.
    A field is required if `read` refuses the examples without it.
    """
    root = _Node()
    for example in examples:
        read(_RecordingReader(example, root))
    for example in examples:
        for node, steps in _objects(root, example, ()):
            here = cast(dict[str, JSON], _at(example, steps))
            node.require({name for name in here if _is_missed(read, example, (*steps, name))})
    return root.schema()


@dataclass(slots=True)
class _Node:
    """The alternative schemas of each field of an object, the objects in each field, and the fields that all examples
    need (None before the first example).
    """

    fields: dict[str, list[Schema]] = field(default_factory=dict[str, list[Schema]])
    below: dict[str, "_Node"] = field(default_factory=dict[str, "_Node"])
    required: frozenset[str] | None = None

    def note(self, name: str, accepts: Schema) -> None:
        alternatives = self.fields.setdefault(name, [])
        if accepts and accepts not in alternatives:
            alternatives.append(accepts)

    def child(self, name: str) -> "_Node":
        return self.below.setdefault(name, _Node())

    def require(self, names: set[str]) -> None:
        self.required = frozenset(names if self.required is None else self.required & names)

    def schema(self) -> Schema:
        required = self.required or frozenset()
        # A field that accepts only null is unsupported.
        refused: tuple[list[Schema], ...] = ([{"enum": [None]}], [{"type": "null"}])
        names = [name for name, alternatives in self.fields.items() if alternatives not in refused]
        properties: dict[str, JSON] = {}
        for name in names:
            alternatives = [self._deeper(name, accepts) for accepts in copy.deepcopy(self.fields[name])] or [{}]
            accepts: Schema = alternatives[0] if len(alternatives) == 1 else {"anyOf": [*alternatives]}
            properties[name] = accepts if name in required else _or_null(accepts)
        schema: Schema = {"type": "object", "properties": properties}
        if required:
            schema["required"] = [name for name in names if name in required]
        return schema

    def _deeper(self, name: str, accepts: Schema) -> Schema:
        """`accepts`, completed with the recorded schema of the objects in the field."""
        kinds = accepts.get("type")
        if name not in self.below:
            return accepts
        inner = self.below[name].schema()
        if kinds == "array" or (isinstance(kinds, list) and "array" in kinds):
            return {**accepts, "items": inner}
        return {**inner, **accepts} if kinds == "object" else accepts


class _RecordingReader(FieldReader):
    """A field reader that records the schemas which its methods enforce."""

    def __init__(self, values: dict[str, JSON], node: _Node, path: str = ""):
        super().__init__(values, path)
        self._node = node

    def raw(self, name: str, accepts: Schema = ANYTHING) -> JSON:
        self._node.note(name, accepts)
        return super().raw(name)

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        self._node.note(name, {"type": "integer", "minimum": low, **({} if high is None else {"maximum": high})})
        return super().integer(name, low, high)

    def number(self, name: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        least = "exclusiveMinimum" if above_low else "minimum"
        self._node.note(name, {"type": "number", least: low, "maximum": high})
        return super().number(name, low, high, above_low=above_low)

    def boolean(self, name: str) -> bool | None:
        self._node.note(name, {"type": "boolean"})
        return super().boolean(name)

    def text(self, name: str, max_length: int | None = None, accepts: Schema = ANYTHING) -> str | None:
        limit: Schema = {} if max_length is None else {"maxLength": max_length}
        self._node.note(name, {"type": "string", **limit, **accepts})
        return super().text(name, max_length)

    def one_of(self, name: str, choices: Sequence[str]) -> str | None:
        self._node.note(name, {"type": "string", "enum": [*choices]})
        return super().one_of(name, choices)

    def array(
        self, name: str, expected: str, max_items: int | None = None, items: Schema = ANYTHING
    ) -> list[JSON] | None:
        accepts: Schema = {"type": "array"}
        if max_items is not None:
            accepts["maxItems"] = max_items
        if items:
            accepts["items"] = items
        self._node.note(name, accepts)
        return super().array(name, expected, max_items)

    def child(self, name: str) -> FieldReader | None:
        self._node.note(name, {"type": "object"})
        inner = super().child(name)
        value = self._values.get(name)
        if inner is None or not isinstance(value, dict):
            return None
        return _RecordingReader(value, self._node.child(name), self.path(name))

    def element(self, name: str, index: int, value: JSON, expected: str) -> FieldReader:
        super().element(name, index, value, expected)
        return _RecordingReader(cast(dict[str, JSON], value), self._node.child(name), f"{self.path(name)}[{index}]")


def _or_null(accepts: Schema) -> Schema:
    if "const" in accepts:
        return {"enum": [accepts["const"], None]}
    if "anyOf" in accepts:
        return {**accepts, "anyOf": [*cast(list[JSON], accepts["anyOf"]), {"type": "null"}]}
    kinds, values = accepts.get("type"), accepts.get("enum")
    wider = dict(accepts)
    if kinds is not None:
        wider["type"] = [*(kinds if isinstance(kinds, list) else [kinds]), "null"]
    if isinstance(values, list) and None not in values:
        wider["enum"] = [*values, None]
    return wider


def _objects(node: _Node, value: JSON, steps: tuple[str | int, ...]) -> Iterator[tuple[_Node, tuple[str | int, ...]]]:
    """Every object in `value` that was read, and the names and indices that lead to it."""
    match value:
        case dict():
            yield node, steps
            for name, inner in value.items():
                if name in node.below:
                    yield from _objects(node.below[name], inner, (*steps, name))
        case list():
            for index, inner in enumerate(value):
                yield from _objects(node, inner, (*steps, index))
        case _:
            return


def _is_missed(read: Read, example: dict[str, JSON], steps: tuple[str | int, ...]) -> bool:
    without = copy.deepcopy(example)
    del cast(dict[str, JSON], _at(without, steps[:-1]))[str(steps[-1])]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
    try:
        read(FieldReader(without))
    except ApiError as error:
        return error.param == path
    return False


def _at(value: JSON, steps: tuple[str | int, ...]) -> JSON:
    for step in steps:
        value = cast(dict[str | int, JSON], value)[step]
    return value
