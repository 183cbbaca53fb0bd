"""What an answer looks like: `chat.completion`, `chat.completion.chunk` and the list of models.

This room must not know how text and log-probabilities were come by: it gets them as values.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from nanovllm_server import __version__
from nanovllm_server.protocol.json import JSON

SYSTEM_FINGERPRINT = f"nanovllm-async-{__version__}"

Finish = Literal["stop", "length"]


class Delta(msgspec.Struct, frozen=True):
    """What became known of one choice at once. A finish reason comes with the last one.

    logprobs: OpenAI's objects, one a token, when asked for. stop_reason: the stop string or stop token id that ended
    the choice; None when the model did, by its end-of-sequence token.
    """

    index: int
    text: str
    logprobs: tuple[JSON, ...] | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; those of the output are summed over its choices."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def body(self) -> dict[str, JSON]:
        """The usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


@dataclass(frozen=True, slots=True)
class Envelope:
    """What stays the same over the whole of one answer."""

    id: str
    created: int
    model: str

    def completion(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> dict[str, JSON]:
        """The whole answer; `choices` holds the deltas of each, in order."""
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "choices": [_whole(deltas) for deltas in choices],
            "usage": usage.body(),
        }

    def chunk(self, choices: list[JSON], usage: JSON, *, with_usage: bool) -> dict[str, JSON]:
        """One chunk of a streamed answer. The field `usage` is there only in answers that were asked for it."""
        chunk: dict[str, JSON] = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "choices": choices,
        }
        if with_usage:
            chunk["usage"] = usage
        return chunk


class Clock:
    """The time in seconds since 1970, never going back."""

    def __init__(self) -> None:
        self._last = 0

    def now(self) -> int:
        """The current second."""
        self._last = max(self._last, int(time.time()))
        return self._last


def role_choice(index: int) -> JSON:
    """The first thing a stream says of a choice: who speaks."""
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def text_choice(delta: Delta) -> JSON:
    """A piece of a choice in a stream."""
    return {
        "index": delta.index,
        "delta": {"content": delta.text},
        "logprobs": _logprobs(delta.logprobs),
        "finish_reason": None,
    }


def finish_choice(delta: Delta) -> JSON:
    """The last thing a stream says of a choice. Takes the log-probabilities with it when no text came with them."""
    return {
        "index": delta.index,
        "delta": {},
        "logprobs": None if delta.text else _logprobs(delta.logprobs),
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }


def models_body(names: Sequence[str], created: int, max_model_len: int) -> dict[str, JSON]:
    """The list of models: one model under each of its names."""
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "nanovllm",
                "root": names[0],
                "max_model_len": max_model_len,
            }
            for name in names
        ],
    }


def _whole(deltas: Sequence[Delta]) -> JSON:
    last = deltas[-1]
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    return {
        "index": last.index,
        "message": {
            "role": "assistant",
            "content": "".join(delta.text for delta in deltas),
            "refusal": None,
        },
        "logprobs": None if last.logprobs is None else {"content": entries, "refusal": None},
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
    }


def _logprobs(entries: tuple[JSON, ...] | None) -> JSON:
    return {"content": list(entries), "refusal": None} if entries else None
