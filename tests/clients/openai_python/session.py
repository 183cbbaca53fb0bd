"""A session with OpenAI's SDK, which takes the base URL and the key from the environment."""

import json
import os
import time
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

MODEL = "SmolLM2-135M-Instruct"
MESSAGES = [
    {"role": "system", "content": "You are a guide. Answer briefly."},
    {"role": "user", "content": "What is the capital of France?"},
]
COMMON_FIELDS = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}
EXAMPLE = '{"name": "Oslo", "population": 7, "mayor": null, "sights": [{"name": "Fjord", "free": true}]}'
DESCRIBE_FIELDS = COMMON_FIELDS | {
    "messages": [{"role": "user", "content": f"Describe Paris like this: {EXAMPLE}"}],
    "max_completion_tokens": 200,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Sight(BaseModel):
    name: str = Field(max_length=16)
    free: bool


class City(BaseModel):
    """A city and what there is to see."""

    name: Literal["Paris", "Rome", "Oslo"]
    population: int = Field(ge=1, le=99_000_000)
    mayor: str | None = Field(max_length=16)
    sights: list[Sight] = Field(min_length=1, max_length=1)


class GetWeather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=7)


@pytest.fixture(scope="module")
def sdk():
    with openai.OpenAI(max_retries=0, timeout=300, _strict_response_validation=True) as client:
        yield client


@pytest.fixture
async def sdk_async():
    async with openai.AsyncOpenAI(max_retries=0, timeout=300, _strict_response_validation=True) as client:
        yield client


def create(client, **fields):
    return client.chat.completions.create(**COMMON_FIELDS | fields)


def test_the_served_model_is_listed_and_others_are_a_404(sdk):
    assert MODEL in [model.id for model in sdk.models.list()]
    assert sdk.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        sdk.models.retrieve("org/name")


def test_a_chat_request_gets_text(sdk):
    begin_s = int(time.time())
    answer = create(sdk, user="somebody", metadata={"topic": "cities"}, store=False)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert begin_s <= answer.created <= time.time()
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.message.refusal is None
    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert 0 < usage.completion_tokens <= 12
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    details = usage.completion_tokens_details
    assert details.reasoning_tokens == 0
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    assert answer._request_id


async def test_streamed_pieces_join_to_the_complete_answer(sdk, sdk_async):
    whole = create(sdk, logprobs=True, top_logprobs=2)
    stream = await create(sdk_async, stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=2)
    chunks = [chunk async for chunk in stream]
    *parts, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in parts)
    assert {(chunk.id, chunk.created, chunk.model) for chunk in chunks} == {(last.id, last.created, MODEL)}
    choices = [chunk.choices[0] for chunk in parts]
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [
        whole.choices[0].finish_reason
    ]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    expected = whole.choices[0].logprobs.content
    assert [entry.token for entry in entries] == [entry.token for entry in expected]
    assert [len(entry.top_logprobs) for entry in entries] == [2] * whole.usage.completion_tokens


def test_the_stream_helper_joins_the_same_answer(sdk):
    # The SDK raises an error at the length limit. A stop string ends this answer earlier.
    stop = create(sdk).choices[0].message.content[12:16]
    whole = create(sdk, stop=stop)
    with sdk.chat.completions.stream(**COMMON_FIELDS, stop=stop, stream_options={"include_usage": True}) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        gathered = stream.get_final_completion()
    assert text == gathered.choices[0].message.content == whole.choices[0].message.content
    assert gathered.usage.completion_tokens == whole.usage.completion_tokens
    assert gathered.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_a_prediction_does_not_change_the_answer(sdk):
    text = create(sdk).choices[0].message.content
    for content in (text, [{"type": "text", "text": text}]):
        answer = create(sdk, prediction={"type": "content", "content": content})
        assert answer.choices[0].message.content == text
    with pytest.raises(openai.BadRequestError, match=r"prediction\.content"):
        create(sdk, prediction={"type": "content", "content": []})


