"""The tools of a request: JSON in, what may be called out. This room must not know how models call anything."""

from dataclasses import dataclass
from typing import cast

from nanovllm_server.protocol.error import ApiError, bad_field, unsupported
from nanovllm_server.protocol.fields import Fields
from nanovllm_server.protocol.json import JSON

MAX_NAME = 256
# Names must stand in every format unquoted.
NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.:/")
CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What the model may call. definitions: as the request has them. schemas: of each function's parameters, by name.

    parallel: whether it may make several calls in one answer.
    """

    definitions: tuple[dict[str, JSON], ...]
    schemas: dict[str, JSON]
    parallel: bool


def parse_tools(body: Fields) -> Toolbox | None:
    """The tools of a request; None when none may be called. Raises ApiError."""
    right = "left out or a non-empty array of tools"
    items = body.array("tools", right)
    parallel = body.boolean("parallel_tool_calls")
    choice = _tool_choice(body)
    if items is None:
        if choice not in (None, "none"):
            raise body.wrong("tool_choice", 'left out or "none" when there are no tools')
        return None
    if not items:
        raise body.wrong("tools", right)
    definitions: list[dict[str, JSON]] = []
    schemas: dict[str, JSON] = {}
    for index, item in enumerate(items):
        tool = body.element("tools", index, item, "an object with type and function")
        name, schema = _function(tool)
        if name in schemas:
            raise bad_field(tool.path("function.name"), "different from those of the other tools", name)
        definitions.append(cast(dict[str, JSON], item))
        schemas[name] = schema
    # What the model does not see it does not call.
    return None if choice == "none" else Toolbox(tuple(definitions), schemas, parallel is not False)


def _tool_choice(body: Fields) -> JSON:
    choice = body.raw("tool_choice")
    if isinstance(choice, dict) or choice == "required":
        raise unsupported(
            "tool_choice",
            'tool_choice that requires or restricts calls is not supported yet: leave it out or set it to "auto"',
        )
    return body.one_of("tool_choice", CHOICES)


def _function(tool: Fields) -> tuple[str, JSON]:
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
    if function.boolean("strict"):
        raise _strict(function)
    return name, None if parameters is None else function.raw("parameters")


def _strict(function: Fields) -> ApiError:
    path = function.path("strict")
    return unsupported(path, f"{path} is not supported yet: leave it out or set it to false")
