"""Values that other servers and OpenAI's clients accept, although they are unusual or deprecated."""

import json

import pytest
from contract import check_refusal

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def render_history(post, tokenizer):
    async def render_history(**message):
        assert (await post(messages=[USER, message, USER])).status_code == 200
        return tokenizer.rendered[-1][1]

    return render_history


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": "ok", "tool_calls": []}, "ok"),
        ({"content": None, "tool_calls": None}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "ok", "refusal": "No."}, "ok"),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "No."}]}, "a\nNo."),
    ],
    ids=str,
)
async def test_past_answer_without_text_is_accepted(render_history, fields, content):
    rendered = await render_history(role="assistant", **fields)
    assert rendered == {"role": "assistant", "content": content}


@pytest.mark.parametrize("role", ["user", "system"])
async def test_only_answers_have_refusal_parts(post, role):
    message = {"role": role, "content": [{"type": "refusal", "refusal": "No."}]}
    error = await check_refusal(await post(messages=[message]), 400, "messages[0].content[0].type")
    assert '"text"' in error["message"]


async def test_refusal_part_without_text_is_a_400(post):
    message = {"role": "assistant", "content": [{"type": "refusal"}]}
    await check_refusal(await post(messages=[USER, message]), 400, "messages[1].content[0].refusal")


async def test_role_function_is_read_as_tool(post, tokenizer):
    # The template of these tests refuses the role "tool".
    await check_refusal(await post(messages=[USER, {"role": "function", "name": "f", "content": "4"}]), 400, "messages")
    assert tokenizer.rendered[-1][1] == {"role": "tool", "name": "f", "content": "4"}


async def test_function_call_is_read_as_a_tool_call(render_history):
    function = {"name": "f", "arguments": '{"a": 1}'}
    rendered = await render_history(role="assistant", content=None, function_call=function)
    (call,) = rendered["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {"a": 1}}
    assert "tool_calls" not in await render_history(role="assistant", content="a", function_call=None)


@pytest.mark.parametrize("effort", ["xhigh", "max"])
async def test_highest_reasoning_efforts_reach_the_template(post, tokenizer, effort):
    assert (await post(reasoning_effort=effort)).status_code == 200
    assert tokenizer.given[-1][1] == {"reasoning_effort": effort, "enable_thinking": True}


@pytest.mark.parametrize("top_p", [0, 0.0, 1e-9])
async def test_smallest_top_p_is_accepted(post, engine, top_p):
    assert (await post(top_p=top_p)).status_code == 200
    assert engine.requests[0].sampling.top_p == top_p


async def test_integers_may_be_written_as_floats(post, engine):
    fields = {"max_tokens": 5.0, "top_k": 3.0, "n": 2.0, "seed": -7.0, "stop_token_ids": [3.0], "prompt_logprobs": 1.0}
    assert (await post(**fields)).status_code == 200
    sampling = engine.requests[0].sampling
    values = (sampling.max_tokens, sampling.top_k, sampling.seed, *sampling.stop_token_ids, sampling.prompt_logprobs)
    assert values == (5, 3, -7, 3, 1)
    assert {type(value) for value in values} == {int}
    assert len(engine.requests) == 2


@pytest.mark.parametrize("fields", [{"max_tokens": 1.5}, {"top_k": 1e300}, {"seed": 2.0**60}, {"n": True}], ids=str)
async def test_values_that_are_no_exact_integers_are_a_400(post, fields):
    error = await check_refusal(await post(**fields), 400, next(iter(fields)))
    assert "an integer" in error["message"]


async def test_json_schema_format_without_schema_allows_any_object(post, engine):
    response_format = {"type": "json_schema", "json_schema": {"name": "a"}}
    assert (await post(response_format=response_format)).status_code == 200
    assert json.loads(engine.requests[0].sampling.grammar.source) == {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {}}, "response_format.type"),
    ],
    ids=str,
)
async def test_missing_field_is_called_missing(post, fields, param):
    error = await check_refusal(await post(**fields), 400, param)
    assert error["message"].startswith(f"{param} is missing: it must be ")
    assert "null" not in error["message"]
    assert error["code"] == "missing_required_parameter"


async def test_error_says_that_messages_are_missing(client):
    response = await client.post("/v1/chat/completions", json={"model": "scripted"})
    error = await check_refusal(response, 400, "messages")
    assert "messages is missing" in error["message"]


async def test_null_field_is_called_null(post):
    error = await check_refusal(await post(messages=None), 400, "messages")
    assert error["message"].endswith("not null")
    assert error["code"] == "invalid_value"
