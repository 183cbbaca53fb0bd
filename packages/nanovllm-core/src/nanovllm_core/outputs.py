"""Defines outputs of requests: tokens, log-probabilities and finish reasons."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

FinishReason = Literal["stop", "length"]


# Types that one process sends to another are msgspec structs, which are fast to create and encode.
class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities for one output token. top: pairs (id, log-probability) of the likeliest tokens, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class PromptTokenLogprobs(NamedTuple):
    """Log-probabilities for one prompt token.

    rank: rank of the prompt token by probability; the likeliest token has rank 1.
    top: pairs (id, log-probability) of the likeliest tokens, best first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of n consecutive prompt tokens. Iteration yields a `PromptTokenLogprobs` per token.

    The fields are bytes of arrays, because creating an object per token of a long prompt would delay other requests.
    logprobs: float32 [n]. ranks: int32 [n]. top_ids: int32 [n, num_top]. top_logprobs: float32 [n, num_top].
    """

    num_top: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes

    @classmethod
    def concatenate(cls, num_top: int, parts: "Sequence[PromptLogprobs]") -> "PromptLogprobs":
        """Concatenate the log-probabilities of consecutive parts of a prompt."""
        array_names = cls.__struct_fields__[1:]
        return cls(num_top, *(b"".join([getattr(part, name) for part in parts]) for name in array_names))

    def __len__(self) -> int:
        return len(self.logprobs) // 4

    def __iter__(self) -> Iterator[PromptTokenLogprobs]:
        top_ids, top_logprobs = memoryview(self.top_ids).cast("i"), memoryview(self.top_logprobs).cast("f")
        pairs = zip(memoryview(self.logprobs).cast("f"), memoryview(self.ranks).cast("i"), strict=True)
        for index, (logprob, rank) in enumerate(pairs):
            span = slice(index * self.num_top, (index + 1) * self.num_top)
            yield PromptTokenLogprobs(logprob, rank, tuple(zip(top_ids[span], top_logprobs[span], strict=True)))


class RequestStart(NamedTuple):
    """Reports a request's first output token. key: request key. Other fields: see `RequestOutput`."""

    key: int
    num_cached_tokens: int
    scheduled_time: float


class RequestFinish(NamedTuple):
    """Reports a request's last output token. key: request key. reason, stop_token: see `RequestOutput`."""

    key: int
    reason: FinishReason
    stop_token: int | None


class DraftTotals(NamedTuple):
    """Reports how many drafts of a request have been verified so far. Fields: see `RequestOutput`."""

    key: int
    num_accepted_drafts: int
    num_rejected_drafts: int


class RequestFailure(NamedTuple):
    """Reports that a request failed. reason: text for the client."""

    key: int
    reason: str


class StepOutputs(msgspec.Struct, frozen=True, array_like=True):
    """The outputs of one step. Each field is one list for all requests, so most requests need no object per step.

    keys, tokens: request key and id of each new token. The tokens of one request are in order.
    logprobs: pairs (request key, log-probabilities for a new token), only for requests with this option.
    prompt_logprobs: pairs (request key, log-probabilities of consecutive prompt tokens), in order. The last pair of a
        request comes no later than the request's first output token.
    draft_totals: one entry per unfinished request for which the step verified drafts.
    """

    keys: list[int] = []
    tokens: list[int] = []
    logprobs: list[tuple[int, TokenLogprobs]] = []
    starts: list[RequestStart] = []
    finishes: list[RequestFinish] = []
    failures: list[RequestFailure] = []
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []
    draft_totals: list[DraftTotals] = []


class RequestOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The output of one request since its previous `RequestOutput`.

    new_token_ids: id of one token, or ids of several tokens if the reader was slow or drafts were accepted.
    num_cached_tokens: number of prompt tokens found in the prefix cache.
    logprobs: one entry per new token; None if not requested.
    finish_reason: set in the last output; None in all earlier outputs.
    stop_token: id of the token that stopped the request; None if no token stopped the request.
    prompt_logprobs: log-probabilities of all prompt tokens but the first. Only the first output has them; None if not
        requested.
    scheduled_time: value of `time.monotonic` when the request first left the engine's queue.
    num_accepted_drafts: number of verified drafts so far that are in the output. num_rejected_drafts: number of the
        other verified drafts.
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
    scheduled_time: float = 0.0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
