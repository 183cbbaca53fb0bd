from dataclasses import replace

import openai
import pytest
from sse import parse_events

from nanovllm_models.chat_formats import DEEPSEEK_R1, HERMES, LLAMA, MINIMAX_M2, QWEN3_CODER, THINK, ChatFormat
from nanovllm_server.chat.rendering import Renderer
from nanovllm_server.parsing.model_format import ModelFormat

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "ping"}},
]
QWEN = ChatFormat(THINK, HERMES)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
R1_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{}\n```<｜tool▁call▁end｜>"
ANSWERS = {
    "text": (QWEN, "Hello."),
    "reasoning": (QWEN, "<think>\nHm.\n</think>\n\nHéllo 😀."),
    "reasoning alone": (QWEN, "<think>\nHm."),
    "nothing": (QWEN, ""),
    "a call": (QWEN, CALL),
    "everything": (QWEN, f"<think>\nHm.\n</think>\n\nFirst.\n{CALL}\n{PING}\nThen."),
    "reasoning after a call": (QWEN, f"<think>\nMaybe {CALL} but not yet.\n</think>\n\nHello."),
    "text after a call in reasoning": (QWEN, f"<think>\nMaybe.\n{CALL}\nThen. {PING}\nDone."),
    "no call": (QWEN, "<tool_call>no</tool_call>\n"),
    "coder": (
        ChatFormat(None, QWEN3_CODER),
        "Ok.\n<tool_call>\n<function=get_weather>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    ),
    "minimax": (
        ChatFormat(THINK, MINIMAX_M2),
        '<think>Hm.</think>\n<minimax:tool_call>\n<invoke name="ping"></invoke>\n</minimax:tool_call>',
    ),
    "deepseek": (
        ChatFormat(THINK, DEEPSEEK_R1),
        f"<think>Hm.</think>Ok<｜tool▁calls▁begin｜>{R1_CALL}\n{R1_CALL}<｜tool▁calls▁end｜>",
    ),
    "llama": (ChatFormat(None, LLAMA), '{"name": "ping", "parameters": {"a": 1}}; {"name": "ping", "parameters": {}}'),
}


@pytest.fixture
def set_reply(engine, service, vocabulary):
    def set_reply(form, reply):
        service.model_format = ModelFormat(form, vocabulary)
        engine.reply = [*reply.encode()]

    return set_reply


@pytest.fixture
async def sdk(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def post_chat(post):
    async def post_chat(**fields):
        response = await post(**{"tools": TOOLS, **fields})
        assert response.status_code == 200, await response.get_data()
        body = await response.get_json()
        return without_call_ids(body["choices"][0]), body["usage"]

    return post_chat


def without_call_ids(choice):
    calls = choice["message"].get("tool_calls", [])
    ids = [call.pop("id") for call in calls]
    assert len(set(ids)) == len(ids)
    assert all(name.startswith("call_") for name in ids)
    return choice


def make_call(name="get_weather", arguments='{"city": "Paris"}'):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def join_chunks(chunks):
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    message = {"refusal": None, **choices[0]["delta"]}
    assert set(choices[0]["delta"]) == {"role", "content"}
    for choice in choices[1:]:
        delta = choice["delta"]
        assert "role" not in delta
        for name in ("content", "reasoning", "reasoning_content"):
            if name in delta:
                assert delta[name]
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            index = call.pop("index")
            if index == len(calls):
                assert set(call) == {"id", "type", "function"}
                assert call["function"]["arguments"] == ""
                calls.append(call)
            else:
                assert index == len(calls) - 1
                assert set(call) == {"function"}
                assert set(call["function"]) == {"arguments"}
                calls[index]["function"]["arguments"] += call["function"]["arguments"]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    return without_call_ids(
        {
            "index": 0,
            "message": message,
            "logprobs": {"content": entries, "refusal": None} if entries else None,
            "finish_reason": choices[-1]["finish_reason"],
            "stop_reason": choices[-1]["stop_reason"],
        }
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 40},
        {"stop": ["."]},
        {"parallel_tool_calls": False},
        {"include_reasoning": False},
        {"logprobs": True, "top_logprobs": 1},
        {"tools": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("burst", [1, 4, 500])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_stream_equals_complete_answer(post_chat, post, set_reply, engine, answer, burst, fields):
    set_reply(*answer)
    choice, usage = await post_chat(**fields)
    engine.burst = burst
    stream_fields = {"tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}, **fields}
    response = await post(**stream_fields)
    chunks = parse_events(await response.get_data())
    assert join_chunks(chunks) == choice
    assert chunks[-1]["usage"] == usage


@pytest.mark.parametrize("burst", [1, 7])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_official_client_joins_a_stream_to_the_complete_answer(sdk, set_reply, engine, answer, burst):
    set_reply(*answer)
    engine.burst = burst
    fields = {"model": "scripted", "messages": MESSAGES, "tools": TOOLS}
    whole = await sdk.chat.completions.create(**fields)
    async with sdk.chat.completions.stream(**fields) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()

    def sent_fields(completion):
        message = completion.choices[0].message.to_dict()
        calls = [
            (call["function"]["name"], call["function"]["arguments"]) for call in message.pop("tool_calls", None) or []
        ]
        # The SDK's stream helper adds fields that the server does not send.
        sent = ("role", "content", "refusal", "reasoning", "reasoning_content")
        return {name: message[name] for name in sent if name in message}, calls

    assert sent_fields(streamed) == sent_fields(whole)
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason


async def test_reasoning_and_content_are_separate_fields(post_chat, set_reply):
    set_reply(QWEN, "<think>\nHm.\n</think>\n\nHello.")
    choice, usage = await post_chat()
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hello.",
        "refusal": None,
        "reasoning": "Hm.",
        "reasoning_content": "Hm.",
    }
    assert choice["finish_reason"] == "stop"
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("<think>\nHm.\n</think>")
    assert usage["completion_tokens"] == len("<think>\nHm.\n</think>\n\nHello.") + 1


async def test_end_tag_after_a_call_in_reasoning_is_not_content(post_chat, set_reply):
    set_reply(QWEN, f"<think>\nMaybe {CALL} but rather not.\n</think>\n\nHello")
    choice, _ = await post_chat(stop="not")
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("Maybe but rather not.", "Hello")
    assert message["tool_calls"] == [make_call()]


async def test_unfinished_reasoning_has_no_content(post_chat, set_reply):
    set_reply(QWEN, "<think>\nHm.")
    choice, usage = await post_chat(max_tokens=10)
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "Hm")
    assert choice["finish_reason"] == "length"
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 10


@pytest.mark.parametrize(
    ("opening", "reasoning"), [("<think>\n", "Hm."), ("<think>\n\n</think>\n\n", None), ("", None)]
)
async def test_prompt_decides_whether_the_answer_begins_with_reasoning(post_chat, set_reply, opening, reasoning):
    set_reply(QWEN, "Hm.</think>\n\nHello.")
    choice, _ = await post_chat(chat_template_kwargs={"opening": opening})
    assert choice["message"].get("reasoning") == reasoning
    assert choice["message"]["content"] == ("Hello." if reasoning else "Hm.</think>\n\nHello.")


async def test_reasoning_is_omitted_on_request(post_chat, set_reply):
    set_reply(QWEN, "<think>\nHm.\n</think>\n\nHello.")
    choice, usage = await post_chat(include_reasoning=False)
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
    set_reply(QWEN, "<think>\nHm.")
    choice, _ = await post_chat(include_reasoning=False)
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}


async def test_call_is_returned_as_tool_calls(post_chat, set_reply):
    set_reply(QWEN, CALL)
    choice, usage = await post_chat()
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None, "tool_calls": [make_call()]}
    assert choice["finish_reason"] == "tool_calls"
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_text_beside_calls_is_content(post_chat, set_reply):
    set_reply(QWEN, f"First.\n{CALL}\n{PING}\nThen.")
    choice, _ = await post_chat()
    assert choice["message"]["content"] == "First.\nThen."
    assert choice["message"]["tool_calls"] == [make_call(), make_call("ping", "{}")]
    assert choice["finish_reason"] == "tool_calls"


async def test_call_that_is_cut_off_has_finish_reason_length(post_chat, set_reply, engine):
    set_reply(QWEN, CALL)
    whole, _ = await post_chat(max_tokens=CALL.index("Pa"))
    assert whole["message"]["tool_calls"] == [make_call(arguments='{"city": "')]
    assert whole["finish_reason"] == "length"
    set_reply(QWEN, CALL[: CALL.index("Pa")])
    ended, _ = await post_chat()
    assert ended == whole


async def test_call_that_is_cut_off_after_the_text_of_its_end_has_finish_reason_length(post_chat, set_reply):
    begin = "<tool_call>\n<function=get_weather>\n<parameter=city>\nThe tag </function>"
    set_reply(ChatFormat(None, QWEN3_CODER), f"{begin} ends it")
    choice, _ = await post_chat(parallel_tool_calls=False, max_tokens=len(begin))
    assert choice["finish_reason"] == "length"


async def test_text_that_is_not_a_call_is_content(post_chat, set_reply):
    set_reply(QWEN, "<tool_call>\nno\n</tool_call>")
    choice, _ = await post_chat()
    assert choice["message"] == {"role": "assistant", "content": "<tool_call>\nno\n</tool_call>", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_only_one_call_is_returned_if_calls_may_not_be_parallel(post_chat, set_reply, engine):
    set_reply(QWEN, f"{CALL}\n{PING}")
    choice, usage = await post_chat(parallel_tool_calls=False)
    assert choice["message"]["tool_calls"] == [make_call()]
    assert choice["finish_reason"] == "tool_calls"
    assert usage["completion_tokens"] < len(CALL)
    assert len(engine.aborted) == 1


async def test_each_choice_has_its_own_parser(post, set_reply):
    set_reply(QWEN, f"<think>Hm.</think>{CALL}")
    body = await (await post(tools=TOOLS, n=2)).get_json()
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]]
    assert len(set(ids)) == 2
    assert [without_call_ids(choice)["message"]["tool_calls"] for choice in body["choices"]] == [
        [make_call()],
        [make_call()],
    ]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * len("<think>Hm.</think>")


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}], ids=str)
async def test_without_tools_a_call_is_text(post_chat, set_reply, tokenizer, fields):
    set_reply(QWEN, CALL)
    choice, _ = await post_chat(**fields)
    assert choice["message"]["content"] == CALL
    assert "tool_calls" not in choice["message"]
    assert tokenizer.given[-1][0] is None


async def test_stop_strings_apply_to_content_only(post_chat, set_reply):
    set_reply(QWEN, f"<think>\nNo. Stop.\n</think>\n\nStart.\n{CALL}\nStop. More.")
    choice, _ = await post_chat(stop=["Stop", "Paris", "</think>", "<tool_call>"])
    assert choice["message"]["reasoning"] == "No. Stop."
    assert choice["message"]["content"] == "Start.\n"
    assert choice["message"]["tool_calls"] == [make_call()]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "Stop")


async def test_partial_stop_string_is_sent_before_a_call(post_chat, set_reply):
    set_reply(QWEN, f"Sto{CALL}p")
    choice, _ = await post_chat(stop="Stop")
    assert (choice["message"]["content"], choice["stop_reason"]) == ("Stop", None)


async def test_undecided_text_is_held_back(post, set_reply, engine):
    set_reply(QWEN, "Stomp")
    engine.delay = 0.01
    chunks = parse_events(await (await post(stream=True, stop="Stop")).get_data())
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Stom"}, {"content": "p"}, {}]


async def test_special_tokens_that_are_tags_are_read(post_chat, engine, set_reply, service):
    set_reply(ChatFormat(None, LLAMA), '{"name": "other", "parameters": {}}')
    tagged_format = replace(LLAMA, begin="<|start|>")
    service.model_format = ModelFormat(ChatFormat(None, tagged_format), service.vocabulary)
    engine.reply = [258, *engine.reply]
    choice, _ = await post_chat()
    assert choice["message"]["tool_calls"] == [make_call("other", "{}")]
    choice, _ = await post_chat(tools=None)
    assert choice["message"]["content"] == '{"name": "other", "parameters": {}}'


async def test_tools_and_values_reach_the_template(post_chat, set_reply, tokenizer):
    set_reply(QWEN, "ok")
    await post_chat(chat_template_kwargs={"mood": ["good"]}, reasoning_effort="low")
    values = {"mood": ["good"], "reasoning_effort": "low", "enable_thinking": True}
    assert tokenizer.given[-1] == (tuple(TOOLS), values)
    await post_chat(reasoning_effort="none")
    assert tokenizer.given[-1][1] == {"reasoning_effort": "none", "enable_thinking": False}
    await post_chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert tokenizer.given[-1][1]["enable_thinking"] is True
    await post_chat()
    assert tokenizer.given[-1][1] == {}


async def test_null_fields_of_a_function_do_not_reach_the_template(post_chat, set_reply, tokenizer):
    set_reply(QWEN, "Hello.")
    function = {"name": "ping", "description": None, "parameters": None, "strict": None}
    await post_chat(tools=[{"type": "function", "function": function}])
    assert tokenizer.given[-1][0] == ({"type": "function", "function": {"name": "ping"}},)


@pytest.mark.parametrize(
    ("start", "reasoning", "content"),
    [
        ("<think>\nOkay", "more", "Hi"),
        ("<think>\nOkay</think>\n\nHello", None, " more</think>Hi"),
        ("Hello", None, " more</think>Hi"),
    ],
)
async def test_an_answer_that_continues_reasoning_begins_with_reasoning(post, set_reply, start, reasoning, content):
    set_reply(QWEN, " more</think>Hi")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": start}]
    response = await post(messages=messages, continue_final_message=True)
    message = (await response.get_json())["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)


async def test_an_answer_without_the_end_of_its_reasoning_can_be_continued(post, set_reply, service, tokenizer, engine):
    service.renderer.close()
    service.renderer = Renderer(tokenizer, reasoning_format=THINK)
    set_reply(QWEN, "<think>\nOkay")
    first_answer = (await (await post(messages=MESSAGES)).get_json())["choices"][0]["message"]
    assert (first_answer["reasoning"], first_answer["content"]) == ("Okay", None)
    set_reply(QWEN, "more</think>Hi")
    response = await post(messages=[*MESSAGES, first_answer], continue_final_message=True)
    message = (await response.get_json())["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("more", "Hi")
    first_prompt, prompt = ([*request.prompt_ids] for request in engine.requests)
    assert prompt == [*first_prompt, *b"<think>\nOkay"]


async def test_a_reasoning_budget_does_not_change_a_message_that_the_answer_continues(post, set_reply, engine):
    set_reply(QWEN, " more")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]
    for fields in ({}, {"max_reasoning_tokens": 4}):
        assert (await post(messages=messages, continue_final_message=True, **fields)).status_code == 200
    assert [*engine.requests[0].prompt_ids] == [*engine.requests[1].prompt_ids]
    assert engine.requests[1].sampling.reasoning_budget is None


async def test_tools_are_a_400_if_the_call_format_is_unknown(post):
    response = await post(tools=TOOLS)
    error = (await response.get_json())["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "tools", "unsupported_parameter")
    assert "--tool-call-parser" in error["message"]
    assert (await post(tools=TOOLS, tool_choice="none")).status_code == 200


async def test_an_answer_can_be_sent_back(post_chat, post, set_reply, tokenizer):
    set_reply(QWEN, f"<think>\nHm.\n</think>\n\n{CALL}")
    choice, _ = await post_chat()
    await post_chat(messages=[*MESSAGES, choice["message"]])
    sent = tokenizer.rendered[-1][-1]
    assert (sent["reasoning"], sent["reasoning_content"]) == ("Hm.", "Hm.")
    assert sent["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Paris"}}
    set_reply(QWEN, "<think>Hm.")
    choice, _ = await post_chat()
    assert choice["message"]["content"] is None
    await post_chat(messages=[*MESSAGES, choice["message"]])
    assert tokenizer.rendered[-1][-1]["content"] == ""


async def test_finish_reasons_are_counted_in_metrics(post_chat, set_reply, client):
    set_reply(QWEN, CALL)
    await post_chat()
    metrics = (await (await client.get("/metrics")).get_data()).decode()
    assert 'finished_reason="tool_calls",model_name="scripted"} 1.0' in metrics
