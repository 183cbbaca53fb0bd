"""Writes tools and calls as plain text, for models whose chat template does not show them.

The system message describes the functions and the format of a call. Past calls become text of the assistant, and their
results become text of the user.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from nanovllm_models.chat_formats import FencedCalls, JsonCalls, ToolCallFormat, XmlCalls
from nanovllm_server.protocol.json import JSON

Plain = dict[str, Any]


def with_tools(messages: Sequence[Plain], tools: Sequence[Mapping[str, Any]], form: ToolCallFormat) -> list[Plain]:
    """Adds a description of the functions and of the format of calls to the system message."""
    example = written_call(form, "NAME", {"PARAMETER": "VALUE"})
    functions = "\n".join(orjson.dumps(tool["function"]).decode() for tool in tools)
    text = (
        f"You may call these functions, described in JSON, one a line:\n{functions}\n\n"
        f"To call one, answer in this form, with its name and its parameters:\n{example}"
    )
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [{**first, "content": f"{first['content']}\n\n{text}".lstrip()}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_history_as_text(messages: Sequence[Plain], form: ToolCallFormat) -> list[Plain]:
    """The conversation with past calls and their results written as text."""
    rewritten: list[Plain] = []
    for message in messages:
        as_text = _as_text(message, form)
        if message["role"] == "tool" and rewritten and rewritten[-1]["role"] == "user":
            # Templates expect user and assistant to alternate: several results are one message.
            rewritten[-1] = {**rewritten[-1], "content": f"{rewritten[-1]['content']}\n{as_text['content']}"}
        else:
            rewritten.append(as_text)
    return rewritten


def written_call(form: ToolCallFormat, name: str, arguments: JSON) -> str:
    """A call as a model with this format writes it. arguments: a string (from a call that was cut off) is unchanged."""
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    match form:
        case JsonCalls():
            call = f'{{"name": "{name}", "{form.arguments[0]}": {text}}}'
            return call if form.end is None else f"{form.begin}\n{call}\n{form.end}"
        case FencedCalls():
            call = f"{form.kind}{form.name_begin}{name}\n{form.fence_begin}\n{text}\n{form.fence_end}"
            return f"{form.begin}{form.call_begin}{call}{form.call_end}{form.end}"
        case XmlCalls():
            values = arguments if isinstance(arguments, dict) else {}
            parameters = "".join(_element(form, key, value) for key, value in values.items())
            return f"{form.begin}\n{form.call_begin}{name}{form.name_end}\n{parameters}{form.call_end}\n{form.end}"


def _element(form: XmlCalls, key: str, value: JSON) -> str:
    edge = "\n" if form.newlines else ""
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return f"{form.parameter_begin}{key}{form.key_end}{edge}{text}{edge}{form.parameter_end}\n"


def _as_text(message: Plain, form: ToolCallFormat) -> Plain:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    made = [call["function"] for call in message.get("tool_calls", ())]
    calls = [written_call(form, call["name"], call["arguments"]) for call in made]
    if not calls:
        return message
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([*([message["content"]] if message["content"] else []), *calls])}
