"""A session with instructor, in each of the modes in which it asks OpenAI's API for a typed object.

Base URL and key are taken from the environment, as the SDK below it does.
"""

from typing import Literal

import instructor
import openai
import pytest
from instructor.core import InstructorRetryException
from pydantic import BaseModel, Field

MODEL = "SmolLM2-135M-Instruct"
MESSAGES = [
    {"role": "system", "content": "You are a guide. Answer briefly."},
    {"role": "user", "content": "What is the capital of France?"},
]
ASKED = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 200, "max_retries": 0}
MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)


class Sight(BaseModel):
    name: str = Field(max_length=16)
    free: bool


class City(BaseModel):
    """A city and what there is to see."""

    name: Literal["Paris", "Rome", "Oslo"]
    population: int = Field(ge=1, le=99_000_000)
    sights: list[Sight] = Field(min_length=1, max_length=2)


@pytest.fixture(scope="module")
def sdk():
    with openai.OpenAI(max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def sdk_async():
    async with openai.AsyncOpenAI(max_retries=0, timeout=60) as client:
        yield client


def test_chat(sdk):
    client = instructor.from_openai(sdk)
    answer = client.chat.completions.create(**ASKED | {"max_tokens": 16}, response_model=None)
    assert answer.choices[0].message.content


def test_stream(sdk):
    client = instructor.from_openai(sdk)
    fields = ASKED | {"max_tokens": 16, "response_model": None}
    whole = client.chat.completions.create(**fields)
    chunks = client.chat.completions.create(**fields, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_wrong_key():
    with openai.OpenAI(api_key="another", max_retries=0) as sdk, pytest.raises(InstructorRetryException, match="401"):
        instructor.from_openai(sdk).chat.completions.create(**ASKED, response_model=City)
