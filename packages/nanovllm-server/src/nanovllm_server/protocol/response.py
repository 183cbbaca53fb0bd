"""Builds response bodies: complete answers, chunks of streamed answers, and the list of models."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import orjson

from nanovllm_server import __version__
from nanovllm_server.protocol.bodies import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChoiceDelta,
    ChoiceFinishReason,
    ChoiceLogprobs,
    ChunkChoice,
    CompletionUsage,
    FunctionCall,
    FunctionCallDelta,
    KVTransferParams,
    Model,
    ModelList,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
)

SYSTEM_FINGERPRINT = f"nanovllm-async-{__version__}"


class CallDelta(msgspec.Struct, frozen=True):
    """New text of a tool call. index: index of the call in its choice. Only a call's first delta has id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class Delta(msgspec.Struct, frozen=True):
    """New output of one choice (one of the request's n answers).

    logprobs: the JSON of one TokenLogprob for each new token; None if not requested.
    finish_reason: None except in the last delta.
    stop_reason: stop string or stop token id that ended the choice; None if neither ended the choice.
    has_null_content: the content is null, because the choice ended within reasoning or must be a tool call.
    token_ids: all tokens since the previous delta; None if not requested.
    """

    index: int
    text: str
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    logprobs: tuple[orjson.Fragment, ...] | None = None
    finish_reason: ChoiceFinishReason | None = None
    stop_reason: str | int | None = None
    has_null_content: bool = False
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    completion_tokens: output tokens of all choices, including reasoning.
    accepted_prediction_tokens: drafts in the engine's output, also those after a stop string.
    rejected_prediction_tokens: the other verified drafts.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int

    def body(self) -> CompletionUsage:
        """Returns the JSON object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": self.accepted_prediction_tokens,
                "rejected_prediction_tokens": self.rejected_prediction_tokens,
            },
        }


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields of an answer or of its chunks, except choices and usage.

    prompt_token_ids, transfer_params: None if not requested.
    """

    id: str
    created: int
    model: str
    prompt_token_ids: list[int] | None = None
    transfer_params: KVTransferParams | None = None

    def completion(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> ChatCompletion:
        """Builds the complete answer. choices: the deltas of each choice."""
        body: ChatCompletion = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "choices": [_join_choice(deltas) for deltas in choices],
            "usage": usage.body(),
        }
        if self.prompt_token_ids is not None:
            body["prompt_token_ids"] = self.prompt_token_ids
        if self.transfer_params is not None:
            body["kv_transfer_params"] = self.transfer_params
        return body

    def chunk(
        self,
        choices: list[ChunkChoice],
        usage: CompletionUsage | None,
        *,
        with_usage: bool,
        with_prompt: bool = False,
        with_transfer: bool = False,
    ) -> ChatCompletionChunk:
        """Builds a chunk. with_usage, with_prompt, with_transfer: add these fields; the last two only if requested."""
        chunk: ChatCompletionChunk = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "choices": choices,
        }
        if with_usage:
            chunk["usage"] = usage
        if with_prompt and self.prompt_token_ids is not None:
            chunk["prompt_token_ids"] = self.prompt_token_ids
        if with_transfer and self.transfer_params is not None:
            chunk["kv_transfer_params"] = self.transfer_params
        return chunk


class Clock:
    """A clock that never goes back."""

    def __init__(self) -> None:
        self._last_s = 0

    def now(self) -> int:
        """Returns the seconds since 1970."""
        self._last_s = max(self._last_s, int(time.time()))
        return self._last_s


