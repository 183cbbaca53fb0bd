"""The description of the API, OpenAPI 3.1, made of what reads requests and of what answers are checked against.

This room must not know HTTP servers. Which paths there are it says itself, and a test compares them with the routes.
"""

from typing import cast

import msgspec

from nanovllm_server import __version__
from nanovllm_server.protocol.bodies import ChatCompletion, ChatCompletionChunk, Error, Health, ModelList
from nanovllm_server.protocol.description import Schema, describe
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.request import Limits, SamplingDefaults, read_chat_request

WEATHER: JSON = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NAMED: dict[str, JSON] = {"type": "function", "function": {"name": "weather"}}
ASKING: list[JSON] = [{"role": "user", "content": "What is the weather in Paris?"}]
# Between them they have every object that a request can hold.
EXAMPLES: dict[str, dict[str, JSON]] = {
    "question": {
        "model": "MODEL",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "tools": {
        "model": "MODEL",
        "messages": [
            *ASKING,
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
        "tools": [WEATHER],
    },
    "a function that must be called": {
        "model": "MODEL",
        "messages": ASKING,
        "tools": [WEATHER],
        "tool_choice": NAMED,
    },
    "functions that may be called": {
        "model": "MODEL",
        "messages": ASKING,
        "tools": [WEATHER],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
    },
    "JSON of a schema": {
        "model": "MODEL",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "capital",
                "schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            },
        },
    },
    "one of these texts": {
        "model": "MODEL",
        "messages": [{"role": "user", "content": "Is Paris in France?"}],
        "structured_outputs": {"choice": ["yes", "no"]},
    },
}

# Of fields that OpenAI's own documentation doesn't explain.
DESCRIPTIONS: dict[str, str] = {
    "top_k": "Draw from this many of the likeliest tokens only; 0 and -1: from all.",
    "min_p": "Draw from tokens at least this likely, as a share of the likeliest one's probability.",
    "repetition_penalty": "Divides the logits of tokens in the prompt or the output; above 1 discourages them.",
    "min_tokens": "No stop string, stop token or end-of-sequence token counts before so many tokens.",
    "ignore_eos": "Go on after the end-of-sequence token.",
    "stop_token_ids": "Tokens that end the answer.",
    "include_reasoning": "Whether the answer has the model's reasoning; it does unless this is false.",
    "reasoning_effort": "Reaches the chat template, and as enable_thinking too, which `none` turns off.",
    "chat_template_kwargs": "Further values for the chat template.",
    "priority": "Lower is served first.",
    "cache_salt": "Prompts share the prefix cache with those of the same salt only.",
    "request_id": "The id of the exchange, instead of the X-Request-Id header.",
    "prompt_logprobs": "Tell of each token of the prompt, and of this many likeliest in its place. Not of streams.",
    "seed": "The same seed gives the same tokens, whatever else the server is at.",
}
SSE = (
    "Server-sent events. The data of each is a ChatCompletionChunk; a failure in mid-stream is an event named `error` "
    "whose data is an Error. The last event's data is `[DONE]`. Lines that begin with a colon keep connections alive."
)
REFUSALS = {
    400: "A field is wrong, or the body is no JSON; the message names field, value and remedy.",
    401: "The API key is missing or wrong.",
    404: "There is no such model or path.",
    405: "The path has no such method.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    429: "The queue is full.",
    500: "A bug; the log has it under the id in the message.",
    503: "The server is draining, or the engine is dead.",
    504: "The answer took longer than the request, or the server, allows.",
}


def document(names: tuple[str, ...], limits: Limits, defaults: SamplingDefaults, *, needs_key: bool) -> dict[str, JSON]:
    """The document of a server that serves a model under `names`. needs_key: its API asks for a key."""
    request = describe(lambda body: read_chat_request(body, limits, defaults), [*EXAMPLES.values()])
    fields = cast(dict[str, Schema], request["properties"])
    for name, text in DESCRIPTIONS.items():
        fields[name]["description"] = text
    _, schemas = msgspec.json.schema_components(
        (ChatCompletion, ChatCompletionChunk, Error, Health, ModelList), ref_template="#/components/schemas/{name}"
    )
    key: dict[str, JSON] = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "nanovllm",
            "version": __version__,
            "description": "Chat completions as OpenAI documents them, over one model.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            "/v1/chat/completions": {"post": _chat(names, needs_key=needs_key)},
            "/v1/models": {"get": _models(needs_key=needs_key)},
            "/health": {"get": _health()},
            "/metrics": {"get": _plain("metrics", "Counters and latencies, for Prometheus", "text/plain")},
            "/openapi.json": {"get": _plain("openapi", "This document", "application/json", {"type": "object"})},
            "/": {"get": _plain("page", "A page to chat and to watch the engine", "text/html")},
        },
        "components": {
            "schemas": {"ChatCompletionRequest": request, **cast(dict[str, JSON], schemas)},
            **({"securitySchemes": {"key": key}} if needs_key else {}),
        },
    }


