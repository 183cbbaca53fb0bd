"""Builds the OpenAPI 3.1 document from the code that reads requests and from the types of responses."""

from typing import cast

import msgspec

from nanovllm_server import __version__
from nanovllm_server.protocol.bodies import (
    ChatCompletion,
    ChatCompletionChunk,
    Error,
    Health,
    Load,
    Model,
    ModelList,
    Version,
)
from nanovllm_server.protocol.field_reader import Schema
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.request import Limits, SamplingDefaults, read_chat_request
from nanovllm_server.protocol.schema_recording import record_schema

CITY_SCHEMA: JSON = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER_TOOL: JSON = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather in a city now.", "parameters": CITY_SCHEMA},
}
WEATHER_CHOICE: dict[str, JSON] = {"type": "function", "function": {"name": "weather"}}
WEATHER_CHAT: list[JSON] = [{"role": "user", "content": "What is the weather in Paris?"}]
# Example requests without `model`, by description. `record_schema` needs an example of every nested object, and of
# every kind of an object if the kinds require different fields.
EXAMPLES: dict[str, dict[str, JSON]] = {
    "question": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
        ],
        "reasoning": {"effort": "low", "max_tokens": 100, "exclude": False},
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "a conversation with a refusal": {
        "messages": [
            *WEATHER_CHAT,
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "I can't look outside."}]},
            {"role": "user", "content": "Then guess."},
        ],
    },
    "a conversation with functions instead of tools": {
        "messages": [
            *WEATHER_CHAT,
            {"role": "assistant", "function_call": {"name": "weather", "arguments": '{"city": "Paris"}'}},
            {"role": "function", "name": "weather", "content": "18 degrees, sunny"},
        ],
    },
    "tools": {
        "messages": [
            *WEATHER_CHAT,
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "call_0",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_0", "content": "18 degrees, sunny"},
        ],
        "tools": [WEATHER_TOOL],
    },
    "a function that must be called": {
        "messages": WEATHER_CHAT,
        "tools": [WEATHER_TOOL],
        "tool_choice": WEATHER_CHOICE,
    },
    "functions that may be called": {
        "messages": WEATHER_CHAT,
        "tools": [WEATHER_TOOL],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER_CHOICE]}},
    },
    "JSON of a schema": {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "capital", "schema": CITY_SCHEMA}},
    },
    "any JSON object": {
        "messages": [{"role": "user", "content": "Describe France in JSON."}],
        "response_format": {"type": "json_object"},
    },
    "JSON between tags": {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "response_format": {
            "type": "structural_tag",
            "format": {
                "type": "tag",
                "begin": "<answer>",
                "content": {"type": "json_schema", "json_schema": CITY_SCHEMA},
                "end": "</answer>",
            },
        },
    },
    "an edit with a prediction": {
        "messages": [{"role": "user", "content": "Spell out the number: We have 2 cats."}],
        "prediction": {"type": "content", "content": [{"type": "text", "text": "We have two cats."}]},
    },
    "a prompt for a prefill server": {
        "messages": [{"role": "user", "content": "Summarise this report."}],
        "kv_transfer_params": {"do_remote_decode": True},
    },
    "a prompt that a prefill server has computed": {
        "messages": [{"role": "user", "content": "Summarise this report."}],
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
        },
    },
    "one of these texts": {
        "messages": [{"role": "user", "content": "Is Paris in France?"}],
        "structured_outputs": {"choice": ["yes", "no"]},
    },
}

