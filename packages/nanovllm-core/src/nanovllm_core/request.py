"""A request: what its sender asked for, what the engine knows of it, and what comes back."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from nanovllm_core.token_ids import TokenIds, as_token_ids

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKENS = 64
MAX_BUDGET_END = 64
MAX_FORBIDDEN = 256
MAX_FORBIDDEN_LENGTH = 16
# Of the state of a recurrent model, for one prompt.
MAX_CHECKPOINTS = 16
# Of what must be above zero; anything smaller would vanish in float32.
_LEAST = 1e-6

FinishReason = Literal["stop", "length"]
BlockHash = int | bytes


class RequestError(ValueError):
    """A request that can't be served: `field` is the name of what is wrong with it, the message says what is right."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class GrammarError(ValueError):
    """A grammar that nothing can be held to; the message, one line, says why and what would be right."""


class GrammarSpec(msgspec.Struct, frozen=True):
    """What an answer must look like, as its sender wrote it.

    kind: how `source` is to be read. "json_schema": a JSON Schema, as JSON; objects have their properties in its order,
        and others only where it says which; whitespace is bounded. "regex": a regular expression for the whole answer.
        "ebnf": rules in GBNF, of which `root` is the answer. "structural_tag": one of xgrammar's structural tags, as
        JSON.
    """

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    source: str


class Budget(msgspec.Struct, frozen=True):
    """How long the first part of an answer may be, which the ids `end` close in a row, as they do reasoning.

    num_tokens: once so many tokens were made and `end` is not among them, the next tokens are `end`; if the last ones
        are how it begins, what is left of it.
    """

    num_tokens: int
    end: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    max_tokens: most tokens to make; None for as many as the context holds.
    temperature: 0 takes the likeliest token. top_k: 0 for all. top_p, min_p: as in the papers that named them
        (Holtzman et al. 2020; Nguyen et al. 2024), 1 and 0 for off. Filters come in the order top-k, top-p over what
        top-k left, and min-p relative to the likeliest.
    seed: the same seed, prompt and model give the same tokens; None lets the engine draw one.
    presence_penalty, frequency_penalty: over the output, as OpenAI defines them. repetition_penalty: over prompt and
        output (Keskar et al. 2019), 1 for off.
    logit_bias: added to the logits of the given token ids.
    min_tokens: no end-of-sequence or stop token before that many. ignore_eos: the model's end-of-sequence tokens
        don't stop it. stop_token_ids: further ids that stop it; like EOS they are part of `new_token_ids`.
    forbidden: sequences of token ids that the output may not contain: where all of one but its last have just been
        made, that last can't be.
    logprobs: None for none, else how many alternatives to report beside each chosen token (0..20); of the model's own
        distribution, before penalties and temperature.
    prompt_logprobs: the same for the tokens of the prompt, but for its first, which nothing leads to. The whole prompt
        is then computed, whatever the prefix cache holds.
    grammar: what the answer must look like. It decides over everything else: where it allows nothing but what
        min_tokens or logit_bias hold back, that comes all the same; when it is complete, end-of-sequence ends the
        request whatever ignore_eos says; stop_token_ids stop it only where it allows them.
    budget: closes the first part of an answer when it is too long. A grammar that allows no such end there wins, and
        the budget is given up.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict[int, float])
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    forbidden: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None
    budget: Budget | None = None

    def validate(self, vocab_size: int) -> None:
        """Refuse what no sampler could honour. Raises RequestError, which names the field."""
        self._validate_numbers()
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError("logit_bias", f"logit_bias may have at most {MAX_LOGIT_BIAS} entries")
        for token, bias in self.logit_bias.items():
            _require_int("logit_bias", token, 0, vocab_size - 1)
            _require_float("logit_bias", bias, -100, 100)
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise RequestError("stop_token_ids", f"stop_token_ids may have at most {MAX_STOP_TOKENS} entries")
        for token in self.stop_token_ids:
            _require_int("stop_token_ids", token, 0, vocab_size - 1)
        if self.budget is not None:
            _require_int("budget", self.budget.num_tokens, 0, None)
            if not 1 <= len(self.budget.end) <= MAX_BUDGET_END:
                raise RequestError("budget", f"the end of a budget must have 1 to {MAX_BUDGET_END} token ids")
            for token in self.budget.end:
                _require_int("budget", token, 0, vocab_size - 1)
        self._validate_forbidden(vocab_size)

    def _validate_forbidden(self, vocab_size: int) -> None:
        if len(self.forbidden) > MAX_FORBIDDEN:
            raise RequestError("forbidden", f"at most {MAX_FORBIDDEN} token sequences may be forbidden")
        for tokens in self.forbidden:
            if not 0 < len(tokens) <= MAX_FORBIDDEN_LENGTH:
                raise RequestError(
                    "forbidden",
                    f"a forbidden sequence has 1 to {MAX_FORBIDDEN_LENGTH} tokens, but one has {len(tokens)}: choose "
                    "shorter words",
                )
            for token in tokens:
                _require_int("forbidden", token, 0, vocab_size - 1)

    def _validate_numbers(self) -> None:
        _require_float("temperature", self.temperature, 0, 100)
        _require_float("top_p", self.top_p, _LEAST, 1)
        _require_float("min_p", self.min_p, 0, 1)
        _require_float("presence_penalty", self.presence_penalty, -2, 2)
        _require_float("frequency_penalty", self.frequency_penalty, -2, 2)
        _require_float("repetition_penalty", self.repetition_penalty, _LEAST, 100)
        _require_int("top_k", self.top_k, 0, None)
        _require_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 1, None)
        if self.seed is not None:
            _require_int("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None:
            _require_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)


