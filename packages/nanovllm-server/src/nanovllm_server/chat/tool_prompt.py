"""Tools and their calls as plain text, for models whose chat template has no place for them.

The model is told in a system message which functions there are and how to call them, in the format that the parser
reads; its calls go back as it wrote them, and what they gave as the user's words. This room must not know how prompts
are rendered.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from nanovllm_models.chat_formats import FencedCalls, JsonCalls, ToolCallFormat, XmlCalls
from nanovllm_server.protocol.json import JSON

Plain = dict[str, Any]


def with_tools(messages: Sequence[Plain], tools: Sequence[Mapping[str, Any]], form: ToolCallFormat) -> list[Plain]:
    """The conversation, its system message made to say what may be called and how."""
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
    """The conversation, with calls that were made and their results as text."""
    told: list[Plain] = []
    for message in messages:
        as_text = _as_text(message, form)
        if message["role"] == "tool" and told and told[-1]["role"] == "user":
            # Turns alternate, whatever the number of calls.
            told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{as_text['content']}"}
        else:
            told.append(as_text)
    return told


def written_call(form: ToolCallFormat, name: str, arguments: JSON) -> str:
    """A call as a model of that format writes it; arguments that are a string, as of a call cut off, as they stand."""
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
