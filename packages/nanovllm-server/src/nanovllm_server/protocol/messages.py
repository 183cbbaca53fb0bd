"""Reads the messages of a request."""

from dataclasses import dataclass, field

from nanovllm_server.protocol.error import unsupported
from nanovllm_server.protocol.field_reader import FieldReader
from nanovllm_server.protocol.json import describe_value

MAX_MESSAGES = 10_000
# `function` is OpenAI's former name of the role `tool`.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class PastToolCall:
    """A tool call in an earlier answer.

    arguments: JSON text. arguments_path: path of the arguments in the request, for errors.
    """

    id: str | None
    name: str
    arguments: str
    arguments_path: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. content: None only for an assistant's message without text."""

    role: str
    content: str | None
    name: str | None = None
    reasoning: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[PastToolCall, ...] = ()

    @property
    def has_only_reasoning(self) -> bool:
        """Whether the message is an answer that ended within its reasoning."""
        return self.reasoning is not None and not self.content and not self.tool_calls


def parse_messages(body: FieldReader) -> tuple[Message, ...]:
    """Reads the messages. Raises ApiError."""
    expected = f"an array of 1 to {MAX_MESSAGES} messages"
    items = body.array("messages", expected, MAX_MESSAGES)
    if not items:
        raise body.wrong("messages", expected)
    return tuple(
        _read_message(body.element("messages", index, item, "an object with role and content"))
        for index, item in enumerate(items)
    )


def _read_message(fields: FieldReader) -> Message:
    role = fields.one_of("role", ROLES)
    if role is None:
        raise fields.wrong("role", "one of " + ", ".join(f'"{name}"' for name in ROLES))
    # Check these types for every role, although some roles ignore the values.
    name, tool_call_id = fields.text("name"), fields.text("tool_call_id")
    calls = _read_tool_calls(fields)
    # DeepSeek's clients send `reasoning_content`.
    reasoning = next((text for text in map(fields.text, ("reasoning", "reasoning_content")) if text), None)
    refusal = fields.text("refusal")
    if role != "assistant":
        role = "tool" if role == "function" else role
        content = read_content(fields, is_from_assistant=False)
        return Message(role=role, content=content, name=name, tool_call_id=tool_call_id)
    content = read_content(fields, is_from_assistant=True)
    # Chat templates read only the content, so the refusal becomes the content of a message without content.
    content = refusal if content is None else content
    return Message(role=role, content=content, name=name, reasoning=reasoning, tool_calls=calls)


def read_content(fields: FieldReader, *, is_from_assistant: bool) -> str | None:
    """Reads the field `content`: a string or text parts. Raises ApiError.

    is_from_assistant: the content may be null, and may have refusal parts.
    """
    content = fields.raw("content", {"type": ["string", "array"], "minItems": 1})
    # An assistant's content is null if an answer has no text, for example if the reasoning did not end.
    if isinstance(content, str) or (content is None and is_from_assistant):
        return content
    if not isinstance(content, list) or not content:
        raise fields.wrong("content", "a string or a non-empty array of text parts")
    # Join text parts with line breaks, as other servers do.
    expected = 'an object like {"type": "text", "text": "..."}'
    return "\n".join(
        _read_text_part(fields.element("content", index, part, expected), is_from_assistant=is_from_assistant)
        for index, part in enumerate(content)
    )


def _read_text_part(fields: FieldReader, *, is_from_assistant: bool) -> str:
    part_type = fields.raw("type", {"enum": ["text", "refusal"]})
    if not isinstance(part_type, str):
        raise fields.wrong("type", '"text"')
    if part_type != "text" and not (part_type == "refusal" and is_from_assistant):
        path = fields.path("type")
        raise unsupported(path, f'{path} must be "text", not {describe_value(part_type)}: this server takes text only')
    text = fields.text(part_type)
    if text is None:
        raise fields.wrong(part_type, "a string")
    return text


def _read_tool_calls(fields: FieldReader) -> tuple[PastToolCall, ...]:
    calls: list[PastToolCall] = []
    for index, item in enumerate(fields.array("tool_calls", "an array of tool calls") or []):
        call = fields.element("tool_calls", index, item, "an object with id, type and function")
        call.one_of("type", ("function",))
        function = call.child("function")
        if function is None:
            raise call.wrong("function", "an object with name and arguments")
        calls.append(_read_called_function(function, call.text("id")))
    # `function_call` is OpenAI's former field for a single call.
    if (function := fields.child("function_call")) is not None:
        if calls:
            raise fields.wrong("function_call", "left out when there are tool_calls")
        calls.append(_read_called_function(function, None))
    return tuple(calls)


def _read_called_function(function: FieldReader, call_id: str | None) -> PastToolCall:
    name, arguments = function.text("name", documented_schema={"minLength": 1}), function.text("arguments")
    if not name:
        raise function.wrong("name", "a non-empty string")
    if arguments is None:
        raise function.wrong("arguments", "a string of JSON")
    return PastToolCall(call_id, name, arguments, function.path("arguments"))
