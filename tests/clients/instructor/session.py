"""A session with instructor. OpenAI's SDK takes the base URL and the key from the environment."""

from typing import Literal

import instructor
import openai
import pytest
from instructor.core import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, Field

MODEL = "SmolLM2-135M-Instruct"
MESSAGES = [
    {"role": "system", "content": "You are a guide. Answer briefly."},
    {"role": "user", "content": "What is the capital of France?"},
]
COMMON_FIELDS = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 200, "max_retries": 0}
EXAMPLE = '{"name": "Oslo", "population": 7, "sights": [{"name": "Fjord", "free": true}]}'
DESCRIBE_FIELDS = COMMON_FIELDS | {"messages": [{"role": "user", "content": f"Describe Paris like this: {EXAMPLE}"}]}
MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)


class Sight(BaseModel):
    name: str = Field(max_length=16)
    free: bool


class City(BaseModel):
    """A city and what there is to see."""

    name: Literal["Paris", "Rome", "Oslo"]
    population: int = Field(ge=1, le=99_000_000)
    sights: list[Sight] = Field(min_length=1, max_length=1)


@pytest.fixture(scope="module")
def sdk():
    with openai.OpenAI(max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture
async def sdk_async():
    async with openai.AsyncOpenAI(max_retries=0, timeout=300) as client:
        yield client


def test_a_chat_request_gets_text(sdk):
    client = instructor.from_openai(sdk)
    answer = client.chat.completions.create(**COMMON_FIELDS | {"max_tokens": 16}, response_model=None)
    assert answer.choices[0].message.content


def test_streamed_pieces_join_to_the_complete_answer(sdk):
    client = instructor.from_openai(sdk)
    fields = COMMON_FIELDS | {"max_tokens": 16, "response_model": None}
    whole = client.chat.completions.create(**fields)
    chunks = client.chat.completions.create(**fields, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


@pytest.mark.parametrize("mode", MODES)
def test_answers_parse_into_a_typed_object(sdk, mode):
    client = instructor.from_openai(sdk, mode=mode)
    city, completion = client.chat.completions.create_with_completion(**DESCRIBE_FIELDS, response_model=City)
    assert isinstance(city, City)
    assert completion.usage.completion_tokens > 0


@pytest.mark.parametrize("mode", MODES)
async def test_a_streamed_object_grows_to_the_complete_object(sdk_async, mode):
    client = instructor.from_openai(sdk_async, mode=mode)
    stream = client.chat.completions.create_partial(**DESCRIBE_FIELDS, response_model=City)
    pieces = [piece async for piece in stream]
    City.model_validate(pieces[-1].model_dump())
    assert len({piece.model_dump_json() for piece in pieces}) > 4


def test_an_answer_is_an_iterable_of_objects(sdk):
    client = instructor.from_openai(sdk, mode=instructor.Mode.TOOLS)
    sights = list(client.chat.completions.create_iterable(**COMMON_FIELDS, response_model=Sight))
    assert sights
    assert all(isinstance(sight, Sight) for sight in sights)


@pytest.mark.parametrize("mode", MODES)
def test_an_object_that_is_cut_off_raises(sdk, mode):
    client = instructor.from_openai(sdk, mode=mode)
    with pytest.raises(IncompleteOutputException):
        client.chat.completions.create(**COMMON_FIELDS | {"max_tokens": 3}, response_model=City)


@pytest.mark.parametrize(
    ("fields", "expected_text"),
    [({"model": "gpt-4o"}, "gpt-4o"), ({"temperature": 9}, "temperature")],
)
def test_errors_name_their_cause(sdk, fields, expected_text):
    client = instructor.from_openai(sdk)
    with pytest.raises(InstructorRetryException, match=expected_text):
        client.chat.completions.create(**COMMON_FIELDS | fields, response_model=City)


def test_a_wrong_key_is_a_401():
    with openai.OpenAI(api_key="another", max_retries=0) as sdk, pytest.raises(InstructorRetryException, match="401"):
        instructor.from_openai(sdk).chat.completions.create(**COMMON_FIELDS, response_model=City)
