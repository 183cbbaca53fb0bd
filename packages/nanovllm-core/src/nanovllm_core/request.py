"""Requests, their sampling parameters, the engine's state of a request, and outputs."""

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
# State checkpoints of a recurrent model per prompt.
MAX_CHECKPOINTS = 16
# Lower bound of parameters that must be above zero.
_LEAST = 1e-6

FinishReason = Literal["stop", "length"]
BlockHash = int | bytes


class RequestError(ValueError):
    """A request that can't be served. field: the name of the invalid field. The message says which values are valid."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


# invalid_grammar: the grammar can't be compiled. invalid_schema: a JSON schema in it is invalid.
# unsupported_schema: a valid JSON schema can't be enforced. unsupported_parameters: XML elements can't hold its values.
GrammarErrorCode = Literal["invalid_grammar", "invalid_schema", "unsupported_schema", "unsupported_parameters"]


class GrammarError(ValueError):
    """A grammar that can't be used. The message is one line that says why and what to change.

    `GrammarError(*error.args)` is an equal error.
    place: the place of the keyword at fault in a JSON schema, see `GrammarSpec.place`; None if no schema is at fault.
    """

    def __init__(self, message: str, place: str | None = None, code: GrammarErrorCode = "invalid_grammar"):
        super().__init__(message, place, code)
        self.message = message
        self.place = place
        self.code: GrammarErrorCode = code

    def __str__(self) -> str:
        return self.message


class GrammarSpec(msgspec.Struct, frozen=True):
    """A grammar that an output must match, as the client wrote it.

    kind: the language of `source`. "json_schema": a JSON Schema as JSON. Properties come in the schema's order;
        undeclared properties are allowed only where the schema describes them; whitespace is bounded. "regex": a
        regular expression for the whole output. "ebnf": rules in GBNF; the output matches `root`. "structural_tag": a
        structural tag of xgrammar as JSON, with the additions of `nanovllm_core.grammar.schema_enforcement`.
    place: JSON pointer to the root of `source`, with which places in errors begin.
    """

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    source: str
    place: str = "#"


# By the place of each format "xml_parameters" of a structural tag: a JSON schema that states only the values' types.
ParameterTypes = dict[str, dict[str, Any]]


class Budget(msgspec.Struct, frozen=True):
    """A limit on the first part of an output, for example on reasoning.

    num_tokens: if `end` has not occurred within this many tokens, the engine forces it. If the last tokens are a
        beginning of `end`, only the rest is forced.
    end: the token ids that close the first part.
    """

    num_tokens: int
    end: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options for sampling the tokens of one request.

    max_tokens: most output tokens; None for as many as the context holds.
    temperature: 0 for greedy sampling.
    top_k: 0 for off. Filters apply in the order top-k, top-p, min-p.
    top_p: Holtzman et al. 2020; 1 for off. It applies to the tokens that top-k keeps.
    min_p: Nguyen et al. 2024, relative to the likeliest token; 0 for off.
    seed: the same seed, prompt and model give the same tokens; None for a seed drawn by the engine.
    presence_penalty, frequency_penalty: over the output, as OpenAI defines them; 0 for off.
    repetition_penalty: over prompt and output (Keskar et al. 2019); 1 for off.
    logit_bias: by token id, a number added to its logit.
    min_tokens: no end-of-sequence or stop token is sampled before this many output tokens.
    ignore_eos: do not stop at the model's end-of-sequence tokens.
    stop_token_ids: further token ids that stop the request; like end-of-sequence they are part of `new_token_ids`.
    forbidden: sequences of token ids that the output may not contain.
    logprobs: alternatives to report per output token (0..20); None for no log-probabilities. They are computed from
        the model's distribution before penalties and temperature.
    prompt_logprobs: the same for prompt tokens except the first. The whole prompt is then computed, even if cached.
    grammar: a grammar that the output must match; it takes precedence over all other options. A token that min_tokens
        or logit_bias suppress is sampled if the grammar allows no other. A complete grammar ends the request even with
        ignore_eos. stop_token_ids stop the request only where the grammar allows them.
    budget: closes the first part of the output when it is too long. It is given up if the grammar does not allow that.
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
        """Check all values. Raises RequestError, which names the invalid field."""
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
                    f"a forbidden sequence must have 1 to {MAX_FORBIDDEN_LENGTH} tokens, but one has {len(tokens)}: "
                    "choose shorter words",
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
    """The state of one request's output in its grammar."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end an output; nothing is matched after them."""
        ...

    def accept(self, token: int) -> bool:
        """Advance by one token. Returns False, without any change, if the grammar does not allow the token here."""
        ...

    def fill(self, masks: NDArray[np.int32], index: int) -> None:
        """Write the mask of allowed next tokens to masks[index], see `nanovllm_kernels.sampling.apply_masks_`."""
        ...

    @staticmethod
    def accept_all(matchers: "Sequence[GrammarMatcher]", tokens: Sequence[int]) -> list[bool]:
        """Call `accept` of each matcher. If it raises RuntimeError, some of the matchers have advanced."""
        ...

    @staticmethod
    def fill_all(matchers: "Sequence[GrammarMatcher]", masks: NDArray[np.int32]) -> None:
        """Call `fill` of each matcher, with index 0, 1 and so on."""
        ...


class CompiledGrammar(Protocol):
    """A compiled GrammarSpec, made by `nanovllm_core.grammar`."""

    def start(self) -> GrammarMatcher:
        """A matcher in the initial state."""
        ...


class Checkpoint(NamedTuple):
    """The state slot in which a recurrent model's state after the first `position` tokens is saved."""

    position: int
    slot: int


class RequestStatus(Enum):
    """The status of a request. Preemption leads back to WAITING."""

    WAITING_GRAMMAR = "waiting for its grammar"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence from the prompt to the last token.

    The client sets the first group of fields, the engine the others. Numbers that change in every step are kept in the
    scheduler's `RowTable`.

    id: chosen by the client; unique among the client's open requests.
    token_ids: the prompt as integers or an array of them; stored as `prompt_ids`.
    cache_salt: requests with different salts never share cached blocks.
    priority: lower is served first; requests of equal priority are served in order of arrival.
    output_ids: output tokens that the host knows.
    key: the engine's id of the request; no key is used twice in an engine.
    num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
    row: row in the scheduler's and the device's tables; -1 without a row.
    block_ids, block_hashes: the request's cache blocks, in order, and the hashes of the full ones.
    num_committed_blocks: leading blocks that are registered in the prefix cache or came from it.
    max_total_tokens: prompt and output tokens at which the request finishes.
    num_scored: prompt tokens for whose log-probabilities steps were launched.
    state_slot: the state slot of a recurrent model.
    state_origin: the slot that `state_slot` is copied from at the start; 0 for zeros.
    checkpoints: checkpoints that are still to be saved, by rising position.
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
        """Number of prompt and output tokens that the host knows."""
        return self.num_prompt_tokens + len(self.output_ids)

    def known_ids(self) -> TokenIds:
        """The prompt and the outputs in one array; without outputs the prompt's own array."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, np.array(self.output_ids, np.int32)))

    @property
    def num_to_score(self) -> int:
        """Prompt tokens whose log-probabilities still have to be computed."""
        return 0 if self.sampling.prompt_logprobs is None else self.num_prompt_tokens - 1 - self.num_scored


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
