"""A message that ended within its reasoning is continued where its reasoning ended."""

import numpy as np
import pytest

from nanovllm_models.chat_formats import THINK
from nanovllm_server.chat.rendering import Renderer
from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.messages import Message
from nanovllm_server.protocol.template import TemplateOptions

QUESTION = Message(role="user", content="hi")
CUT_REASONING = Message(role="assistant", content=None, reasoning="I think that")
CONTINUE = TemplateOptions(add_generation_prompt=False, continue_final_message=True)


class TurnTokenizer:
    """Has a template that begins the model's turn with `opening`."""

    def __init__(self, opening):
        self._opening = opening

    def encode(self, text, *, add_special_tokens, max_cached_tokens=None):
        return np.array([ord(character) for character in text], np.int32)

    def render_chat(self, messages, *, add_generation_prompt=True, continue_final_message=False, **_):
        assert not continue_final_message
        turns = "".join(f"[{message['role']}]{message['content']}" for message in messages)
        return turns + f"[assistant]{self._opening}" * add_generation_prompt


@pytest.mark.parametrize(
    ("opening", "expected"),
    [("", "<think>\n"), ("<think>", "<think>\n"), ("<think>\n", "<think>\n"), ("\n", "\n<think>\n")],
)
async def test_cut_off_reasoning_is_continued_in_a_new_turn(opening, expected):
    renderer = Renderer(TurnTokenizer(opening), reasoning_format=THINK)
    prompt = await renderer.render([QUESTION, CUT_REASONING], None, CONTINUE)
    renderer.close()
    assert prompt.text == f"[user]hi[assistant]{expected}I think that"
    assert prompt.continued_text == "<think>\nI think that"


@pytest.mark.parametrize(
    ("opening", "reasoning_format", "reason"),
    [("", None, "this model has no reasoning"), ("<think>\n\n</think>\n\n", THINK, "reasoning is turned off")],
)
async def test_reasoning_that_cannot_be_continued_is_a_400(opening, reasoning_format, reason):
    renderer = Renderer(TurnTokenizer(opening), reasoning_format=reasoning_format)
    with pytest.raises(ApiError, match=reason) as refused:
        await renderer.render([QUESTION, CUT_REASONING], None, CONTINUE)
    renderer.close()
    assert (refused.value.status, refused.value.param) == (400, "messages[1].reasoning")
