"""Writes tools, calls and results of calls as plain text, for models whose chat template does not show tools."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from nanovllm_models.chat_formats import FencedCalls, JsonCalls, ToolCallFormat, XmlCalls
from nanovllm_server.protocol.json import JSON

# A message in the form that chat templates read.
TemplateMessage = dict[str, Any]


def write_tools_as_text(
    messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]], call_format: ToolCallFormat
) -> list[TemplateMessage]:
    """Describes the functions and the format of calls in the system message."""
    example_call = write_call(call_format, "NAME", {"PARAMETER": "VALUE"})
    function_lines = "\n".join(orjson.dumps(tool["function"]).decode() for tool in tools)
    text = (
        f"You may call these functions, described in JSON, one a line:\n{function_lines}\n\n"
        f"To call one, answer in this form, with its name and its parameters:\n{example_call}"
    )
    if messages and messages[0]["role"] == "system":
        system_message = messages[0]
        return [{**system_message, "content": f"{system_message['content']}\n\n{text}".lstrip()}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def write_past_calls_as_text(messages: Sequence[TemplateMessage], call_format: ToolCallFormat) -> list[TemplateMessage]:
    """Rewrites calls as text of assistant messages, and results of calls as text of user messages."""
    rewritten: list[TemplateMessage] = []
    for message in messages:
        text_message = _to_text_message(message, call_format)
        if message["role"] == "tool" and rewritten and rewritten[-1]["role"] == "user":
            # Join several results into one message, because templates expect user and assistant to alternate.
            rewritten[-1] = {**rewritten[-1], "content": f"{rewritten[-1]['content']}\n{text_message['content']}"}
        else:
            rewritten.append(text_message)
    return rewritten


def write_call(call_format: ToolCallFormat, name: str, arguments: JSON) -> str:
    """Writes a call in the model's format. arguments: an object, or incomplete JSON text if the call was cut off."""
    text = arguments if isinstance(arguments, str) else _write_json(arguments)
    match call_format:
        case JsonCalls() as tags:
            call = f'{{"name": "{name}", "{tags.argument_keys[0]}": {text}}}'
            return call if tags.end is None else f"{tags.begin}\n{call}\n{tags.end}"
        case FencedCalls() as tags:
            call = f"{tags.kind}{tags.name_begin}{name}\n{tags.fence_begin}\n{text}\n{tags.fence_end}"
            return f"{tags.begin}{tags.call_begin}{call}{tags.call_end}{tags.end}"
        case XmlCalls() as tags:
            values = arguments if isinstance(arguments, dict) else {}
            parameters = "".join(_write_parameter(tags, key, value) for key, value in values.items())
            return f"{tags.begin}\n{tags.call_begin}{name}{tags.name_end}\n{parameters}{tags.call_end}\n{tags.end}"


def _write_parameter(tags: XmlCalls, key: str, value: JSON) -> str:
    line_break = "\n" if tags.wraps_values_in_line_breaks else ""
    text = value if isinstance(value, str) else _write_json(value)
    return f"{tags.parameter_begin}{key}{tags.key_end}{line_break}{text}{line_break}{tags.parameter_end}\n"


def _write_json(value: JSON) -> str:
    # Arguments may have integers beyond 64 bits, which `orjson` can't write.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _to_text_message(message: TemplateMessage, call_format: ToolCallFormat) -> TemplateMessage:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [write_call(call_format, function["name"], function["arguments"]) for function in functions]
    if not calls:
        return message
    other_fields = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**other_fields, "content": "\n".join([*([message["content"]] if message["content"] else []), *calls])}
