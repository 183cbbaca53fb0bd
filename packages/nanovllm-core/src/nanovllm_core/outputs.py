"""Outputs of requests: tokens, their log-probabilities, and why requests finished."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

FinishReason = Literal["stop", "length"]


# Structs, not dataclasses: processes send them to each other as arrays, and a step creates one or more per request.
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
    def concatenate(cls, num_top: int, parts: "Sequence[PromptLogprobs]") -> "PromptLogprobs":
        """The log-probabilities of consecutive `parts` of a prompt."""
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
        top_ids, top_logprobs = memoryview(self.top_ids).cast("i"), memoryview(self.top_logprobs).cast("f")
        pairs = zip(memoryview(self.logprobs).cast("f"), memoryview(self.ranks).cast("i"), strict=True)
        for index, (logprob, rank) in enumerate(pairs):
            span = slice(index * self.num_top, (index + 1) * self.num_top)
            yield PromptTokenLogprobs(logprob, rank, tuple(zip(top_ids[span], top_logprobs[span], strict=True)))


class RequestStart(NamedTuple):
    """A request whose first output token is in the step. num_cached_tokens: prompt tokens found in the prefix cache."""

    key: int
    num_cached_tokens: int


class RequestFinish(NamedTuple):
    """A request whose last output token is in the step. stop_token: see `RequestOutput`."""

    key: int
    reason: FinishReason
    stop_token: int | None


class RequestFailure(NamedTuple):
    """A request that failed, and the reason as text for the client."""

    key: int
    reason: str


class StepOutputs(msgspec.Struct, frozen=True, array_like=True):
    """The outputs of one step for many requests, as columns, so that a step creates few objects.

    keys: int per new token, the key of its request.
    tokens: int per new token, its id; the tokens of one request are in order.
    logprobs: a pair (key, log-probabilities) per new token of each request that wants log-probabilities.
    prompt_logprobs: pairs (key, part of the prompt), in order. The last part of a prompt comes at the latest with the
        first output token.
    """

    keys: list[int] = []
    tokens: list[int] = []
    logprobs: list[tuple[int, TokenLogprobs]] = []
    starts: list[RequestStart] = []
    finishes: list[RequestFinish] = []
    failures: list[RequestFailure] = []
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []


class RequestOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The output of one request since its previous `RequestOutput`.

    id: the request's id, as the client chose it.
    new_token_ids: ids of one token, or of several tokens if the reader was slow.
    num_prompt_tokens: number of prompt tokens.
    num_cached_tokens: number of prompt tokens found in the prefix cache.
    num_output_tokens: number of output tokens so far.
    logprobs: one entry per new token; None if the request wants none.
    finish_reason: set on the last output; else None.
    stop_token: the token id that stopped the request; None if no token stopped the request.
    prompt_logprobs: log-probabilities of all prompt tokens except the first. None if the request wants none, and on all
        outputs except the first.
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
