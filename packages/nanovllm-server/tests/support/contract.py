"""Models of responses: OpenAI's description, plus the fields that our API adds.

Tests validate every response against these models and against the schemas of /openapi.json.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jsonschema_rs
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from nanovllm_server.protocol.openapi import openapi_document
from nanovllm_server.protocol.request import Limits, SamplingDefaults

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class TopLogprob(Strict):
    token: str
    logprob: Annotated[float, Field(le=0, allow_inf_nan=False)]
    bytes: list[Annotated[int, Field(ge=0, le=255)]] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class PromptLogprob(Strict):
    logprob: Annotated[float, Field(le=0, allow_inf_nan=False)]
    rank: Annotated[int, Field(ge=1)]
    decoded_token: str


class Logprobs(Strict):
    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None


class Function(Strict):
    name: Text
    arguments: str


class ToolCall(Strict):
    id: Text
    type: Literal["function"]
    function: Function


class Message(Strict):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] = None
    # Not in OpenAI's API.
    reasoning: Text = None
    reasoning_content: Text = None


class Choice(Strict):
    index: Count
    message: Message
    logprobs: Logprobs | None
    finish_reason: FinishReason
    # Not in OpenAI's API.
    stop_reason: str | int | None
    token_ids: list[Count] = None


class PromptTokensDetails(Strict):
    cached_tokens: Count
    audio_tokens: Count = 0


class CompletionTokensDetails(Strict):
    reasoning_tokens: Count
    audio_tokens: Count = 0
    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count


class Usage(Strict):
    prompt_tokens: Annotated[int, Field(ge=1)]
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TransferParams(Strict):
    """Not in OpenAI's API."""

    do_remote_prefill: Literal[True]
    do_remote_decode: Literal[False]
    remote_engine_id: Text
    remote_block_ids: Annotated[list[int], Field(max_length=0)]
    remote_request_id: Text
    remote_host: Text
    remote_port: Annotated[int, Field(ge=1, le=65535)]
    tp_size: Annotated[int, Field(ge=1)]
    remote_num_tokens: Annotated[int, Field(ge=1)]


class ChatCompletion(Strict):
    id: Text
    object: Literal["chat.completion"]
    created: Annotated[int, Field(ge=1_600_000_000)]
    model: Text
    system_fingerprint: Annotated[str, Field(pattern=r"^nanovllm-async-\d")]
    choices: Annotated[list[Choice], Field(min_length=1)]
    usage: Usage
    service_tier: str | None = None
    # Not in OpenAI's API.
    prompt_token_ids: list[Count] = None
    kv_transfer_params: TransferParams = None
    prompt_logprobs: list[dict[Annotated[str, Field(pattern=r"^\d+$")], PromptLogprob] | None] = None


class FunctionDelta(Strict):
    name: Text = None
    arguments: str


class ToolCallDelta(Strict):
    index: Count
    function: FunctionDelta
    id: Text = None
    type: Literal["function"] = None


class Delta(Strict):
    role: Literal["assistant"] = None
    content: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCallDelta], Field(min_length=1)] = None
    # Not in OpenAI's API.
    reasoning: Text = None
    reasoning_content: Text = None


class ChunkChoice(Strict):
    index: Count
    delta: Delta
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    # Not in OpenAI's API.
    stop_reason: str | int | None = None
    token_ids: list[Count] = None


class Chunk(Strict):
    id: Text
    object: Literal["chat.completion.chunk"]
    created: Annotated[int, Field(ge=1_600_000_000)]
    model: Text
    system_fingerprint: Annotated[str, Field(pattern=r"^nanovllm-async-\d")]
    choices: list[ChunkChoice]
    usage: Usage | None = None
    service_tier: str | None = None
    # Not in OpenAI's API.
    prompt_token_ids: list[Count] = None
    kv_transfer_params: TransferParams = None


class ErrorDetails(Strict):
    message: Text
    type: Text
    param: str | None
    code: str | None


class Error(Strict):
    error: ErrorDetails


class Model(Strict):
    id: Text
    object: Literal["model"]
    created: int
    owned_by: Text
    # Not in OpenAI's API.
    root: Text
    max_model_len: Annotated[int, Field(ge=1)]