# Descriptions of fields that are not in OpenAI's documentation.
FIELD_DESCRIPTIONS: dict[str, str] = {
    "top_k": "Number of likeliest tokens to sample from; 0 and -1: sample from all tokens.",
    "min_p": "Sample only from tokens at least this likely, as a share of the likeliest token's probability.",
    "repetition_penalty": "Above 1 makes tokens of the prompt and the output less likely; below 1 more likely.",
    "min_tokens": "Stop strings, stop tokens and the end-of-sequence token have no effect before this many tokens.",
    "ignore_eos": "Continue after the end-of-sequence token.",
    "stop_token_ids": "Tokens that end the answer.",
    "allowed_token_ids": "The answer has only these tokens, and the end token where a grammar can end.",
    "return_tokens_as_token_ids": "In log-probabilities, tokens are `token_id:ID` instead of text.",
    "reasoning": "The options of reasoning under other names. `enabled` sets the chat template's enable_thinking.",
    "max_reasoning_tokens": "Maximum number of reasoning tokens; the server ends longer reasoning.",
    "thinking_token_budget": "Another name of max_reasoning_tokens; -1: no limit.",
    "include_reasoning": "Whether the answer includes the model's reasoning; the default is true.",
    "reasoning_effort": "Sets the chat template's reasoning_effort, and enable_thinking (false for `none`, else true).",
    "chat_template_kwargs": "Further variables of the chat template.",
    "priority": "Requests with a lower number are served first.",
    "cache_salt": "Two prompts share cached prefixes only if they have the same salt.",
    "kv_transfer_params": "Routers set this field for servers with --role prefill or decode. Other servers refuse it.",
    "request_id": "The end of the answer's id. Without X-Request-Id, also the request's id in logs and headers.",
    "prompt_logprobs": "Return log-probabilities of each prompt token, and of this many likely tokens; not in streams.",
    "seed": "The same seed gives the same random numbers. Other requests can change a token only through rounding.",
}
EVENT_STREAM_DESCRIPTION = (
    "Server-sent events. Each event's data is a ChatCompletionChunk. If the answer fails, an event named `error` has "
    "an Error as data. The last event's data is `[DONE]`. Lines that begin with a colon keep connections alive."
)
LIVENESS_SUMMARY = "Whether the engine is alive, also while the server drains"
ERROR_DESCRIPTIONS = {
    400: "A field is wrong, or the body is not JSON; the message names the field, its value and the allowed values.",
    401: "The API key is missing or wrong.",
    403: "The Host header has a name that the server does not allow.",
    404: "The model or the path does not exist.",
    405: "The path does not support the method.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The Content-Type is not JSON.",
    429: "The queue is full.",
    500: "A bug; the log has details under the id in the message.",
    503: "The server is draining, the engine is dead, or the memory for large request bodies is full.",
    504: "The answer took longer than the limit of the request or of the server.",
}
RETRY_AFTER: dict[str, JSON] = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
# Headers of error responses, beside X-Request-Id.
ERROR_HEADERS: dict[int, dict[str, JSON]] = {
    429: RETRY_AFTER,
    503: RETRY_AFTER,
    504: {"X-Should-Retry": {"description": "Tells OpenAI's SDKs not to retry.", "schema": {"const": "false"}}},
}


def openapi_document(
    names: tuple[str, ...], limits: Limits, defaults: SamplingDefaults, *, needs_key: bool
) -> dict[str, JSON]:
    """Builds the OpenAPI document. names: names of the served model. needs_key: requests need an API key."""
    examples: list[dict[str, JSON]] = [{"model": names[0], **example} for example in EXAMPLES.values()]
    request = record_schema(lambda body: read_chat_request(body, limits, defaults), examples)
    properties = cast(dict[str, Schema], request["properties"])
    for name, text in FIELD_DESCRIPTIONS.items():
        properties[name]["description"] = text
    _, schemas = msgspec.json.schema_components(
        (ChatCompletion, ChatCompletionChunk, Error, Health, Load, Model, ModelList, Version),
        ref_template="#/components/schemas/{name}",
    )
    security: dict[str, JSON] = {"security": [{"key": []}]} if needs_key else {}
    security_scheme: dict[str, JSON] = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "nanovllm",
            "version": __version__,
            "description": "Chat completions as OpenAI documents them, over one model.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            "/v1/chat/completions": {"post": {**_chat_operation(names), **security}},
            "/v1/models": {"get": {**_models_operation(), **security}},
            "/v1/models/{name}": {"get": {**_model_operation(), **security}},
            "/health": {"get": _health_operation("health", LIVENESS_SUMMARY, "The engine is dead.")},
            "/ping": {"get": _health_operation("ping", LIVENESS_SUMMARY, "The engine is dead.")},
            "/ready": {
                "get": _health_operation(
                    "ready", "Whether the server accepts requests", "The server is draining, or the engine is dead."
                )
            },
            "/load": {
                "get": _describe_get("load", "How many sequences the server has", "application/json", _ref("Load"))
            },
            "/version": {"get": _describe_get("version", "The server's version", "application/json", _ref("Version"))},
            "/metrics": {"get": _describe_get("metrics", "Counters and latencies, for Prometheus", "text/plain")},
            "/openapi.json": {"get": _describe_get("openapi", "This document", "application/json", {"type": "object"})},
            "/": {"get": _describe_get("page", "A page to chat and to watch the engine", "text/html")},
        },
        "components": {
            "schemas": {"ChatCompletionRequest": request, **cast(dict[str, JSON], schemas)},
            **({"securitySchemes": {"key": security_scheme}} if needs_key else {}),
        },
    }


