"""Roles that a template knows and roles that it merely prints, and calls in the style that it takes."""

import json

import pytest

from nanovllm_models.errors import TemplateError, TemplateValueError
from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.messages import Message, ToolCall
from nanovllm_server.protocol.template import TemplateOptions
from nanovllm_server.render import Renderer

CONVERSATION = (Message(role="developer", content="be brief"), Message(role="user", content="hi"))


class TemplateTokenizer:
    """Characters for tokens, and a function for a template."""

    def __init__(self, template):
        self._template = template

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [ord(character) for character in text]

    def render_chat(self, messages, *, template_values=None, **_):
        return "".join(self._template(message["role"], message["content"]) for message in messages)


def strict(*known):
    def template(role, content):
        if role not in known:
            raise TemplateError(f"unknown role {role}")
        return f"<{role}>{content}"

    return template


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (lambda role, content: f"<{role}>{content}", "<system>be brief<user>hi"),
        (strict("system", "user"), "<system>be brief<user>hi"),
        (strict("system", "user", "developer"), "<developer>be brief<user>hi"),
        (lambda role, content: f"<{'boss' if role == 'developer' else role}>{content}", "<boss>be brief<user>hi"),
    ],
)
async def test_developer_is_system_unless_the_template_knows_better(template, expected):
    renderer = Renderer(TemplateTokenizer(template))
    assert (await renderer.render(CONVERSATION)).text == expected
    renderer.close()


CALLS = (
    Message(role="user", content="hi"),
    Message(role="assistant", content=None, tool_calls=(ToolCall("1", "f", '{"x": 1}'), ToolCall("2", "g", ""))),
    Message(role="tool", content="4", tool_call_id="1"),
)


class CallTokenizer(TemplateTokenizer):
    """A template that writes calls too, and fails at what it doesn't take."""

    def __init__(self, write_call):
        self._write_call = write_call

    def render_chat(self, messages, *, template_values=None, **_):
        try:
            return "".join(map(self._write, messages))
        except (TypeError, AttributeError) as error:
            raise TemplateError(str(error)) from error

    def _write(self, message):
        calls = [call["function"] for call in message.get("tool_calls", ())]
        written = "".join(f"[{call['name']} {self._write_call(call['arguments'])}]" for call in calls)
        return message["content"] + ";" + written


def as_items(arguments):
    return ",".join(f"{key}={value}" for key, value in arguments.items())


def as_json(arguments):
    return json.dumps(arguments)


def as_text(arguments):
    return arguments + ""


def as_either(arguments):
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


@pytest.mark.parametrize(
    ("write_call", "expected"),
    [
        (as_items, "hi;;[f x=1][g ]4;"),
        (as_json, 'hi;;[f {"x": 1}][g {}]4;'),
        (as_text, 'hi;;[f {"x": 1}][g {}]4;'),
        (as_either, 'hi;;[f {"x": 1}][g {}]4;'),
    ],
)
async def test_calls_go_in_as_the_template_takes_them(write_call, expected):
    renderer = Renderer(CallTokenizer(write_call))
    assert (await renderer.render(CALLS)).text == expected
    renderer.close()


async def test_a_call_that_was_cut_off_goes_in_as_it_is_or_is_refused():
    cut = Message(role="assistant", content="", tool_calls=(ToolCall("1", "f", '{"x'),))
    renderer = Renderer(CallTokenizer(as_json))
    assert (await renderer.render([cut])).text == r';[f "{\"x"]'
    renderer.close()
    renderer = Renderer(CallTokenizer(as_items))
    with pytest.raises(ApiError, match="messages: ") as refused:
        await renderer.render([cut])
    assert (refused.value.status, refused.value.code) == (400, "template_error")
    renderer.close()


async def test_a_value_that_the_template_can_not_be_given_is_refused_by_its_field():
    class Reserved(TemplateTokenizer):
        def render_chat(self, messages, *, template_values=None, **_):
            if template_values:
                raise TemplateValueError("tokenize can't be given to the chat template")
            return ""

    renderer = Renderer(Reserved(None))
    with pytest.raises(ApiError) as refused:
        await renderer.render(CONVERSATION, None, TemplateOptions(values={"tokenize": True}))
    assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")
    renderer.close()


def test_template_that_refuses_everything_is_found_at_the_start():
    with pytest.raises(TemplateError):
        Renderer(TemplateTokenizer(strict()))
