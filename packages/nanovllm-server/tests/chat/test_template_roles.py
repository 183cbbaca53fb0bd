"""Rendering adapts developer and system messages to the template."""

import pytest
from template_tokenizers import CONVERSATION, TemplateTokenizer, make_strict_template

from nanovllm_models.chat_formats import HERMES
from nanovllm_models.errors import TemplateError
from nanovllm_server.chat.rendering import Renderer
from nanovllm_server.protocol.messages import Message


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (lambda role, content: f"<{role}>{content}", "<system>be brief<user>hi"),
        (make_strict_template("system", "user"), "<system>be brief<user>hi"),
        (make_strict_template("system", "user", "developer"), "<developer>be brief<user>hi"),
        (lambda role, content: f"<{'boss' if role == 'developer' else role}>{content}", "<boss>be brief<user>hi"),
    ],
)
async def test_developer_becomes_system_unless_the_template_supports_it(template, expected):
    renderer = Renderer(TemplateTokenizer(template))
    assert (await renderer.render(CONVERSATION)).text == expected
    renderer.close()


class SystemPromptTokenizer(TemplateTokenizer):
    """Has a template that writes the system messages that `select` returns, before the other messages."""

    def __init__(self, select):
        super().__init__(lambda role, content: f"<{role}>{content}")
        self._select = select

    def render_chat(self, messages, **fields):
        system_messages = [message for message in messages if message["role"] == "system"]
        other_messages = [message for message in messages if message["role"] != "system"]
        return super().render_chat([*self._select(system_messages), *other_messages], **fields)


def refuse_several(messages):
    if len(messages) > 1:
        raise TemplateError("The system message must be the first message.")
    return messages


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (lambda messages: messages[:1], "<system>a\n\nb<user>hi"),
        (lambda messages: messages[-1:], "<system>a\n\nb<user>hi"),
        (refuse_several, "<system>a\n\nb<user>hi"),
        (list, "<system>a<system>b<user>hi"),
    ],
    ids=["first", "last", "one", "all"],
)
async def test_first_system_messages_are_joined_if_the_template_writes_one(select, expected):
    renderer = Renderer(SystemPromptTokenizer(select))
    messages = [Message(role=role, content=content) for role, content in (("system", "a"), ("developer", "b"))]
    assert (await renderer.render([*messages, Message(role="user", content="hi")])).text == expected
    renderer.close()


@pytest.mark.parametrize(
    ("select", "omitted"),
    [
        (list, []),
        (refuse_several, []),
        (lambda messages: messages[:1], ["all but one system message, if other messages separate them"]),
    ],
    ids=["all", "one", "first"],
)
def test_omitted_system_messages_are_found(select, omitted):
    renderer = Renderer(SystemPromptTokenizer(select), HERMES)
    assert renderer.find_omitted_content() == omitted
    renderer.close()
