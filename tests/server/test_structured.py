"""Constrained answers and tool calls of a real model, with OpenAI's Python client."""

import asyncio
import json
import re
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest

MODEL = "shallow"
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Forecast.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "ping", "description": "Check the connection."}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
# This template begins reasoning in the prompt and shows no tools.
THINKING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}"
)


class Place(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    kind: Literal["city", "country"]
    rivers: list[Literal["Seine", "Rhine", "Loire"]] = pydantic.Field(max_length=3)


class GetWeather(pydantic.BaseModel):
    """Forecast."""

    city: str = pydantic.Field(max_length=20)
    days: int = pydantic.Field(ge=1, le=14)


@pytest.fixture
async def sdk(shallow_server):
    async with openai.AsyncOpenAI(
        base_url=f"{shallow_server.url}/v1", api_key="any", max_retries=0, timeout=120
    ) as client:
        yield client


async def create(sdk, **fields):
    return await sdk.chat.completions.create(
        **{"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 120} | fields
    )


async def create_streamed(sdk, **fields):
    """Returns content, calls and finish reason."""
    content, calls, reason = "", {}, None
    async for chunk in await create(sdk, stream=True, **fields):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = (name or call.function.name, arguments + (call.function.arguments or ""))
        reason = choice.finish_reason or reason
    return content or None, list(calls.values()), reason


def summarize(completion):
    choice = completion.choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return choice.message.content or None, calls, choice.finish_reason


def structured_outputs(**wanted):
    return {"extra_body": {"structured_outputs": wanted}}


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"])
async def test_required_tool_calls_are_made(sdk, choice, reason):
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    whole = summarize(await create(sdk, **fields))
    content, ((name, arguments),), finish_reason = whole
    assert (content, finish_reason) == (None, reason)
    if choice is NAMED:
        assert name == "get_weather"
    jsonschema.validate(json.loads(arguments), PARAMETERS if name == "get_weather" else {"const": {}})
    assert await create_streamed(sdk, **fields) == whole


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_required_call_that_is_cut_off_has_no_content(sdk, choice):
    async def check(max_tokens: int) -> bool:
        fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": max_tokens}
        whole = summarize(await create(sdk, **fields))
        content, calls, reason = whole
        assert (content, reason) == (None, "length")
        assert await create_streamed(sdk, **fields) == whole
        return bool(calls)

    # The first tokens only begin the call's markup.
    has_calls = await asyncio.gather(*map(check, (1, 2, 5, 8, 16, 32)))
    assert has_calls[0] < has_calls[-1]


async def test_a_tool_call_and_its_result_are_in_the_next_prompt(sdk):
    answer = await create(sdk, tools=TOOLS, tool_choice=NAMED)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain, 12 C."}
    after = await create(sdk, messages=[*MESSAGES, message.model_dump(), result], tools=TOOLS, max_tokens=20)
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens + 20


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        (structured_outputs(regex="(yes|no), [a-z]{3,8}"), "(yes|no), [a-z]{3,8}"),
        (structured_outputs(choice=["sunny", "rainy"]), "sunny|rainy"),
        (structured_outputs(grammar='root ::= "It is " [0-9]{1,2} " degrees."'), r"It is \d{1,2} degrees\."),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {
                        "type": "tag",
                        "begin": "<t>",
                        "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
                        "end": "</t>",
                    },
                }
            },
            "<t>[12]</t>",
        ),
        ({"response_format": {"type": "json_object"}, "stop": [":"]}, r"\{[^:]*"),
    ],
    ids=["regex", "choice", "grammar", "structural tag", "json object, stopped"],
)
async def test_text_matches_its_regex_choice_grammar_or_tag(sdk, fields, pattern):
    whole = summarize(await create(sdk, **fields))
    assert re.fullmatch(pattern, whole[0])
    assert whole[1:] == ([], "stop")
    assert await create_streamed(sdk, **fields) == whole


