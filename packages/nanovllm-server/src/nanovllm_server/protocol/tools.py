"""The tools of a request: JSON in, what may or must be called out. This room must not know how models call anything."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, cast

from nanovllm_server.protocol.error import bad_field
from nanovllm_server.protocol.field_reader import FieldReader, is_deeper
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.schema import check_schema

MAX_TOOLS = 1024
# Of a tool's definition, which templates write as JSON.
MAX_DEPTH = 100
MAX_NAME = 256
# Names must stand in every format unquoted.
NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.:/")
CHOICES = ("auto", "none", "required")
# How free the model is: to call or not, which function to call, neither.
Mode = Literal["auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. path: where the request has its parameters.

    parameters: their schema; where they are `enforced`, that of an object, as it is to be enforced.
    """

    name: str
    parameters: JSON
    enforced: bool
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """What the model may call. definitions: all tools as the request has them, for the prompt.

    functions: those that may be called, by name; fewer than the definitions when `restricted`. parallel: whether
    several calls may be made in one answer.
    """

    definitions: tuple[dict[str, JSON], ...]
    functions: dict[str, Function]
    mode: Mode
    restricted: bool
    parallel: bool

    @property
    def schemas(self) -> dict[str, JSON]:
        """The schema of each function's parameters, by name."""
        return {name: function.parameters for name, function in self.functions.items()}

    @property
    def constrains(self) -> bool:
        """Whether more is asked of the model than to call functions as it sees fit."""
        return self.mode != "auto" or self.restricted or any(each.enforced for each in self.functions.values())


@dataclass(frozen=True, slots=True)
class _Choice:
    mode: Mode | Literal["none"]
    # None for all functions.
    names: tuple[str, ...] | None = None


def parse_tools(body: FieldReader) -> Toolbox | None:
    """The tools of a request; None when none may be called. Raises ApiError."""
    right = f"left out or an array of 1 to {MAX_TOOLS} tools"
    items = body.array("tools", right, MAX_TOOLS)
    parallel = body.boolean("parallel_tool_calls")
    if items is None:
        if body.raw("tool_choice") not in (None, "none"):
            raise body.wrong("tool_choice", 'left out or "none" when there are no tools')
        return None
    if not items:
        raise body.wrong("tools", right)
    definitions: list[dict[str, JSON]] = []
    functions: dict[str, Function] = {}
    for index, item in enumerate(items):
        tool = body.element("tools", index, item, "an object with type and function")
        if is_deeper(item, MAX_DEPTH):
            raise body.wrong("tools", f"nested at most {MAX_DEPTH} deep in each tool")
        function = _function(tool)
        if function.name in functions:
            raise bad_field(tool.path("function.name"), "different from those of the other tools", function.name)
        definitions.append(cast(dict[str, JSON], item))
        functions[function.name] = function
    choice = _tool_choice(body, functions.keys())
    # What the model does not see it does not call.
    if choice.mode == "none":
        return None
    names = choice.names or tuple(functions)
    # Whoever must call does so as the schemas say, strict or not.
    return Toolbox(
        definitions=tuple(definitions),
        functions={name: _enforced(functions[name], always=choice.mode != "auto") for name in names},
        mode=choice.mode,
        restricted=len(names) < len(functions),
        # A function that is named is called once.
        parallel=parallel is not False and choice.mode != "named",
    )


def _tool_choice(body: FieldReader, names: Collection[str]) -> _Choice:
    choice = body.child("tool_choice") if isinstance(body.raw("tool_choice"), dict) else None
    if choice is None:
        match body.one_of("tool_choice", CHOICES):
            case None | "auto":
                return _Choice("auto")
            case "none":
                return _Choice("none")
            case _:
                return _Choice("required")
    kind = choice.one_of("type", ("function", "allowed_tools"))
    if kind == "function":
        return _Choice("named", (_named(choice, names),))
    if kind is None:
        raise choice.wrong("type", '"function" or "allowed_tools"')
    return _allowed(choice, names)


def _allowed(choice: FieldReader, names: Collection[str]) -> _Choice:
    allowed = choice.child("allowed_tools")
    if allowed is None:
        raise choice.wrong("allowed_tools", "an object with mode and tools")
    mode = allowed.one_of("mode", ("auto", "required"))
    if mode is None:
        raise allowed.wrong("mode", '"auto" or "required"')
    right = "a non-empty array of tools"
    items = allowed.array("tools", right)
    if not items:
        raise allowed.wrong("tools", right)
    chosen: list[str] = []
    for index, item in enumerate(items):
        tool = allowed.element("tools", index, item, "an object with type and function")
        tool.one_of("type", ("function",))
        chosen.append(_named(tool, names))
    return _Choice("auto" if mode == "auto" else "required", tuple(dict.fromkeys(chosen)))


def _named(tool: FieldReader, names: Collection[str]) -> str:
    function = tool.child("function")
    if function is None:
        raise tool.wrong("function", "an object with name")
    name = function.text("name")
    if name is None or name not in names:
        raise function.wrong("name", "the name of one of the tools")
    return name


def _function(tool: FieldReader) -> Function:
    if tool.raw("type", {"const": "function"}) != "function":
        raise tool.wrong("type", '"function"')
    function = tool.child("function")
    if function is None:
        raise tool.wrong("function", "an object with name, description and parameters")
    name = function.text("name", MAX_NAME, {"pattern": "^[A-Za-z0-9_.:/-]+$"})
    if not name or not NAME_CHARACTERS.issuperset(name):
        raise function.wrong("name", f"a string of 1 to {MAX_NAME} letters, digits and _-.:/")
    function.text("description")
    parameters = function.child("parameters")
    return Function(
        name,
        None if parameters is None else function.raw("parameters"),
        function.boolean("strict") or False,
        function.path("parameters"),
    )


def _enforced(function: Function, *, always: bool) -> Function:
    if not (function.enforced or always):
        return function
    return replace(function, parameters=_arguments(function), enforced=True)


def _arguments(function: Function) -> JSON:
    """The schema that the arguments of a function are to follow."""
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = _objects(check_schema(function.parameters, function.path))
    if schema is None:
        raise bad_field(function.path, "a schema that takes an object", function.parameters)
    return schema


def _objects(schema: JSON) -> JSON:
    """The part of a schema, as `check_schema` gives it, that takes objects; None if none does."""
    match schema:
        case {"type": "object"}:
            return schema
        case {"anyOf": list(branches)}:
            objects = [branch for branch in branches if _objects(branch) is not None]
            return {**schema, "anyOf": objects} if objects else None
        case {"type": _} | {"enum": _}:
            return None
        case _:
            return {"type": "object", "additionalProperties": {}}
