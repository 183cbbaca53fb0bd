"""A session with langchain-openai. OpenAI's SDK takes the base URL and the key from the environment."""

from typing import Annotated, Literal, TypedDict

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

MODEL = "SmolLM2-135M-Instruct"
MESSAGES = [SystemMessage("You are a guide. Answer briefly."), HumanMessage("What is the capital of France?")]

DESCRIBE = 'Describe Paris like this: {"name": "Oslo", "population": 7, "sights": ["Fjord"]}'
TRAVEL = 'Plan a trip to Paris like this: {"city": "Oslo", "by": "train", "days": 2}'


class City(BaseModel):
    """A city and what there is to see."""

    name: Literal["Paris", "Rome", "Oslo"]
    population: int = Field(ge=1, le=99_000_000)
    sights: list[Annotated[str, Field(max_length=16)]] = Field(min_length=1, max_length=1)


class Trip(TypedDict):
    """A trip to a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    by: Literal["train", "plane", "bicycle"]
    days: Literal[1, 2, 3]


@tool
def get_weather(city: Literal["Paris", "Rome", "Oslo"]) -> str:
    """The weather in a city."""
    return f"Sunny in {city}, 21 degrees."


@pytest.fixture(scope="module")
async def one_loop():
    """Async tests share one event loop, because langchain reuses connections."""


def make_model(**fields):
    return ChatOpenAI(**{"model": MODEL, "temperature": 0, "max_tokens": 12, "max_retries": 0, "timeout": 300} | fields)


def test_a_chat_request_gets_text():
    answer = make_model().invoke(MESSAGES)
    assert isinstance(answer, AIMessage)
    assert answer.content
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert answer.response_metadata["model_name"] == MODEL
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_streamed_pieces_join_to_the_complete_answer(one_loop):
    whole = make_model().invoke(MESSAGES)
    chunks = [chunk async for chunk in make_model(stream_usage=True).astream(MESSAGES)]
    gathered = chunks[0]
    for chunk in chunks[1:]:
        gathered += chunk
    assert gathered.content == whole.content
    assert len(chunks) > 5
    assert gathered.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert gathered.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


async def test_a_batch_of_requests_is_answered(one_loop):
    answers = await make_model(max_tokens=4).abatch([MESSAGES, "Count to three.", "Say hi."])
    assert [answer.usage_metadata["output_tokens"] <= 4 for answer in answers] == [True] * 3


def test_several_choices_have_log_probabilities():
    (choices,) = (
        make_model(n=2, temperature=1, seed=7, logprobs=True, top_logprobs=2, max_tokens=8)
        .generate([MESSAGES])
        .generations
    )
    assert len(choices) == 2
    assert all(choice.generation_info["logprobs"]["content"] for choice in choices)


def test_an_answer_ends_before_its_stop_string():
    text = make_model().invoke(MESSAGES).content
    stop = text[3:8]
    assert make_model().invoke(MESSAGES, stop=[stop]).content == text[: text.index(stop)]


def test_a_tool_call_and_its_result_continue_the_conversation():
    answer_with_call = (
        make_model(max_tokens=80)
        .bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
        .invoke(MESSAGES)
    )
    (call,) = answer_with_call.tool_calls
    assert answer_with_call.invalid_tool_calls == []
    assert answer_with_call.response_metadata["finish_reason"] == "tool_calls"
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    answer = make_model().bind_tools([get_weather], tool_choice="none").invoke([*MESSAGES, answer_with_call, result])
    assert answer.content
    assert answer.tool_calls == []


async def test_a_streamed_tool_call_joins_to_the_complete_call(one_loop):
    bound = make_model(max_tokens=80).bind_tools([get_weather], tool_choice="get_weather")
    (expected,) = bound.invoke(MESSAGES).tool_calls
    chunks = [chunk async for chunk in bound.astream(MESSAGES)]
    gathered = chunks[0]
    for chunk in chunks[1:]:
        gathered += chunk
    (call,) = gathered.tool_calls
    assert (call["name"], call["args"]) == (expected["name"], expected["args"])
    assert sum(bool(chunk.tool_call_chunks) for chunk in chunks) > 2


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_answers_parse_into_a_typed_object(method, strict):
    structured = make_model(max_tokens=200).with_structured_output(City, method=method, strict=strict, include_raw=True)
    answer = structured.invoke(DESCRIBE)
    assert answer["parsing_error"] is None
    assert isinstance(answer["parsed"], City)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_a_streamed_object_grows_to_the_complete_object(method, one_loop):
    structured = make_model(max_tokens=200).with_structured_output(Trip, method=method)
    whole = await structured.ainvoke(TRAVEL)
    assert set(whole) == {"city", "by", "days"}
    pieces = [piece async for piece in structured.astream(TRAVEL)]
    assert pieces[-1] == whole
    assert len(pieces) > 3


def test_json_mode_gives_an_object():
    structured = make_model(max_tokens=60).with_structured_output(method="json_mode")
    answer = structured.invoke('Say {"ok": true} and nothing else.')
    assert isinstance(answer, dict)


def test_an_unknown_model_is_a_404():
    with pytest.raises(openai.NotFoundError, match="gpt-4o"):
        make_model(model="gpt-4o").invoke(MESSAGES)


def test_an_invalid_field_is_a_400_that_names_it():
    with pytest.raises(openai.BadRequestError) as refused:
        make_model(temperature=9).invoke(MESSAGES)
    assert refused.value.param == "temperature"


def test_a_prompt_longer_than_the_context_is_a_400():
    with pytest.raises(ContextOverflowError):
        make_model().invoke("long " * 3000)


def test_a_wrong_key_is_a_401():
    with pytest.raises(openai.AuthenticationError):
        make_model(api_key="another").invoke(MESSAGES)


def test_a_client_timeout_raises():
    with pytest.raises(openai.APITimeoutError):
        make_model(timeout=0.5, max_tokens=1500, extra_body={"ignore_eos": True}).invoke(MESSAGES)


async def test_the_server_answers_after_a_client_has_left(one_loop):
    endless = make_model(max_tokens=1500, extra_body={"ignore_eos": True})
    chunks = endless.astream(MESSAGES)
    await anext(chunks)
    await chunks.aclose()
    assert (await make_model(max_tokens=1).ainvoke(MESSAGES)).usage_metadata["output_tokens"] == 1
