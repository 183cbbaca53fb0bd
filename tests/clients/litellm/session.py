"""A session with litellm, which takes the base URL and the key from the environment."""

import os
from typing import Literal

import pytest
from pydantic import BaseModel, Field

# Without this variable, litellm downloads a newer list of models.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

MODEL = "openai/SmolLM2-135M-Instruct"
MESSAGES = [
    {"role": "system", "content": "You are a guide. Answer briefly."},
    {"role": "user", "content": "What is the capital of France?"},
]
COMMON_FIELDS = {
    "model": MODEL,
    "messages": MESSAGES,
    "temperature": 0,
    "max_tokens": 12,
    "num_retries": 0,
    "timeout": 300,
}

EXAMPLE = '{"name": "Oslo", "population": 7, "sights": [{"name": "Fjord", "free": true}]}'
DESCRIBE_FIELDS = COMMON_FIELDS | {
    "messages": [{"role": "user", "content": f"Describe Paris like this: {EXAMPLE}"}],
    "max_tokens": 200,
}


class Weather(BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=7)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": Weather.model_json_schema(),
    },
}


class Sight(BaseModel):
    name: str = Field(max_length=16)
    free: bool


class City(BaseModel):
    """A city and what there is to see."""

    name: Literal["Paris", "Rome", "Oslo"]
    population: int = Field(ge=1, le=99_000_000)
    sights: list[Sight] = Field(min_length=1, max_length=1)


def test_a_chat_request_gets_text():
    answer = litellm.completion(**COMMON_FIELDS, user="somebody")
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_streamed_pieces_join_to_the_complete_answer():
    whole = await litellm.acompletion(**COMMON_FIELDS)
    stream = await litellm.acompletion(**COMMON_FIELDS, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    gathered = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert gathered.choices[0].message.content == whole.choices[0].message.content
    assert gathered.choices[0].finish_reason == whole.choices[0].finish_reason
    assert gathered.usage.completion_tokens == whole.usage.completion_tokens
    assert gathered.usage.prompt_tokens == whole.usage.prompt_tokens
    assert len(chunks) > 5


async def test_streamed_reasoning_joins_to_the_complete_reasoning():
    fields = COMMON_FIELDS | {"base_url": os.environ["THINKING_BASE_URL"]}
    whole = await litellm.acompletion(**fields)
    assert whole.choices[0].message.content is None
    assert whole.choices[0].message.reasoning_content
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0
    chunks = [chunk async for chunk in await litellm.acompletion(**fields, stream=True)]
    gathered = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert gathered.choices[0].message.reasoning_content == whole.choices[0].message.reasoning_content


def test_several_choices_have_log_probabilities():
    fields = {"n": 2, "seed": 7, "temperature": 1, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    answer = litellm.completion(**COMMON_FIELDS | fields)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.logprobs.content for choice in answer.choices)


def test_an_answer_ends_before_its_stop_string():
    text = litellm.completion(**COMMON_FIELDS).choices[0].message.content
    stop = text[3:8]
    assert litellm.completion(**COMMON_FIELDS, stop=[stop]).choices[0].message.content == text[: text.index(stop)]


def test_a_tool_call_and_its_result_continue_the_conversation():
    fields = {"tools": [WEATHER], "parallel_tool_calls": False}
    answer_with_call = litellm.completion(**COMMON_FIELDS | fields | {"tool_choice": "required", "max_tokens": 80})
    message = answer_with_call.choices[0].message
    assert answer_with_call.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    Weather.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}
    answer = litellm.completion(
        **COMMON_FIELDS | fields | {"messages": [*MESSAGES, message, result], "tool_choice": "none"}
    )
    assert answer.choices[0].message.content


async def test_a_streamed_tool_call_joins_to_the_complete_call():
    named = {"type": "function", "function": {"name": "get_weather"}}
    fields = COMMON_FIELDS | {"tools": [WEATHER], "tool_choice": named, "max_tokens": 80}
    whole = await litellm.acompletion(**fields)
    chunks = [chunk async for chunk in await litellm.acompletion(**fields, stream=True)]
    gathered = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    (expected,), (call,) = whole.choices[0].message.tool_calls, gathered.choices[0].message.tool_calls
    assert call.function.name == expected.function.name == "get_weather"
    assert call.function.arguments == expected.function.arguments
    assert call.id


def test_answers_parse_into_a_typed_object():
    answer = litellm.completion(**DESCRIBE_FIELDS, response_format=City)
    assert answer.choices[0].finish_reason == "stop"
    City.model_validate_json(answer.choices[0].message.content)


async def test_a_streamed_object_grows_to_the_complete_object():
    fields = DESCRIBE_FIELDS | {"response_format": City}
    whole = await litellm.acompletion(**fields)
    chunks = [chunk async for chunk in await litellm.acompletion(**fields, stream=True)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    City.model_validate_json(text)


def test_an_unknown_model_is_a_404():
    with pytest.raises(litellm.NotFoundError, match="gpt-4o"):
        litellm.completion(**COMMON_FIELDS | {"model": "openai/gpt-4o"})


@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_field_is_a_400_that_names_it(stream):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**COMMON_FIELDS | {"temperature": 9}, stream=stream)


def test_a_prompt_longer_than_the_context_is_a_400():
    long = [{"role": "user", "content": "long " * 3000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**COMMON_FIELDS | {"messages": long})


def test_a_wrong_key_is_a_401():
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**COMMON_FIELDS, api_key="another")


def test_a_client_timeout_raises():
    with pytest.raises(litellm.Timeout):
        litellm.completion(**COMMON_FIELDS | {"timeout": 0.5, "max_tokens": 1500}, extra_body={"ignore_eos": True})