class ModelList(Strict):
    object: Literal["list"]
    data: list[Model]


class Health(Strict):
    status: Literal["ok", "unavailable"]
    reason: Text = None


class Load(Strict):
    server_load: Count


class Version(Strict):
    version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+")]


@dataclass(frozen=True)
class ObservedResponse:
    """complete: the test received the response to its end."""

    method: str
    path: str
    status: int
    content_type: str
    body: bytes
    complete: bool


OPENAPI_DOCUMENT = openapi_document(("any",), Limits(1024, 1024, 8), SamplingDefaults(), needs_key=False)
MODELS: dict[str, type[BaseModel]] = {
    "ChatCompletion": ChatCompletion,
    "ChatCompletionChunk": Chunk,
    "Error": Error,
    "Health": Health,
    "Load": Load,
    "Model": Model,
    "ModelList": ModelList,
    "Version": Version,
}
ADAPTERS = {name: TypeAdapter(model) for name, model in MODELS.items()}
VALIDATORS = {
    name: jsonschema_rs.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": OPENAPI_DOCUMENT["components"]}
    )
    for name in MODELS
}
HEALTH_PATHS = ("/health", "/ready", "/ping")
SCHEMA_BY_PATH = {
    "/v1/chat/completions": "ChatCompletion",
    "/v1/models": "ModelList",
    "/load": "Load",
    "/version": "Version",
    **dict.fromkeys(HEALTH_PATHS, "Health"),
}


def check_body(name: str, data: bytes | str) -> Any:
    ADAPTERS[name].validate_json(data)
    body = json.loads(data)
    VALIDATORS[name].validate(body)
    return body


def check_response(response: ObservedResponse) -> None:
    is_stream = response.content_type.startswith("text/event-stream")
    if response.method == "HEAD" or not (response.complete or is_stream):
        return
    if response.status >= 400:
        check_body("Health" if response.path in HEALTH_PATHS and response.status == 503 else "Error", response.body)
        assert response.content_type == "application/json"
    elif is_stream:
        check_stream(response.body, complete=response.complete)
    elif response.path.startswith("/v1/models/"):
        check_body("Model", response.body)
    elif response.path in SCHEMA_BY_PATH:
        body = check_body(SCHEMA_BY_PATH[response.path], response.body)
        assert response.content_type == "application/json"
        if response.path == "/v1/chat/completions":
            assert [choice["index"] for choice in body["choices"]] == [*range(len(body["choices"]))]
            for choice in body["choices"]:
                message = choice["message"]
                assert message.get("reasoning") == message.get("reasoning_content")


def check_stream(data: bytes, *, complete: bool) -> None:
    blocks = data.decode(errors="strict" if complete else "ignore").split("\n\n")
    remainder = blocks.pop()
    assert not (complete and remainder), remainder
    envelopes, started, ended = set(), set(), set()
    for number, block in enumerate(blocks):
        if block.startswith(":"):
            continue
        assert complete is False or blocks[-1] == "data: [DONE]"
        if block == "data: [DONE]":
            assert number == len(blocks) - 1
        elif block.startswith("event: error\n"):
            check_body("Error", block.removeprefix("event: error\ndata: "))
        else:
            assert block.startswith("data: ")
            chunk = check_body("ChatCompletionChunk", block.removeprefix("data: "))
            envelopes.add((chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"]))
            # The last chunk may have the usage and no choices. Every other chunk has one choice.
            if not chunk["choices"]:
                assert chunk["usage"]
                assert blocks[number + 1 :] in ([], ["data: [DONE]"])
            assert len(chunk["choices"]) <= 1
            for choice in chunk["choices"]:
                index, delta = choice["index"], choice["delta"]
                assert index not in ended
                assert ("role" in delta) == (index not in started)
                assert delta.get("reasoning") == delta.get("reasoning_content")
                started.add(index)
                if choice["finish_reason"] is not None:
                    ended.add(index)
    assert len(envelopes) <= 1


async def check_refusal(response: Any, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["Content-Type"] == "application/json"
    error = (await response.get_json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["message"]
    assert len(error["message"]) < 400
    assert isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error
