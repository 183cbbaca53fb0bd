"""Options for sampling the tokens of one request."""

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field

import msgspec

from nanovllm_core.errors import RequestError
from nanovllm_core.grammar_types import GrammarSpec

MAX_TOP_LOGPROBS = 20  # likeliest tokens to report per token
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_TOKENS = 64
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_REASONING_END_TOKENS = 64  # tokens of `ReasoningBudget.end`
MAX_FORBIDDEN_SEQUENCES = 256
MAX_FORBIDDEN_SEQUENCE_TOKENS = 16
_MIN_POSITIVE = 1e-6  # minimum of a parameter that must be positive


class ReasoningBudget(msgspec.Struct, frozen=True):
    """A limit on the reasoning at the start of an output.

    num_tokens: number of output tokens after which the engine forces `end`, unless the output already contains `end`.
        If the output ends with the first tokens of `end`, the engine forces only the missing tokens.
    end: token ids that close the reasoning.
    """

    num_tokens: int
    end: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options for sampling the tokens of one request.

    max_tokens: maximum number of output tokens; None: only the maximum context length limits the output.
    temperature: 0 for greedy sampling.
    top_k: 0 for off. Filters apply in the order top-k, top-p, min-p.
    top_p: 1 for off; 0 keeps only the likeliest tokens (Holtzman et al. 2020).
    min_p: minimum probability relative to the likeliest token; 0 for off (Nguyen et al. 2024).
    seed: seed of the random numbers; None for a seed that the engine draws.
    presence_penalty: OpenAI's penalty on tokens that the output contains; 0 for off.
    frequency_penalty: OpenAI's penalty on each occurrence of a token in the output; 0 for off.
    repetition_penalty: penalty on prompt and output tokens; 1 for off (Keskar et al. 2019).
    logit_bias: numbers to add to logits, by token id.
    min_tokens: the first `min_tokens` output tokens can't be tokens that stop the request.
    ignore_eos: do not stop at the model's end-of-sequence tokens.
    stop_token_ids: additional token ids that stop the request. The output includes the stop token.
    forbidden_sequences: sequences of token ids that the output may not contain.
    allowed_token_ids: the only token ids that the output may contain, besides tokens that end `grammar`; empty to allow
        all ids. If `grammar` allows none of these ids, the request fails. This option wins over all other options that
        allow or forbid tokens, except `grammar`.
    logprobs: number of likeliest tokens to report per output token; None for no log-probabilities. Penalties and
        temperature do not change log-probabilities.
    prompt_logprobs: number of likeliest tokens to report per prompt token except the first; None for no
        log-probabilities. With this option, the engine computes the whole prompt even if its prefix is cached.
    grammar: grammar that the output must match; wins over all other options that allow or forbid tokens. The end of
        the grammar ends the request, even with ignore_eos. Tokens of stop_token_ids stop the request only where the
        grammar allows them.
    reasoning_budget: limit on the reasoning; ignored if `grammar` or `allowed_token_ids` forbids the tokens that close
        the reasoning.
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
    forbidden_sequences: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None
    reasoning_budget: ReasoningBudget | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty is on."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def validate(self, vocab_size: int) -> None:
        """Raises RequestError if a value is invalid."""
        self._validate_numbers()
        _require_max_length("logit_bias", self.logit_bias, MAX_LOGIT_BIAS_ENTRIES)
        for token, bias in self.logit_bias.items():
            _require_int("logit_bias", token, 0, vocab_size - 1)
            _require_float("logit_bias", bias, -100, 100)
        _require_max_length("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        _require_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        _require_max_length("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        _require_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        if (budget := self.reasoning_budget) is not None:
            _require_int("reasoning_budget", budget.num_tokens, 0, None)
            if not 1 <= len(budget.end) <= MAX_REASONING_END_TOKENS:
                message = f"the end of a reasoning budget must have 1 to {MAX_REASONING_END_TOKENS} token ids"
                raise RequestError("reasoning_budget", message)
            _require_token_ids("reasoning_budget", budget.end, vocab_size)
        self._validate_forbidden_sequences(vocab_size)

    def _validate_forbidden_sequences(self, vocab_size: int) -> None:
        if len(self.forbidden_sequences) > MAX_FORBIDDEN_SEQUENCES:
            message = f"at most {MAX_FORBIDDEN_SEQUENCES} token sequences may be forbidden"
            raise RequestError("forbidden_sequences", message)
        for tokens in self.forbidden_sequences:
            if not 0 < len(tokens) <= MAX_FORBIDDEN_SEQUENCE_TOKENS:
                raise RequestError(
                    "forbidden_sequences",
                    f"a forbidden sequence must have 1 to {MAX_FORBIDDEN_SEQUENCE_TOKENS} tokens, not {len(tokens)}",
                )
            _require_token_ids("forbidden_sequences", tokens, vocab_size)

    def _validate_numbers(self) -> None:
        _require_float("temperature", self.temperature, 0, 100)
        _require_float("top_p", self.top_p, 0, 1)
        _require_float("min_p", self.min_p, 0, 1)
        _require_float("presence_penalty", self.presence_penalty, -2, 2)
        _require_float("frequency_penalty", self.frequency_penalty, -2, 2)
        _require_float("repetition_penalty", self.repetition_penalty, _MIN_POSITIVE, 100)
        _require_int("top_k", self.top_k, 0, None)
        _require_int("max_tokens", self.max_tokens, 1, None)
        _require_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _require_int("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        _require_int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        _require_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)


def _require_float(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise RequestError(name, f"{name} must be a number from {low:g} to {high:g}, not {value}")


def _require_max_length(name: str, values: Sized, max_length: int) -> None:
    if len(values) > max_length:
        raise RequestError(name, f"{name} may have at most {max_length} entries")


def _require_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids:
        _require_int(name, min(token_ids), 0, vocab_size - 1)
        _require_int(name, max(token_ids), 0, vocab_size - 1)


def _require_int(name: str, value: int | None, low: int, high: int | None) -> None:
    if value is not None and (value < low or (high is not None and value > high)):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(name, f"{name} must be an integer {bounds}, not {value}")
