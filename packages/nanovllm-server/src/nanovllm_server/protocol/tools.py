"""Reads the tools of a request: which functions the model may call, and which it must call."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, cast

from nanovllm_core.grammar_types import ParameterTypes
from nanovllm_server.protocol.error import bad_field
from nanovllm_server.protocol.field_reader import FieldReader, is_deeper
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.schema import require_small_schema

MAX_TOOLS = 1024
# Levels of nesting in a tool's definition, which templates write as JSON.
MAX_DEPTH = 100
MAX_NAME = 256
# Characters that no format of calls has to quote.
NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.:/")
CHOICES = ("auto", "none", "required")
# auto: the model may call functions. required: it must call one. named: it must call the one that the request names.
Mode = Literal["auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call.

    parameters: schema of the arguments; None if the request has none.
    is_enforced: the arguments must follow the schema.
    path: path of the field `parameters` in the request.
    """

    name: str
    parameters: JSON
    is_enforced: bool
    path: str

    @property
    def schema(self) -> JSON:
        """The schema that a grammar enforces: without `parameters`, an object without properties."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The tools of a request.

    definitions: all tools as the request defines them, for the prompt.
    functions: functions that the model may call, by name.
    restricted: `functions` are fewer than `definitions`.
    parallel: one answer may have several calls.
    """

    definitions: tuple[dict[str, JSON], ...]
    functions: dict[str, Function]
    mode: Mode
    restricted: bool
    parallel: bool

    def type_schemas(self, parameter_types: ParameterTypes) -> dict[str, JSON]:
        """By function name, a schema that declares the types of the parameters.

        parameter_types: types from the compiled grammar, by the path of `parameters`. They may differ from the types
            that the request declares, and the grammar writes the parameters by them.
        """
        return {
            name: parameter_types.get(function.path, function.parameters) for name, function in self.functions.items()
        }

    @property
    def constrains(self) -> bool:
        """Whether a grammar must restrict the model's calls."""
        return self.mode != "auto" or self.restricted or any(each.is_enforced for each in self.functions.values())


@dataclass(frozen=True, slots=True)
class _ToolChoice:
    mode: Mode | Literal["none"]
    # None for all functions.
    names: tuple[str, ...] | None = None


def parse_tools(body: FieldReader) -> Toolbox | None:
    """The tools of a request; None if the model may not call any. Raises ApiError."""
    expected = f"left out or an array of 1 to {MAX_TOOLS} tools"
    items = body.array("tools", expected, MAX_TOOLS)
    parallel = body.boolean("parallel_tool_calls")
    if items is None:
        if body.raw("tool_choice") not in (None, "none"):
            raise body.wrong("tool_choice", 'left out or "none" when there are no tools')
        return None
    if not items:
        raise body.wrong("tools", expected)
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
    # With "none", the model doesn't see the tools either.
    if choice.mode == "none":
        return None
    names = choice.names or tuple(functions)
    # If the model must call, arguments follow the schemas even if `strict` is false.
    return Toolbox(
        definitions=tuple(definitions),
        functions={name: _with_enforced_schema(functions[name], always=choice.mode != "auto") for name in names},
        mode=choice.mode,
        restricted=len(names) < len(functions),
        # With "named", the answer is one call.
        parallel=parallel is not False and choice.mode != "named",
    )


def _tool_choice(body: FieldReader, names: Collection[str]) -> _ToolChoice:
    choice = body.child("tool_choice") if isinstance(body.raw("tool_choice"), dict) else None
    if choice is None:
        match body.one_of("tool_choice", CHOICES):
            case None | "auto":
                return _ToolChoice("auto")
            case "none":
                return _ToolChoice("none")
            case _:
                return _ToolChoice("required")
    kind = choice.one_of("type", ("function", "allowed_tools"))
    if kind == "function":
        return _ToolChoice("named", (_named(choice, names),))
    if kind is None:
        raise choice.wrong("type", '"function" or "allowed_tools"')
    return _allowed(choice, names)


def _allowed(choice: FieldReader, names: Collection[str]) -> _ToolChoice:
    allowed = choice.child("allowed_tools")
    if allowed is None:
        raise choice.wrong("allowed_tools", "an object with mode and tools")
    mode = allowed.one_of("mode", ("auto", "required"))
    if mode is None:
        raise allowed.wrong("mode", '"auto" or "required"')
    expected = "a non-empty array of tools"
    items = allowed.array("tools", expected)
    if not items:
        raise allowed.wrong("tools", expected)
    chosen: list[str] = []
    for index, item in enumerate(items):
        tool = allowed.element("tools", index, item, "an object with type and function")
        tool.one_of("type", ("function",))
        chosen.append(_named(tool, names))
    return _ToolChoice("auto" if mode == "auto" else "required", tuple(dict.fromkeys(chosen)))


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


def _with_enforced_schema(function: Function, *, always: bool) -> Function:
    if not (function.is_enforced or always):
        return function
    require_small_schema(function.parameters, function.path)
    return replace(function, is_enforced=True)
