"""A session with pydantic-ai, which takes the base URL and the key from the environment."""

import os
from typing import Literal

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.exceptions import ModelAuthenticationError, ModelContextWindowExceededError, ModelNotFoundError
from pydantic_ai.messages import ModelRequest, ModelResponse, ThinkingPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
DESCRIBE = 'Describe Paris like this: {"name": "Oslo", "population": 7, "sights": [{"name": "Fjord", "free": true}]}'
SHORT = ModelSettings(temperature=0, max_tokens=12)
# With parallel tool calls, the model makes more calls than needed.
LONG = ModelSettings(temperature=0, max_tokens=200, parallel_tool_calls=False)


class Sight(BaseModel):
    name: str = Field(max_length=16)
    free: bool


class City(BaseModel):
    """A city and what there is to see."""

    name: Literal["Paris", "Rome", "Oslo"]
    population: int = Field(ge=1, le=99_000_000)
    sights: list[Sight] = Field(min_length=1, max_length=1)


class Note(BaseModel):
    """Accepts any object, because the prompted mode constrains the output to JSON, but not to a schema."""


def make_agent(name=MODEL, **fields):
    return Agent(OpenAIChatModel(name), **{"instructions": "You are a guide. Answer briefly.", "retries": 0} | fields)


async def test_a_chat_request_gets_text():
    result = await make_agent().run(QUESTION, model_settings=SHORT)
    assert result.output
    assert result.usage.output_tokens <= 12
    response = result.all_messages()[-1]
    assert response.model_name == MODEL
    assert response.finish_reason in ("stop", "length")


async def test_streamed_pieces_join_to_the_complete_answer():
    whole = await make_agent().run(QUESTION, model_settings=SHORT)
    async with make_agent().run_stream(QUESTION, model_settings=SHORT) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == whole.output
    assert len(pieces) > 5
    assert result.usage.output_tokens == whole.usage.output_tokens


async def test_a_conversation_continues():
    first = await make_agent().run(QUESTION, model_settings=SHORT)
    second = await make_agent().run("And of Italy?", message_history=first.all_messages(), model_settings=SHORT)
    assert second.output
    assert second.usage.input_tokens > first.usage.input_tokens


async def test_reasoning_is_returned_and_accepted_again():
    """Uses the direct API, because an agent repeats a request whose answer has no text."""
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=os.environ["THINKING_BASE_URL"]))
    question = [ModelRequest.user_text_prompt(QUESTION)]
    whole = await model_request(model, question, model_settings=SHORT)
    (thought,) = whole.parts
    assert isinstance(thought, ThinkingPart)
    async with model_request_stream(model, question, model_settings=SHORT) as stream:
        async for _ in stream:
            pass
    assert [part.content for part in stream.get().parts] == [thought.content]
    again = [*question, whole, ModelRequest.user_text_prompt("Go on.")]
    assert (await model_request(model, again, model_settings=SHORT)).thinking


OUTPUTS = [ToolOutput(City), NativeOutput(City), NativeOutput(City, strict=True), ToolOutput(City, strict=True)]


@pytest.mark.parametrize("output", OUTPUTS)
async def test_answers_parse_into_a_typed_object(output):
    result = await make_agent(output_type=output).run(DESCRIBE, model_settings=LONG)
    assert isinstance(result.output, City)


@pytest.mark.parametrize("output", OUTPUTS[:2])
async def test_a_streamed_object_grows_to_the_complete_object(output):
    typed_agent = make_agent(output_type=output)
    whole = await typed_agent.run(DESCRIBE, model_settings=LONG)
    async with typed_agent.run_stream(DESCRIBE, model_settings=LONG) as result:
        pieces = [piece async for piece in result.stream_output(debounce_by=None)]
    assert pieces[-1] == whole.output
    assert len(pieces) > 1


async def test_a_prompted_object_is_json():
    output = PromptedOutput(Note, template=False)
    result = await make_agent(output_type=output).run('Say {"ok": true} and nothing else.', model_settings=LONG)
    assert isinstance(result.output, Note)


async def test_a_tool_call_and_its_result_continue_the_conversation():
    requested_cities = []

    def choose_settings(context):
        # The model is too small to choose a tool by itself.
        return LONG | {"tool_choice": ["get_weather" if context.run_step == 1 else "final_result"]}

    guide = make_agent(output_type=City, model_settings=choose_settings)

    @guide.tool_plain
    def get_weather(city: Literal["Paris", "Rome", "Oslo"]) -> str:
        """The weather in a city."""
        requested_cities.append(city)
        return f"Sunny in {city}, 21 degrees."

    result = await guide.run(QUESTION)
    assert isinstance(result.output, City)
    parts = [part for message in result.all_messages() for part in message.parts]
    called = [part for part in parts if isinstance(part, ToolCallPart) and part.tool_name == "get_weather"]
    returned = [part for part in parts if isinstance(part, ToolReturnPart) and part.tool_name == "get_weather"]
    assert requested_cities == [call.args_as_dict()["city"] for call in called]
    assert [call.tool_call_id for call in called] == [part.tool_call_id for part in returned]
    assert isinstance(result.all_messages()[-2], ModelResponse)


async def test_an_unknown_model_is_a_404():
    with pytest.raises(ModelNotFoundError) as refused:
        await make_agent("gpt-4o").run(QUESTION, model_settings=SHORT)
    assert refused.value.body["code"] == "model_not_found"


async def test_an_invalid_field_is_a_400_that_names_it():
    with pytest.raises(ModelHTTPError) as refused:
        await make_agent().run(QUESTION, model_settings=SHORT | {"temperature": 9})
    assert refused.value.status_code == 400
    assert refused.value.body["param"] == "temperature"


async def test_a_prompt_longer_than_the_context_is_a_400():
    with pytest.raises(ModelContextWindowExceededError):
        await make_agent().run("long " * 3000)


async def test_a_wrong_key_is_a_401():
    agent_with_wrong_key = Agent(OpenAIChatModel(MODEL, provider=OpenAIProvider(api_key="another")))
    with pytest.raises(ModelAuthenticationError):
        await agent_with_wrong_key.run(QUESTION, model_settings=SHORT)


async def test_the_server_answers_after_a_client_has_left():
    endless = ModelSettings(max_tokens=1500, extra_body={"ignore_eos": True})
    async with make_agent().run_stream(QUESTION, model_settings=endless) as result:
        await anext(aiter(result.stream_text(delta=True, debounce_by=None)))
    assert (await make_agent().run(QUESTION, model_settings=SHORT)).output
