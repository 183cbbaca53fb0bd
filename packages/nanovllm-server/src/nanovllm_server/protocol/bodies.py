"""Defines response bodies, with the names of OpenAI's API. `/openapi.json` shows the docstrings of the types."""

from typing import Literal, NotRequired, TypedDict

ChoiceFinishReason = Literal["stop", "length", "tool_calls"]


class FunctionCall(TypedDict):
    """The called function. The model may write arguments that are not valid JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class TopLogprob(TypedDict):
    """A token and its log-probability. token: the token's text, or "token_id:ID" on request.
    bytes: the token's UTF-8 bytes; null for special tokens.
    """

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A generated token, and the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(TypedDict):
    """Log-probabilities of generated tokens, in order."""

    content: list[TokenLogprob]
    refusal: None


class PromptLogprob(TypedDict):
    """The log-probability of a token in the prompt. rank: 1 for the likeliest token. OpenAI's API lacks this type."""

    logprob: float
    rank: int
    decoded_token: str


class AnswerMessage(TypedDict):
    """The model's message. reasoning and reasoning_content have the same text; OpenAI's API has neither."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class Choice(TypedDict):
    """One of the request's n answers. OpenAI's API has neither stop_reason nor token_ids.
    stop_reason: stop string or stop token id that ended the answer; null otherwise.
    token_ids: all generated tokens, on request.
    """

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: ChoiceFinishReason
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class PromptTokensDetails(TypedDict):
    """cached_tokens: number of prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """reasoning_tokens: number of output tokens that are reasoning.
    accepted_prediction_tokens: number of accepted drafts (proposed tokens of speculative decoding). Drafts after a stop
        string count too.
    rejected_prediction_tokens: number of the other drafts. Unlike in OpenAI's API, completion_tokens excludes them.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class CompletionUsage(TypedDict):
    """Token counts of a request. completion_tokens: sum over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class KVTransferParams(TypedDict):
    """Where a decode server can fetch the computed prompt. A router sends this object to the decode server.
    remote_host, remote_port: address of the engine that has computed the prompt.
    remote_block_ids: always empty, because decode servers find blocks by hashes.
    remote_request_id: id of the chat completion. tp_size: number of the engine's ranks.
    remote_num_tokens: number of tokens of the prompt.
    """

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_engine_id: str
    remote_block_ids: list[int]
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    remote_num_tokens: int


class ChatCompletion(TypedDict):
    """A complete answer. OpenAI's API has neither prompt_token_ids nor prompt_logprobs; both are sent on request.
    kv_transfer_params: sent if the request has kv_transfer_params.do_remote_decode; not in OpenAI's API.
    prompt_logprobs: null for the first prompt token, and one object for each further token. The object's keys are token
    ids: the id of the prompt token, and the ids of the likeliest tokens at this position.
    """

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: CompletionUsage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]
    kv_transfer_params: NotRequired[KVTransferParams]


class FunctionCallDelta(TypedDict):
    """New text of a call's arguments. Only the call's first delta has the name."""

    arguments: str
    name: NotRequired[str]


class ToolCallDelta(TypedDict):
    """New text of a tool call. index: number of the call, from 0. Only the call's first delta has id and type."""

    index: int
    function: FunctionCallDelta
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]


class ChoiceDelta(TypedDict, total=False):
    """New output of a choice. Only the choice's first chunk has the role."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChunkChoice(TypedDict):
    """A choice in a chunk. stop_reason: absent while finish_reason is null. token_ids: absent unless requested."""

    index: int
    delta: ChoiceDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: ChoiceFinishReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(TypedDict):
    """One event of a streamed answer.
    usage: absent unless requested. null except in the last chunk, which has no choices. With continuous_usage_stats,
    every chunk has the usage so far.
    prompt_token_ids: on request, in the first chunk.
    kv_transfer_params: as in ChatCompletion, in the last chunk with a choice.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: NotRequired[CompletionUsage | None]
    prompt_token_ids: NotRequired[list[int]]
    kv_transfer_params: NotRequired[KVTransferParams]


class ErrorDetails(TypedDict):
    """An error. message is for people; type, param (the field's path) and code are for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """The body of every error response, except the 503 of health and readiness checks."""

    error: ErrorDetails


class Model(TypedDict):
    """A model under one of its names. root: the model's first name. OpenAI's API has neither root nor max_model_len."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(TypedDict):
    """All models."""

    object: Literal["list"]
    data: list[Model]


class Health(TypedDict):
    """The answer to a health or readiness check. reason: why the server is unavailable."""

    status: Literal["ok", "unavailable"]
    reason: NotRequired[str]


class Load(TypedDict):
    """server_load: number of running and waiting sequences of all requests in the server."""

    server_load: int


class Version(TypedDict):
    """version: version of nanovllm-server."""

    version: str