async def test_constrained_choices_repeat_with_their_seed_and_have_logprobs(sdk):
    response_format = {"type": "json_schema", "json_schema": {"name": "call", "schema": PARAMETERS}}
    fields = {
        "n": 2,
        "seed": 3,
        "temperature": 1.0,
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": response_format,
    }
    first, second = await asyncio.gather(create(sdk, **fields), create(sdk, **fields))
    for one, other in zip(first.choices, second.choices, strict=True):
        assert one.message.content == other.message.content
        assert one.message.refusal is None
        jsonschema.validate(json.loads(one.message.content), PARAMETERS)
        text = b"".join(bytes(entry.bytes or []) for entry in one.logprobs.content).decode()
        assert text == one.message.content
    assert len({choice.message.content for choice in first.choices}) == 2


async def test_constrained_answers_do_not_change_an_unconstrained_answer(sdk):
    alone = summarize(await create(sdk, max_tokens=30))
    constrained = [create(sdk, tools=TOOLS, tool_choice=NAMED) for _ in range(3)]
    *calls, free = await asyncio.gather(*constrained, create(sdk, max_tokens=30))
    assert summarize(free) == alone
    assert len({summarize(call)[1][0] for call in calls}) == 1


async def test_the_client_parses_into_types(sdk):
    fields = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 120}
    answer = await sdk.chat.completions.parse(**fields, response_format=Place)
    assert isinstance(answer.choices[0].message.parsed, Place)
    tool = openai.pydantic_function_tool(GetWeather)
    answer = await sdk.chat.completions.parse(**fields, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    async with sdk.chat.completions.stream(**fields, response_format=Place) as stream:
        async for _ in stream:
            pass
        assert isinstance((await stream.get_final_completion()).choices[0].message.parsed, Place)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (structured_outputs(regex="(a"), "structured_outputs.regex"),
        (structured_outputs(grammar="root ::= nothing"), "structured_outputs.grammar"),
        (
            structured_outputs(structural_tag={"format": {"type": "no such"}}),
            "structured_outputs.structural_tag.format",
        ),
        (structured_outputs(json={"type": "object", "$ref": "http://example.com/x"}), "structured_outputs.json"),
        (
            {
                "tools": [
                    TOOLS[1],
                    {**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True, "parameters": {"not": {}}}},
                ]
            },
            "tools[1].function.parameters",
        ),
    ],
    ids=str,
)
async def test_constraints_that_can_not_be_enforced_are_a_400(sdk, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        await create(sdk, **fields, stream=True)
    assert refused.value.param.startswith(param)


@pytest.mark.slow
async def test_reasoning_is_unconstrained_and_has_a_budget(run_server, shallow_model, tmp_path):
    model = tmp_path / "thinking"
    model.mkdir()
    for file in shallow_model.iterdir():
        if file.name != "tokenizer.json":
            (model / file.name).symlink_to(file)
    text = (shallow_model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(
        text.replace("<jupyter_code>", "<think>").replace("<jupyter_output>", "</think>")
    )
    template = tmp_path / "template.jinja"
    template.write_text(THINKING_TEMPLATE)
    flags = ("--max-model-len", "1024", "--cpu-cache-gib", "0.1", "--chat-template", str(template))
    with run_server(model, *flags, "--served-model-name", MODEL) as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120) as sdk:
            constrained = ({"tools": TOOLS, "tool_choice": NAMED}, structured_outputs(choice=["sunny", "rainy"]))
            for fields in (*constrained, {"max_tokens": 30}):
                extra = {**fields.pop("extra_body", {}), "max_reasoning_tokens": 12}
                answer = await create(sdk, **fields, extra_body=extra)
                message = answer.choices[0].message
                assert message.reasoning
                assert answer.usage.completion_tokens_details.reasoning_tokens == 13
                assert summarize(answer) == (await create_streamed(sdk, **fields, extra_body=extra))
                if "tools" in fields:
                    jsonschema.validate(json.loads(message.tool_calls[0].function.arguments), PARAMETERS)
                elif extra.keys() > {"max_reasoning_tokens"}:
                    assert message.content in ("sunny", "rainy")
            answer = await create(sdk, reasoning_effort="none", **structured_outputs(choice=["sunny", "rainy"]))
            assert answer.choices[0].message.content in ("sunny", "rainy")
            assert answer.usage.completion_tokens_details.reasoning_tokens == 0