def test_streamed_choices_equal_complete_choices(sdk):
    fields = {"n": 2, "seed": 7, "temperature": 1.0, "max_completion_tokens": 8}
    whole = create(sdk, **fields)
    assert [choice.index for choice in whole.choices] == [0, 1]
    texts = {0: "", 1: ""}
    for chunk in create(sdk, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {choice.index: choice.message.content for choice in whole.choices}


def test_reasoning_is_returned_and_accepted_again(sdk):
    thinking_client = sdk.with_options(base_url=os.environ["THINKING_BASE_URL"])
    whole = create(thinking_client, reasoning_effort="low")
    message = whole.choices[0].message
    assert message.content is None
    assert message.reasoning == message.reasoning_content != ""
    assert whole.usage.completion_tokens_details.reasoning_tokens == whole.usage.completion_tokens
    deltas = [chunk.choices[0].delta for chunk in create(thinking_client, reasoning_effort="low", stream=True)]
    extra = [delta.model_extra for delta in deltas]
    assert "".join(values.get("reasoning", "") for values in extra) == message.reasoning
    assert not any(delta.content for delta in deltas)
    again = [*MESSAGES, message.model_dump(exclude_none=True), {"role": "user", "content": "Go on."}]
    assert create(thinking_client, messages=again).choices[0].message.reasoning


def test_an_answer_ends_before_its_stop_string(sdk):
    text = create(sdk).choices[0].message.content
    stop = text[3:8]
    answer = create(sdk, stop=[stop])
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_ends_at_the_length_limit(sdk):
    answer = create(sdk, max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


def validate_call(call):
    assert call.type == "function"
    assert call.id
    assert call.function.name == "get_weather"
    return GetWeather.model_validate_json(call.function.arguments, strict=True, extra="forbid")


def test_a_tool_call_and_its_result_continue_the_conversation(sdk):
    answer_with_call = create(
        sdk, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_completion_tokens=80
    )
    (choice,) = answer_with_call.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    validate_call(call)
    answer = create(
        sdk,
        messages=[
            *MESSAGES,
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."},
        ],
        tools=[WEATHER],
        tool_choice="none",
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_a_named_tool_is_called(sdk):
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = create(sdk, tools=[WEATHER], tool_choice=named, max_completion_tokens=80)
    (call,) = answer.choices[0].message.tool_calls
    validate_call(call)
    assert answer.choices[0].finish_reason == "stop"


def test_only_an_allowed_tool_is_called(sdk):
    other = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    answer = create(
        sdk,
        tools=[other, WEATHER],
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        parallel_tool_calls=False,
        max_completion_tokens=80,
    )
    (call,) = answer.choices[0].message.tool_calls
    validate_call(call)


def test_streamed_tool_calls_join_to_the_complete_calls(sdk):
    fields = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_completion_tokens": 80}
    (expected,) = create(sdk, **fields).choices[0].message.tool_calls
    chunks = list(create(sdk, stream=True, **fields))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].id
    assert (deltas[0].index, deltas[0].type, deltas[0].function.name) == (0, "function", "get_weather")
    assert all((delta.index, delta.id, delta.function.name) == (0, None, None) for delta in deltas[1:])
    assert len(deltas) > 2
    assert "".join(delta.function.arguments or "" for delta in deltas) == expected.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_call_that_is_cut_off_has_finish_reason_length(sdk):
    answer = create(sdk, tools=[WEATHER], tool_choice="required", max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"


def test_parse_returns_a_typed_object(sdk):
    answer = sdk.chat.completions.parse(**DESCRIBE_FIELDS, response_format=City)
    message = answer.choices[0].message
    assert isinstance(message.parsed, City)
    assert message.refusal is None
    assert answer.choices[0].finish_reason == "stop"


def test_parse_raises_if_the_object_is_cut_off(sdk):
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(**DESCRIBE_FIELDS | {"max_completion_tokens": 3}, response_format=City)


def test_parse_returns_several_choices(sdk):
    fields = DESCRIBE_FIELDS | {"temperature": 1.0, "seed": 3, "n": 2, "max_completion_tokens": 400}
    answer = sdk.chat.completions.parse(**fields, response_format=City)
    assert all(isinstance(choice.message.parsed, City) for choice in answer.choices)
    assert len(answer.choices) == 2


async def test_a_streamed_object_grows_to_the_complete_object(sdk_async):
    whole = await sdk_async.chat.completions.parse(**DESCRIBE_FIELDS, response_format=City)
    partial_objects, final_objects = [], []
    async with sdk_async.chat.completions.stream(**DESCRIBE_FIELDS, response_format=City) as stream:
        async for event in stream:
            if event.type == "content.delta":
                partial_objects.append(event.parsed)
            elif event.type == "content.done":
                final_objects.append(event.parsed)
        final = await stream.get_final_completion()
    assert final_objects == [whole.choices[0].message.parsed] == [final.choices[0].message.parsed]
    assert len({json.dumps(value) for value in partial_objects}) > 4


async def test_streamed_arguments_parse_into_a_typed_object(sdk_async):
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    fields = COMMON_FIELDS | {"max_completion_tokens": 80}
    async with sdk_async.chat.completions.stream(
        **fields, tools=[tool], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        done_events = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert [event.parsed_arguments for event in done_events] == [call.function.parsed_arguments]


def test_json_mode_gives_an_object(sdk):
    messages = [{"role": "user", "content": 'Say {"ok": true} and nothing else.'}]
    answer = create(sdk, messages=messages, response_format={"type": "json_object"}, max_completion_tokens=60)
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_an_unknown_model_is_a_404(sdk):
    with pytest.raises(openai.NotFoundError) as refused:
        create(sdk, model="gpt-4o")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"messages": []}, "messages"),
        ({"tools": []}, "tools"),
        ({"max_completion_tokens": 100_000}, "max_completion_tokens"),
    ],
)
def test_an_invalid_field_is_a_400_that_names_it(sdk, fields, param, stream):
    with pytest.raises(openai.BadRequestError) as refused:
        create(sdk, stream=stream, **fields)
    assert refused.value.param == param
    assert refused.value.request_id


def test_a_wrong_key_is_a_401():
    with openai.OpenAI(api_key="another", max_retries=0) as sdk, pytest.raises(openai.AuthenticationError):
        create(sdk)


def test_an_unsupported_path_is_a_404(sdk):
    with pytest.raises(openai.NotFoundError):
        sdk.embeddings.create(model=MODEL, input="hi")


def test_a_client_timeout_raises(sdk):
    endless = {"max_completion_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        create(sdk.with_options(timeout=0.5), **endless)
    create(sdk, max_completion_tokens=1)


async def test_the_server_answers_after_a_client_has_left(sdk_async):
    endless = {"max_completion_tokens": 1500, "extra_body": {"ignore_eos": True}}
    stream = await create(sdk_async, stream=True, **endless)
    await anext(aiter(stream))
    await stream.close()
    assert (await create(sdk_async, max_completion_tokens=1)).usage.completion_tokens == 1
