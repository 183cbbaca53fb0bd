"""Reads the tools of a request: the functions that the model may call or must call."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, cast

from nanovllm_core.grammar_types import ParameterTypes
from nanovllm_server.protocol.error import bad_field
from nanovllm_server.protocol.field_reader import FieldReader, exceeds_depth
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.schema import require_small_schema

MAX_TOOLS = 1024
# Maximum nesting depth of a tool's definition, which chat templates write as JSON.
MAX_DEFINITION_DEPTH = 100
MAX_FUNCTION_NAME_LENGTH = 256
# Characters of function names. No tool call format needs to escape these characters.
FUNCTION_NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.:/")
TOOL_CHOICES = ("auto", "none", "required")
# auto: calls are allowed. required: the answer consists of calls. named: the answer is a call of a given function.
ToolMode = Literal["auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call.

    parameters: schema of the arguments; None if the request gives no schema for the function.
    is_enforced: the arguments must follow the schema.
    path: path of the field `parameters` in the request.
    """

    name: str
    parameters: JSON
    is_enforced: bool
    path: str

    @property
    def enforced_schema(self) -> JSON:
        """The schema that the arguments must follow; None allows any object."""
        no_properties: JSON = {"type": "object", "properties": {}, "additionalProperties": False}
        return None if not self.is_enforced else no_properties if self.parameters is None else self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """The tools of a request.

    definitions: all tools of the request, for the prompt. Their functions have no null fields.
    is_restricted: `functions` lacks some functions of `definitions`.
    """

    definitions: tuple[dict[str, JSON], ...]
    functions: dict[str, Function]
    mode: ToolMode
    is_restricted: bool
    allows_parallel_calls: bool

    def type_schemas(self, parameter_types: ParameterTypes) -> dict[str, JSON]:
        """Returns schemas that state the types of each function's parameters, by function name.

        parameter_types: schemas by `Function.path`. If it has a schema for a function, the model follows that schema
            instead of the request's.
        """
        return {
            name: parameter_types.get(function.path, function.parameters) for name, function in self.functions.items()
        }

    @property
    def needs_grammar(self) -> bool:
        """Whether a grammar must restrict the model's calls."""
        has_enforced_function = any(function.is_enforced for function in self.functions.values())
        return self.mode != "auto" or self.is_restricted or has_enforced_function


@dataclass(frozen=True, slots=True)
class _ToolChoice:
    """The field `tool_choice`. names: functions that the model may call; None for all functions."""

    mode: ToolMode | Literal["none"]
    names: tuple[str, ...] | None = None


def parse_tools(body: FieldReader) -> Toolbox | None:
    """Reads the tools of a request. Returns None if calls are not allowed. Raises ApiError."""
    expected = f"left out or an array of 1 to {MAX_TOOLS} tools"
    items = body.array("tools", expected, MAX_TOOLS)
    allows_parallel_calls = body.boolean("parallel_tool_calls")
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
        if exceeds_depth(item, MAX_DEFINITION_DEPTH):
            raise body.wrong("tools", f"an array of tools, each nested at most {MAX_DEFINITION_DEPTH} deep")
        function = _read_function(tool)
        if function.name in functions:
            raise bad_field(tool.path("function.name"), "different from those of the other tools", function.name)
        definitions.append(_make_definition(cast(dict[str, JSON], item)))
        functions[function.name] = function
    choice = _read_tool_choice(body, functions.keys())
    # With "none", the prompt does not show the tools either.
    if choice.mode == "none":
        return None
    names = choice.names or tuple(functions)
    # If the model must call a function, the arguments follow the schema even if `strict` is false.
    return Toolbox(
        definitions=tuple(definitions),
        functions={name: _with_enforcement(functions[name], is_call_required=choice.mode != "auto") for name in names},
        mode=choice.mode,
        is_restricted=len(names) < len(functions),
        allows_parallel_calls=allows_parallel_calls is not False and choice.mode != "named",
    )


def _read_tool_choice(body: FieldReader, names: Collection[str]) -> _ToolChoice:
    choice = body.child("tool_choice") if isinstance(body.raw("tool_choice"), dict) else None
    if choice is None:
        match body.one_of("tool_choice", TOOL_CHOICES):
            case None | "auto":
                return _ToolChoice("auto")
            case "none":
                return _ToolChoice("none")
            case _:
                return _ToolChoice("required")
    kind = choice.one_of("type", ("function", "allowed_tools"))
    if kind == "function":
        return _ToolChoice("named", (_read_function_name(choice, names),))
    if kind is None:
        raise choice.wrong("type", '"function" or "allowed_tools"')
    return _read_allowed_tools(choice, names)


def _read_allowed_tools(choice: FieldReader, names: Collection[str]) -> _ToolChoice:
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
    chosen_names: list[str] = []
    for index, item in enumerate(items):
        tool = allowed.element("tools", index, item, "an object with type and function")
        tool.one_of("type", ("function",))
        chosen_names.append(_read_function_name(tool, names))
    return _ToolChoice("auto" if mode == "auto" else "required", tuple(dict.fromkeys(chosen_names)))


def _read_function_name(tool: FieldReader, names: Collection[str]) -> str:
    function = tool.child("function")
    if function is None:
        raise tool.wrong("function", "an object with name")
    name = function.text("name")
    if name is None or name not in names:
        raise function.wrong("name", "the name of one of the tools")
    return name


def _read_function(tool: FieldReader) -> Function:
    if tool.raw("type", {"const": "function"}) != "function":
        raise tool.wrong("type", '"function"')
    function = tool.child("function")
    if function is None:
        raise tool.wrong("function", "an object with name, description and parameters")
    name = function.text("name", MAX_FUNCTION_NAME_LENGTH, {"pattern": "^[A-Za-z0-9_.:/-]+$"})
    if not name or not FUNCTION_NAME_CHARACTERS.issuperset(name):
        raise function.wrong("name", f"a string of 1 to {MAX_FUNCTION_NAME_LENGTH} letters, digits and _-.:/")
    function.text("description")
    return Function(
        name,
        function.mapping("parameters"),
        function.boolean("strict") or False,
        function.path("parameters"),
    )


def _make_definition(tool: dict[str, JSON]) -> dict[str, JSON]:
    # Some chat templates write a null description as "None".
    fields = cast(dict[str, JSON], tool["function"])
    return {**tool, "function": {name: value for name, value in fields.items() if value is not None}}


def _with_enforcement(function: Function, *, is_call_required: bool) -> Function:
    if not (function.is_enforced or is_call_required):
        return function
    require_small_schema(function.parameters, function.path)
    return replace(function, is_enforced=True)