def _chat_operation(names: tuple[str, ...]) -> dict[str, JSON]:
    examples: dict[str, JSON] = {key: {"value": {"model": names[0], **value}} for key, value in EXAMPLES.items()}
    request_content: Schema = {"schema": _ref("ChatCompletionRequest"), "examples": examples}
    event_body: Schema = {"anyOf": [_ref("ChatCompletionChunk"), _ref("Error")]}
    json_data: Schema = {"type": "string", "contentMediaType": "application/json", "contentSchema": event_body}
    event_data: Schema = {"anyOf": [json_data, {"const": "[DONE]"}]}
    event: Schema = {
        "type": "object",
        "description": EVENT_STREAM_DESCRIPTION,
        "properties": {"event": {"enum": ["message", "error"]}, "data": event_data},
        "required": ["data"],
    }
    return {
        "operationId": "createChatCompletion",
        "summary": "Answer a conversation; with `stream`, send the answer while it is generated",
        "requestBody": {"required": True, "content": {"application/json": request_content}},
        "responses": {
            "200": _response(
                "The answer; with `stream` as events.",
                {"application/json": {"schema": _ref("ChatCompletion")}, "text/event-stream": {"schema": event}},
            ),
            **_error_responses(400, 401, 404, 405, 408, 413, 415, 429, 500, 503, 504),
        },
    }


def _models_operation() -> dict[str, JSON]:
    return {
        "operationId": "listModels",
        "summary": "The model, under each of its names",
        "responses": {"200": _json_response("The list.", "ModelList"), **_error_responses(401, 405, 500)},
    }


def _model_operation() -> dict[str, JSON]:
    parameter: JSON = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "operationId": "retrieveModel",
        "summary": "The model under one of its names, which may contain slashes",
        "parameters": [parameter],
        "responses": {"200": _json_response("The model.", "Model"), **_error_responses(401, 404, 405, 500)},
    }


def _health_operation(name: str, summary: str, failure: str) -> dict[str, JSON]:
    return {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": _json_response("Yes.", "Health"),
            "503": _json_response(failure, "Health"),
            **_error_responses(405, 500),
        },
    }


def _describe_get(name: str, summary: str, content_type: str, schema: Schema | None = None) -> dict[str, JSON]:
    content: dict[str, JSON] = {content_type: {"schema": schema or {"type": "string"}}}
    return {
        "operationId": name,
        "summary": summary,
        "responses": {"200": _response(f"{summary}.", content), **_error_responses(405, 500)},
    }


def _error_responses(*statuses: int) -> dict[str, JSON]:
    responses: dict[str, JSON] = {}
    for status in sorted({403, *statuses}):
        responses[str(status)] = _json_response(ERROR_DESCRIPTIONS[status], "Error", ERROR_HEADERS.get(status))
    return responses


def _response(description: str, content: dict[str, JSON], headers: dict[str, JSON] | None = None) -> dict[str, JSON]:
    text = "The id of the request: the client's own, or a generated one."
    header: JSON = {"description": text, "schema": {"type": "string"}}
    return {"description": description, "headers": {"X-Request-Id": header, **(headers or {})}, "content": content}


def _json_response(description: str, schema: str, headers: dict[str, JSON] | None = None) -> dict[str, JSON]:
    return _response(description, {"application/json": {"schema": _ref(schema)}}, headers)


def _ref(name: str) -> dict[str, JSON]:
    return {"$ref": f"#/components/schemas/{name}"}
