"""Different servers have different names for a reasoning option. All names of an option have the same effect."""

import pytest

from nanovllm_models.chat_formats import HERMES, THINK, ChatFormat
from nanovllm_server.parsing.model_format import ModelFormat

END_ID = 258


@pytest.fixture(autouse=True)
def reply_with_reasoning(engine, service, vocabulary, monkeypatch):
    monkeypatch.setattr(ModelFormat, "reasoning_end_id", END_ID)
    service.model_format = ModelFormat(ChatFormat(THINK, HERMES), vocabulary)
    engine.reply = [*b"<think>\nHm.\n</think>\n\nHello."]


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning": {"effort": "max"}, "reasoning_effort": "max"},
            {"reasoning_effort": "max", "enable_thinking": True},
        ),
        ({"reasoning": {"enabled": True}}, {"enable_thinking": True}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        (
            {"reasoning": {"effort": "none", "enabled": False}},
            {"reasoning_effort": "none", "enable_thinking": False},
        ),
        ({"reasoning": {}}, {}),
        ({"reasoning": {"max_tokens": 5, "summary": "auto"}}, {}),
        ({"reasoning": None}, {}),
    ],
    ids=str,
)
async def test_effort_reaches_the_template(post, tokenizer, fields, values):
    assert (await post(**fields)).status_code == 200
    assert tokenizer.given[-1][1] == values


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({"max_reasoning_tokens": 5}, 5),
        ({"thinking_token_budget": 5}, 5),
        ({"thinking_token_budget": 0}, 0),
        ({"reasoning": {"max_tokens": 5}}, 5),
        ({"reasoning": {"max_tokens": 5.0}, "thinking_token_budget": 5, "max_reasoning_tokens": 5}, 5),
        ({"thinking_token_budget": -1, "max_reasoning_tokens": 7}, 7),
        ({"thinking_token_budget": -1}, None),
        ({"reasoning": {"max_tokens": None}}, None),
    ],
    ids=str,
)
async def test_budget_reaches_the_engine(post, engine, fields, num_tokens):
    assert (await post(**fields)).status_code == 200
    budget = engine.requests[0].sampling.reasoning_budget
    assert (budget and budget.num_tokens) == num_tokens


@pytest.mark.parametrize(
    ("fields", "is_included"),
    [
        ({"reasoning": {"exclude": True}}, False),
        ({"reasoning": {"exclude": False}}, True),
        ({"reasoning": {"exclude": True}, "include_reasoning": False}, False),
        ({"reasoning": {"exclude": False}, "include_reasoning": True}, True),
        ({"reasoning": {}}, True),
    ],
    ids=str,
)
async def test_exclude_omits_the_reasoning(post, fields, is_included):
    message = (await (await post(**fields)).get_json())["choices"][0]["message"]
    assert message["content"] == "Hello."
    assert message.get("reasoning") == ("Hm." if is_included else None)


@pytest.mark.parametrize("field", ["max_reasoning_tokens", "thinking_token_budget", "reasoning.max_tokens"])
async def test_error_about_a_budget_names_the_clients_field(post, monkeypatch, field):
    monkeypatch.setattr(ModelFormat, "reasoning_end_id", None)
    fields = {"reasoning": {"max_tokens": 5}} if "." in field else {field: 5}
    response = await post(**fields)
    error = (await response.get_json())["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, field, "unsupported_parameter")
    assert error["message"].startswith(f"{field} is not supported")