def make_chunk_choices(delta: Delta, *, is_first: bool) -> list[ChunkChoice]:
    """Splits a delta into objects: role (if `is_first`), reasoning, text, one per call, and the end of the choice."""
    choice_deltas: list[ChoiceDelta] = []
    if delta.reasoning:
        # DeepSeek's clients read `reasoning_content`.
        choice_deltas.append({"reasoning": delta.reasoning, "reasoning_content": delta.reasoning})
    if delta.text:
        choice_deltas.append({"content": delta.text})
    choice_deltas.extend({"tool_calls": [_make_tool_call_delta(call)]} for call in delta.calls)
    logprobs = _make_choice_logprobs(delta.logprobs) if delta.logprobs else None
    choices: list[ChunkChoice] = []
    if is_first:
        # As in a complete answer, the content is null if the choice begins with reasoning or a call.
        content = None if delta.reasoning or delta.has_null_content or (delta.calls and not delta.text) else ""
        choices.append(_make_chunk_choice(delta.index, {"role": "assistant", "content": content}, None))
    for choice_delta in choice_deltas:
        choices.append(_make_chunk_choice(delta.index, choice_delta, logprobs))
        logprobs = None
    if delta.finish_reason is not None:
        last_choice = _make_chunk_choice(delta.index, {}, logprobs)
        last_choice["finish_reason"], last_choice["stop_reason"] = delta.finish_reason, delta.stop_reason
        choices.append(last_choice)
    if delta.token_ids is not None:
        for choice in choices:
            choice["token_ids"] = []
        # An object with the role gets the token ids only if there is no other object.
        choices[min(int(is_first), len(choices) - 1)]["token_ids"] = [*delta.token_ids]
    return choices


def models_body(names: Sequence[str], created_s: int, max_model_len: int) -> ModelList:
    """Builds the list of models: one object per name of the served model."""
    return {
        "object": "list",
        "data": [model_body(name, names, created_s, max_model_len) for name in names],
    }


def model_body(name: str, names: Sequence[str], created_s: int, max_model_len: int) -> Model:
    """Builds the description of the served model. name: one of the model's names. names: all its names."""
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "nanovllm",
        "root": names[0],
        "max_model_len": max_model_len,
    }


def _join_choice(deltas: Sequence[Delta]) -> Choice:
    last_delta = deltas[-1]
    logprobs = (entry for delta in deltas for entry in delta.logprobs or ())
    body: Choice = {
        "index": last_delta.index,
        "message": _join_message(deltas),
        "logprobs": None if last_delta.logprobs is None else _make_choice_logprobs(logprobs),
        "finish_reason": cast(ChoiceFinishReason, last_delta.finish_reason),
        "stop_reason": last_delta.stop_reason,
    }
    if last_delta.token_ids is not None:
        body["token_ids"] = [token_id for delta in deltas for token_id in delta.token_ids or ()]
    return body


def _make_choice_logprobs(entries: Iterable[orjson.Fragment]) -> ChoiceLogprobs:
    # orjson inserts the JSON of the entries.
    return {"content": cast(list[TokenLogprob], [*entries]), "refusal": None}


def _join_message(deltas: Sequence[Delta]) -> AnswerMessage:
    reasoning = "".join(delta.reasoning for delta in deltas)
    calls = _join_calls(call for delta in deltas for call in delta.calls)
    content: str | None = "".join(delta.text for delta in deltas)
    if not content and (reasoning or calls or deltas[-1].has_null_content):
        content = None
    message: AnswerMessage = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning"] = message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _join_calls(deltas: Iterable[CallDelta]) -> list[ToolCall]:
    first_delta_by_call: dict[int, CallDelta] = {}
    arguments_by_call: dict[int, list[str]] = {}
    for delta in deltas:
        first_delta_by_call.setdefault(delta.index, delta)
        arguments_by_call.setdefault(delta.index, []).append(delta.arguments)
    calls: list[ToolCall] = []
    for index, first_delta in first_delta_by_call.items():
        function: FunctionCall = {"name": cast(str, first_delta.name), "arguments": "".join(arguments_by_call[index])}
        calls.append({"id": cast(str, first_delta.id), "type": "function", "function": function})
    return calls


def _make_tool_call_delta(call: CallDelta) -> ToolCallDelta:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function: FunctionCallDelta = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": cast(str, call.id), "type": "function", "function": function}


def _make_chunk_choice(index: int, delta: ChoiceDelta, logprobs: ChoiceLogprobs | None) -> ChunkChoice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
