"""Tokenizers whose chat template is a Python function."""

import numpy as np

from nanovllm_models.errors import TemplateError
from nanovllm_server.protocol.messages import Message

CONVERSATION = (Message(role="developer", content="be brief"), Message(role="user", content="hi"))


class TemplateTokenizer:
    def __init__(self, template):
        self._template = template

    def encode(self, text, *, add_special_tokens, max_cached_tokens=None):
        assert not add_special_tokens
        return np.array([ord(character) for character in text], np.int32)

    def render_chat(self, messages, *, template_values=None, **_):
        return "".join(self._template(message["role"], message["content"]) for message in messages)


def make_strict_template(*known_roles):
    def template(role, content):
        if role not in known_roles:
            raise TemplateError(f"unknown role {role}")
        return f"<{role}>{content}"

    return template