def _chat(names: tuple[str, ...], *, needs_key: bool) -> dict[str, JSON]:
    examples: dict[str, JSON] = {key: {"value": {**value, "model": names[0]}} for key, value in EXAMPLES.items()}
    request: Schema = {"schema": _ref("ChatCompletionRequest"), "examples": examples}
    body: Schema = {"anyOf": [_ref("ChatCompletionChunk"), _ref("Error")]}
    data: Schema = {
        "anyOf": [
            {"type": "string", "contentMediaType": "application/json", "contentSchema": body},
            {"const": "[DONE]"},
        ]
    }
    # Of one event.
    events: Schema = {
        "schema": {
            "type": "object",
            "description": SSE,
            "properties": {"event": {"enum": ["message", "error"]}, "data": data},
            "required": ["data"],
        }
    }
    return {
        "operationId": "createChatCompletion",
        "summary": "Answer a conversation, whole or, with `stream`, as it is written",
        **_security(needs_key=needs_key),
        "requestBody": {"required": True, "content": {"application/json": request}},
        "responses": {
            "200": _response(
                "The answer; with `stream` as events.",
                {"application/json": {"schema": _ref("ChatCompletion")}, "text/event-stream": events},
            ),
            **_refusals(400, 401, 404, 405, 408, 413, 415, 429, 500, 503, 504),
        },
    }


def _models(*, needs_key: bool) -> dict[str, JSON]:
    return {
        "operationId": "listModels",
        "summary": "The model, under each of its names",
        **_security(needs_key=needs_key),
        "responses": {"200": _json_response("The list.", "ModelList"), **_refusals(401, 405, 500)},
    }


def _health() -> dict[str, JSON]:
    return {
        "operationId": "health",
        "summary": "Whether requests can be served",
        "responses": {
            "200": _json_response("They can.", "Health"),
            "503": _json_response("They can't: the server is draining, or the engine is dead.", "Health"),
            **_refusals(405, 500),
        },
    }


def _plain(operation: str, summary: str, kind: str, schema: Schema | None = None) -> dict[str, JSON]:
    content: dict[str, JSON] = {kind: {"schema": schema or {"type": "string"}}}
    return {
        "operationId": operation,
        "summary": summary,
        "responses": {"200": _response(f"{summary}.", content), **_refusals(405, 500)},
    }


def _refusals(*statuses: int) -> dict[str, JSON]:
    refusals: dict[str, JSON] = {}
    for status in statuses:
        refusal = _json_response(REFUSALS[status], "Error")
        if status in (429, 503):
            header: JSON = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
            refusal["headers"] = {"Retry-After": header}
        refusals[str(status)] = refusal
    return refusals


def _response(description: str, content: dict[str, JSON]) -> dict[str, JSON]:
    header: JSON = {
        "description": "The client's own id of the exchange, or one made here.",
        "schema": {"type": "string"},
    }
    return {"description": description, "headers": {"X-Request-Id": header}, "content": content}


def _json_response(description: str, schema: str) -> dict[str, JSON]:
    return _response(description, {"application/json": {"schema": _ref(schema)}})


def _security(*, needs_key: bool) -> dict[str, JSON]:
    return {"security": [{"key": []}]} if needs_key else {}


def _ref(name: str) -> dict[str, JSON]:
    return {"$ref": f"#/components/schemas/{name}"}
