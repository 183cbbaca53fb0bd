import json

import pytest
from contract import check_refusal

from nanovllm_server.protocol.unsupported import HARMLESS_VALUES, REPLACEMENTS

USER = {"role": "user", "content": "hi"}


def message(**fields):
    return {"messages": [{**USER, **fields}]}


def prediction(content):
    return {"prediction": {"type": "content", "content": content}}


TOOL = {"type": "function", "function": {"name": "f"}}
PAST_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def tool(**fields):
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def allowed_tools(**fields):
    return {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": fields}}


def json_schema(**fields):
    json_schema_fields = {"name": "a", "schema": {"type": "object"}, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema_fields}}


def make_nested_format(depth):
    tag_format = {"type": "any_text"}
    for _ in range(depth):
        tag_format = {"a": tag_format}
    return tag_format


# Pairs of (fields of the request, path that the error names).
INVALID_FIELDS = [
    ({"model": 7}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    (message(role="robot"), "messages[0].role"),
    (message(role=None), "messages[0].role"),
    (message(role=["user"]), "messages[0].role"),
    (message(content=None), "messages[0].content"),
    (message(content=5), "messages[0].content"),
    (message(content=[]), "messages[0].content"),
    (message(content=["hi"]), "messages[0].content[0]"),
    (message(content=[{"type": "text"}]), "messages[0].content[0].text"),
    (message(content=[{"type": "text", "text": "a"}, {"type": "text", "text": 1}]), "messages[0].content[1].text"),
    (message(content=[{"text": "a"}]), "messages[0].content[0].type"),
    (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type"),
    (message(name=3), "messages[0].name"),
    (message(tool_calls="x"), "messages[0].tool_calls"),
    (message(refusal=1), "messages[0].refusal"),
    ({"messages": [USER, {"role": "assistant", "content": []}]}, "messages[1].content"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": "x"}]}, "messages[1].tool_calls"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [1]}]}, "messages[1].tool_calls[0]"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0].function"),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    ({"messages": [USER, {"role": "assistant", "content": "", "function_call": "f"}]}, "messages[1].function_call"),
    ({"messages": [USER, {"role": "assistant", "function_call": {}}]}, "messages[1].function_call.name"),
    (
        {"messages": [USER, {"role": "assistant", "function_call": {"name": "f"}}]},
        "messages[1].function_call.arguments",
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [PAST_CALL], "function_call": PAST_CALL["function"]}]},
        "messages[1].function_call",
    ),
    ({"messages": [USER, {"role": "tool", "content": "4", "tool_call_id": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"prediction": "hi"}, "prediction"),
    ({"prediction": []}, "prediction"),
    ({"prediction": {}}, "prediction.type"),
    ({"prediction": {"content": "hi"}}, "prediction.type"),
    ({"prediction": {"type": "text", "content": "hi"}}, "prediction.type"),
    ({"prediction": {"type": 1, "content": "hi"}}, "prediction.type"),
    (prediction(None), "prediction.content"),
    (prediction(5), "prediction.content"),
    (prediction([]), "prediction.content"),
    (prediction(["hi"]), "prediction.content[0]"),
    (prediction([{"type": "text"}]), "prediction.content[0].text"),
    (prediction([{"type": "text", "text": "a"}, {"type": "text", "text": 1}]), "prediction.content[1].text"),
    (prediction([{"text": "a"}]), "prediction.content[0].type"),
    (prediction([{"type": "refusal", "refusal": "no"}]), "prediction.content[0].type"),
    (prediction([{"type": "image_url", "image_url": {"url": "x"}}]), "prediction.content[0].type"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"max_tokens": 512}, "max_tokens"),
    ({"max_completion_tokens": 512}, "max_completion_tokens"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": "NaN"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**30}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": False}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": 9}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", None]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 2000}, "stop"),
    ({"stop_token_ids": [320]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1, True]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": 5}, "allowed_token_ids"),
    ({"allowed_token_ids": {"5": 1}}, "allowed_token_ids"),
    ({"allowed_token_ids": [320]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [5, -1]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": [5, "6"]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": [5, 6.5]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": [5] * 4097}, "allowed_token_ids"),
    ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias"),
    ({"logit_bias": {"320": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"5": True}}, "logit_bias.5"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": "yes"}}, "stream_options.continuous_usage_stats"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": 512}, "min_tokens"),
    ({"priority": "high"}, "priority"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"request_id": "é"}, "request_id"),
    ({"user": 5}, "user"),
    ({"metadata": "x"}, "metadata"),
    ({"tools": []}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tools": ["f"]}, "tools[0]"),
    ({"tools": [TOOL, {}]}, "tools[1].type"),
    ({"tools": [{**TOOL, "type": "custom"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    (tool(name=None), "tools[0].function.name"),
    (tool(name=""), "tools[0].function.name"),
    (tool(name="a b"), "tools[0].function.name"),
    (tool(name="é"), "tools[0].function.name"),
    (tool(name="f" * 257), "tools[0].function.name"),
    (tool(description=1), "tools[0].function.description"),
    (tool(parameters=[]), "tools[0].function.parameters"),
    (tool(strict="yes"), "tools[0].function.strict"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [TOOL]}, "tools"),
    ({"tools": [TOOL], "tool_choice": {}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.function"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": ["f"]}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    (allowed_tools(), "tool_choice.allowed_tools.mode"),
    (allowed_tools(mode="none"), "tool_choice.allowed_tools.mode"),
    (allowed_tools(mode="auto"), "tool_choice.allowed_tools.tools"),
    (allowed_tools(mode="auto", tools=[]), "tool_choice.allowed_tools.tools"),
    (allowed_tools(mode="auto", tools=["f"]), "tool_choice.allowed_tools.tools[0]"),
    (
        allowed_tools(mode="auto", tools=[TOOL, {"type": "function", "function": {"name": "g"}}]),
        "tool_choice.allowed_tools.tools[1].function.name",
    ),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": 1}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"reasoning_effort": 1}, "reasoning_effort"),
    ({"include_reasoning": "no"}, "include_reasoning"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"reasoning": "high"}, "reasoning"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
    ({"reasoning": {"exclude": 1}}, "reasoning.exclude"),
    ({"reasoning": {"enabled": "yes"}}, "reasoning.enabled"),
    ({"reasoning": {"effort": "none", "enabled": True}}, "reasoning.enabled"),
    ({"reasoning": {"enabled": False}, "reasoning_effort": "low"}, "reasoning.enabled"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
    ({"reasoning": {"max_tokens": 5}, "thinking_token_budget": 4}, "reasoning.max_tokens"),
    ({"reasoning": {"exclude": True}, "include_reasoning": True}, "reasoning.exclude"),
    ({"thinking_token_budget": 5, "max_reasoning_tokens": 4}, "thinking_token_budget"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"thinking_token_budget": "5"}, "thinking_token_budget"),
    ({"max_reasoning_tokens": -1}, "max_reasoning_tokens"),
    ({"max_reasoning_tokens": 1.5}, "max_reasoning_tokens"),
    ({"max_reasoning_tokens": "5"}, "max_reasoning_tokens"),
    ({"response_format": "json"}, "response_format"),
    ({"continue_final_message": 1}, "continue_final_message"),
    ({"add_generation_prompt": "no"}, "add_generation_prompt"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"documents": {}}, "documents"),
    ({"documents": [{"text": "a"}, "b"]}, "documents[1]"),
    ({"skip_special_tokens": 0}, "skip_special_tokens"),
    ({"spaces_between_special_tokens": "yes"}, "spaces_between_special_tokens"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "value": {"type": "object"}}}, "response_format.value"),
    (json_schema(name=None), "response_format.json_schema.name"),
    (json_schema(name="a b"), "response_format.json_schema.name"),
    (json_schema(name="a" * 65), "response_format.json_schema.name"),
    (json_schema(strict="yes"), "response_format.json_schema.strict"),
    (json_schema(schema="{}"), "response_format.json_schema.schema"),
    (json_schema(schema=[]), "response_format.json_schema.schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
    ({"response_format": {"type": "structural_tag", "format": "x"}}, "response_format.format"),
    (
        {"response_format": {"type": "structural_tag", "format": make_nested_format(100)}},
        "response_format.format" + ".a" * 65,
    ),
    ({"response_format": {"type": "structural_tag", "format": {"type": "x" * 200_000}}}, "response_format.format"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": "a"}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * 20_000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": " "}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": ["root"]}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "a" * 200_000}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"structural_tag": []}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"structural_tag": {"type": "tag"}}}, "structured_outputs.structural_tag.type"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag.format"),
    ({"return_token_ids": 0}, "return_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 512}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
    ({"bad_words": "word"}, "bad_words"),
    ({"bad_words": ["a", ""]}, "bad_words[1]"),
    ({"bad_words": [" "]}, "bad_words[0]"),
    ({"bad_words": [7]}, "bad_words[0]"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    ({"bad_words": ["a" * 257]}, "bad_words[0]"),
    ({"bad_words": ["seventeen letters"]}, "bad_words"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 1.5}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": -1}, "timeout"),
    ({"timeout": "5s"}, "timeout"),
    ({"timeout": 1e6}, "timeout"),
    ({"messages": [USER] * 10_001}, "messages"),
    ({"tools": [TOOL] * 1025}, "tools"),
    ({"temperature": [[[1]]]}, "temperature"),
]


@pytest.mark.parametrize(("fields", "param"), INVALID_FIELDS, ids=lambda value: json.dumps(value)[:60])
async def test_invalid_field_is_a_400_that_names_the_field(post, engine, service, fields, param):
    error = await check_refusal(await post(**fields), 400, param)
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[-1] in error["message"]
    assert engine.requests == []
    assert service.admission.num_active == 0
    assert (await post()).status_code == 200


@pytest.mark.parametrize("name", [*HARMLESS_VALUES, *REPLACEMENTS])
async def test_unsupported_field_is_refused_by_name(post, name):
    error = await check_refusal(await post(**{name: {"some": "thing"}}), 400, name)
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("name", "value", "suggestion"),
    [
        ("length_penalty", 0.8, "1"),
        ("length_penalty", True, "1"),
        ("early_stopping", True, "false"),
        ("early_stopping", "never", "false"),
        ("add_special_tokens", True, "false"),
        ("add_special_tokens", 0, "false"),
        ("mm_processor_kwargs", {"num_crops": 4}, "{}"),
        ("ec_transfer_params", {"do_remote_decode": True}, "{}"),
        ("vllm_xargs", {"a": 1}, "{}"),
        ("modalities", ["text", "audio"], '["text"]'),
        ("lora_request", {"lora_name": "a"}, None),
        ("lora_request", {}, None),
    ],
)
async def test_error_of_an_unsupported_field_suggests_a_value_without_effect(post, name, value, suggestion):
    error = await check_refusal(await post(**{name: value}), 400, name)
    expected = f"{name} is not supported: leave it out"
    assert error["message"] == (expected if suggestion is None else f"{expected} or set it to {suggestion}")


@pytest.mark.parametrize(("name", "value"), [("length_penalty", 1.0), ("length_penalty", 1), ("best_of", 1.0)])
async def test_numbers_without_effect_may_be_integers_or_floats(post, name, value):
    assert (await post(**{name: value})).status_code == 200


@pytest.mark.parametrize(("name", "replacement"), REPLACEMENTS.items())
async def test_error_names_the_replacement_of_an_unsupported_field(post, name, replacement):
    error = await check_refusal(await post(**{name: "x"}), 400, name)
    assert replacement in error["message"]


async def test_error_names_the_replacement_of_a_field_of_an_earlier_openai_api(post):
    function = {"name": "f", "parameters": {"type": "object"}}
    for fields, replacement in (({"functions": [function]}, "tools"), ({"function_call": "auto"}, "tool_choice")):
        (name,) = fields
        error = await check_refusal(await post(**fields), 400, name)
        assert error["message"] == f"{name} is not supported: use {replacement}"


async def test_unsupported_fields_without_effect_are_accepted(post):
    harmless = {name: values[0] for name, values in HARMLESS_VALUES.items() if values}
    response = await post(
        **harmless,
        tool_choice="none",
        parallel_tool_calls=True,
        tools=None,
        structured_outputs=None,
        metadata={"a": "b"},
        store=True,
        user="u",
    )
    assert response.status_code == 200


async def test_null_is_the_same_as_absent(post):
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "logprobs", "stream", "logit_bias")
    assert (await post(**dict.fromkeys(names))).status_code == 200


async def test_unknown_fields_are_ignored(post):
    assert (await post(some_new_field={"a": 1}, messages=[{**USER, "mood": "good"}])).status_code == 200
