"""Required calls that are cut off. The markup of a required call is never content."""

import pytest
from sse import parse_events

from nanovllm_models.chat_formats import DEEPSEEK_R1, HERMES, LLAMA, MINIMAX_M2, QWEN3_CODER, THINK, ChatFormat
from nanovllm_server.chat.tool_prompt import write_call
from nanovllm_server.parsing.model_format import ModelFormat

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
NAMED_TOOL_CHOICE = {"type": "function", "function": {"name": "get_weather"}}
FORMATS = [HERMES, QWEN3_CODER, MINIMAX_M2, DEEPSEEK_R1, LLAMA]


def join_stream(data):
    content, arguments, finish_reason = None, None, None
    for event in parse_events(data):
        (choice,) = event["choices"]
        delta, finish_reason = choice["delta"], choice["finish_reason"]
        if delta.get("content") is not None:
            content = (content or "") + delta["content"]
        for call in delta.get("tool_calls", []):
            arguments = (arguments or "") + call["function"]["arguments"]
    return content, arguments, finish_reason


@pytest.mark.parametrize("tool_choice", ["required", NAMED_TOOL_CHOICE], ids=["required", "named"])
@pytest.mark.parametrize("call_format", FORMATS, ids=lambda form: type(form).__name__ + form.begin)
@pytest.mark.parametrize("reasoning", ["", "<think>Hm.</think>\n\n"])
async def test_markup_of_a_cut_call_is_never_content(
    post, engine, service, vocabulary, reasoning, call_format, tool_choice
):
    service.model_format = ModelFormat(ChatFormat(THINK, call_format), vocabulary)
    answer = reasoning + write_call(call_format, "get_weather", {"city": "Paris"})
    engine.reply = [*answer.encode()]
    engine.burst = 5
    num_tokens, has_call = len(engine.reply), False
    for max_tokens in [*range(len(reasoning.encode()) + 1, num_tokens, 3), num_tokens - 1]:
        fields = {"tools": TOOLS, "tool_choice": tool_choice, "max_tokens": max_tokens}
        whole = (await (await post(**fields)).get_json())["choices"][0]
        message = whole["message"]
        assert message["content"] is None, answer[: max_tokens + 1]
        calls = message.get("tool_calls")
        has_call = has_call or bool(calls)
        streamed = join_stream(await (await post(**fields, stream=True)).get_data())
        assert streamed == (None, calls and calls[0]["function"]["arguments"], whole["finish_reason"])
        if not calls:
            assert whole["finish_reason"] == "length"
    assert has_call


async def test_markup_of_a_cut_call_stays_content_where_calls_are_optional(post, engine, service, vocabulary):
    service.model_format = ModelFormat(ChatFormat(None, HERMES), vocabulary)
    engine.reply = [*b'<tool_call>\n{"na']
    (choice,) = (await (await post(tools=TOOLS)).get_json())["choices"]
    assert choice["message"]["content"] == '<tool_call>\n{"na'
