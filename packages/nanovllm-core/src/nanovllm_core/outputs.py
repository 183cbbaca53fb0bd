"""Outputs of requests: tokens, their log-probabilities, and why requests finished."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

FinishReason = Literal["stop", "length"]


# Structs, not dataclasses: they are sent between processes as arrays, and are created for every request of a step.
class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of a chosen token, and pairs (token id, log-probability) of the likeliest ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class PromptTokenLogprobs(NamedTuple):
    """Log-probabilities at one prompt token. `logprob` and `top`: see `TokenLogprobs`.

    rank: number of tokens that are at least as likely as the prompt token, itself included.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of n consecutive prompt tokens. Iteration yields a `PromptTokenLogprobs` per token.

    Packed as bytes, because creating objects for long prompts would delay other requests.
    logprobs: float32 [n]. ranks: int32 [n]. top_ids: int32 [n, num_top]. top_logprobs: float32 [n, num_top].
    """

    num_top: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes

    @classmethod
    def joined(cls, num_top: int, parts: "Sequence[PromptLogprobs]") -> "PromptLogprobs":
        """Concatenate `parts`."""
        return cls(
            num_top,
            b"".join([part.logprobs for part in parts]),
            b"".join([part.ranks for part in parts]),
            b"".join([part.top_ids for part in parts]),
            b"".join([part.top_logprobs for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.logprobs) // 4

    def __iter__(self) -> Iterator[PromptTokenLogprobs]:
        count = self.num_top
        top_ids, top_logprobs = memoryview(self.top_ids).cast("i"), memoryview(self.top_logprobs).cast("f")
        pairs = zip(memoryview(self.logprobs).cast("f"), memoryview(self.ranks).cast("i"), strict=True)
        for index, (logprob, rank) in enumerate(pairs):
            span = slice(index * count, (index + 1) * count)
            yield PromptTokenLogprobs(logprob, rank, tuple(zip(top_ids[span], top_logprobs[span], strict=True)))


class StepOutputs(msgspec.Struct, frozen=True, array_like=True):
    """The outputs of one step for many requests, as columns, so that a step creates few objects.

    keys, tokens: each new token with the key of its request; tokens of one request are in order.
    logprobs: pairs (key, log-probabilities), one per new token of requests that asked for them.
    begins: pairs (key, cached prompt tokens) of requests whose first output token is here.
    ends: triples (key, finish reason, stop token or None) of requests whose last output token is here.
    failures: pairs (key, reason) of requests that failed.
    prompt_logprobs: pairs (key, part), in order. The last part comes no later than the first output token.
    """

    keys: list[int] = []
    tokens: list[int] = []
    logprobs: list[tuple[int, TokenLogprobs]] = []
    begins: list[tuple[int, int]] = []
    ends: list[tuple[int, FinishReason, int | None]] = []
    failures: list[tuple[int, str]] = []
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []


class RequestOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New output of one request since its last `RequestOutput`.

    id: the request's id, as the client chose it.
    new_token_ids: one token, or several if the reader was slow.
    num_prompt_tokens, num_output_tokens: usage so far.
    num_cached_tokens: prompt tokens found in the prefix cache.
    logprobs: one entry per new token; None if not asked for.
    finish_reason: set on the last output; else None.
    stop_token: the token id that stopped the request; None if it did not stop at a token.
    prompt_logprobs: of all prompt tokens except the first. Set on the first output if asked for; else None.
    """

    id: str
    new_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    prompt_logprobs: PromptLogprobs | None = None
