"""Roles that a template knows and roles that it merely prints."""

import pytest

from nanovllm_models.errors import TemplateError
from nanovllm_server.protocol.messages import Message
from nanovllm_server.render import Renderer

CONVERSATION = (Message(role="developer", content="be brief"), Message(role="user", content="hi"))


class TemplateTokenizer:
    """Characters for tokens, and a function for a template."""

    def __init__(self, template):
        self._template = template

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [ord(character) for character in text]

    def render_chat(self, messages, *, tools=None, template_values=None):
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


def test_template_that_refuses_everything_is_found_at_the_start():
    with pytest.raises(TemplateError):
        Renderer(TemplateTokenizer(strict()))