def _require_float(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise RequestError(name, f"{name} must be a number from {low:g} to {high:g}, not {value}")


def _require_int(name: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(name, f"{name} must be an integer {bounds}, not {value}")


class GrammarMatcher(Protocol):
    """Where one request's output stands in its grammar."""

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer, after which there is nothing more to match."""
        ...

    def accept(self, token: int) -> bool:
        """Go on by one token. False, and nothing changed, when the grammar doesn't allow it here."""
        ...

    def fill(self, masks: NDArray[np.int32], index: int) -> None:
        """Write which tokens may come next to masks[index], as `nanovllm_kernels.sampling.apply_masks_` reads it."""
        ...

    @staticmethod
    def accept_all(matchers: "Sequence[GrammarMatcher]", tokens: Sequence[int]) -> list[bool]:
        """`accept` of each, in one call. After a RuntimeError of one, some of the others have gone on."""
        ...

    @staticmethod
    def fill_all(matchers: "Sequence[GrammarMatcher]", masks: NDArray[np.int32]) -> None:
        """`fill` of each, to the first of `masks`, in one call."""
        ...


class CompiledGrammar(Protocol):
    """What `nanovllm_core.grammar` made of a GrammarSpec; all others only pass it on."""

    def start(self) -> GrammarMatcher:
        """A matcher that stands at the beginning."""
        ...


class Checkpoint(NamedTuple):
    """Where a recurrent model's state is kept as it stands after the first `position` tokens of a request."""

    position: int
    slot: int


class RequestStatus(Enum):
    """Where a request is in its life. Preemption leads back to WAITING."""

    WAITING_GRAMMAR = "waiting for its grammar"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence from prompt to last token.

    Its sender fills the first group. The rest belongs to the engine; what changes in every step of a running request
    is not here but in the scheduler's rows.

    id: chosen by the sender, unique among its requests in the engine.
    token_ids: the prompt, as integers or as an array of them; kept as `prompt_ids`.
    cache_salt: requests with different salts never share cached blocks.
    priority: lower is served first; among equals, whoever came first.
    prompt_ids: the prompt, read-only. output_ids: the tokens that the engine made and the host knows.
    key: what the engine calls it, never used twice by any client of an engine.
    row: where its state is while it runs, -1 for nowhere.
    compiled: its grammar, once there, if it has one.
    state_slot: where a recurrent model keeps its state. state_origin: the slot whose copy that begins as, 0 for zeros.
    checkpoints: those that are yet to be made, the first first.
    num_scored: of a request that asks for its prompt's log-probabilities, how many steps were launched for.
    """

    id: str
    token_ids: InitVar[Sequence[int] | NDArray[Any]]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    priority: int = 0
    arrival_time: float = 0.0

    prompt_ids: TokenIds = field(init=False)
    output_ids: list[int] = field(init=False, default_factory=list[int])
    key: int = field(init=False, default=0)
    num_prompt_tokens: int = field(init=False)
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    num_cached_tokens: int = field(init=False, default=0)
    row: int = field(init=False, default=-1)
    block_ids: list[int] = field(init=False, default_factory=list[int])
    block_hashes: list[BlockHash] = field(init=False, default_factory=list[BlockHash])
    num_committed_blocks: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    stop_ids: frozenset[int] = field(init=False, default=frozenset())
    max_total_tokens: int = field(init=False, default=0)
    seed: int = field(init=False, default=0)
    compiled: CompiledGrammar | None = field(init=False, default=None)
    num_scored: int = field(init=False, default=0)
    state_slot: int = field(init=False, default=0)
    state_origin: int = field(init=False, default=0)
    checkpoints: list[Checkpoint] = field(init=False, default_factory=list[Checkpoint])

    def __post_init__(self, token_ids: Sequence[int] | NDArray[Any]) -> None:
        try:
            self.prompt_ids = as_token_ids(token_ids)
        except ValueError as error:
            raise RequestError("prompt", f"the prompt must be token ids: {error}") from error
        self.num_prompt_tokens = len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that the host knows: the prompt and the outputs."""
        return self.num_prompt_tokens + len(self.output_ids)

    def known_ids(self) -> TokenIds:
        """The prompt and the outputs in one array; without outputs the prompt's own array."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, np.array(self.output_ids, np.int32)))

    @property
    def num_to_score(self) -> int:
        """Tokens of the prompt whose log-probabilities no step was launched for yet."""
        return 0 if self.sampling.prompt_logprobs is None else self.num_prompt_tokens - 1 - self.num_scored


# Structs, not dataclasses: they cross the wire (as arrays, without names), or are made for every request of a step.
class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position: of the chosen token, and of the likeliest ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class PromptTokenLogprobs(NamedTuple):
    """Log-probabilities at one token of a prompt: its own, and of the likeliest in its place, best first.

    rank: how many tokens are at least as likely as it, itself included.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of n tokens of a prompt in a row, each given all before it; iterate for one at a time.

    Packed, as long prompts have more numbers than there is time to make objects of beside others' tokens.
    num_top: how many likeliest ones each has. logprobs: float32 [n]. ranks: int32 [n]. top_ids: int32 [n, num_top].
    top_logprobs: float32 [n, num_top].
    """

    num_top: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes

    @classmethod
    def joined(cls, num_top: int, parts: "Sequence[PromptLogprobs]") -> "PromptLogprobs":
        """Those of `parts`, one after another."""
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
        own = zip(memoryview(self.logprobs).cast("f"), memoryview(self.ranks).cast("i"), strict=True)
        for index, (logprob, rank) in enumerate(own):
            place = slice(index * count, (index + 1) * count)
            yield PromptTokenLogprobs(logprob, rank, tuple(zip(top_ids[place], top_logprobs[place], strict=True)))


class StepOutputs(msgspec.Struct, frozen=True, array_like=True):
    """What one step made for many requests, by their keys, as columns: few objects, however many the requests.

    keys, tokens: each new token and whose it is, those of one request in order. logprobs: one entry for each new token
    of those that asked. begins: requests whose first token is here, and how many of their prompt's tokens were found in
    the prefix cache. ends: requests whose last token is here, why they ended, and the id that ended them, if one did.
    failures: requests that end here without having come to an end, and why. prompt_logprobs: of requests that asked,
    more of them, in order; the last come no later than the first token.
    """

    keys: list[int] = []
    tokens: list[int] = []
    logprobs: list[tuple[int, TokenLogprobs]] = []
    begins: list[tuple[int, int]] = []
    ends: list[tuple[int, FinishReason, int | None]] = []
    failures: list[tuple[int, str]] = []
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []


class RequestOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was made for one request since its reader last looked.

    new_token_ids: one, or several when its reader was slow. logprobs: one entry a new token, when asked for.
    finish_reason: set on the last output. stop_token: the id that ended it, when one did.
    num_prompt_tokens, num_cached_tokens (prompt tokens found in the prefix cache), num_output_tokens: usage so far.
    prompt_logprobs: of all tokens of the prompt but the first, in the first output, when asked for.
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
