"""Requests of benchmarks: prompts of random tokens or words. The same arguments give the same requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

# Largest token id in `random_requests` and in nano-vllm's benchmark. The command `throughput` has the workload of this
# benchmark by default.
MAX_TOKEN_ID = 10_000

# Each of these words, after a space, is one token in the vocabularies of GPT-2, Llama, Qwen and their descendants. The
# client therefore needs no tokenizer.
_WORD_LIST = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education"
)
SINGLE_TOKEN_WORDS = _WORD_LIST.split()


@dataclass(frozen=True, slots=True)
class IntegerRange:
    """The integers from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, random: Random) -> int:
        """Draws one of the integers uniformly."""
        return random.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """The number of requests and their lengths in tokens.

    input_len: length of a prompt without the shared prefix.
    """

    num_requests: int
    input_len: IntegerRange
    output_len: IntegerRange
    prefix_len: int = 0

    def __str__(self) -> str:
        prefix = f"{self.prefix_len} shared + " if self.prefix_len else ""
        return f"{self.num_requests} requests, {prefix}{self.input_len} tokens in, {self.output_len} out"


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A prompt as token ids. max_tokens: number of tokens to generate."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A user's message as text. max_tokens: number of tokens to generate."""

    text: str
    max_tokens: int


def random_prompts(num_prompts: int, length: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Draws `num_prompts` prompts of `length` tokens."""
    random = Random(0)
    return [tuple(random.randrange(vocab_size) for _ in range(length)) for _ in range(num_prompts)]


def random_requests(shape: WorkloadShape, vocab_size: int) -> list[TokenRequest]:
    """Draws all prompts, then all output lengths. The benchmark of nano-vllm draws in the same order."""
    random = Random(0)
    max_token_id = min(MAX_TOKEN_ID, vocab_size - 1)
    prefix = tuple(random.randint(0, max_token_id) for _ in range(shape.prefix_len))
    prompts = [
        prefix + tuple(random.randint(0, max_token_id) for _ in range(shape.input_len.draw(random)))
        for _ in range(shape.num_requests)
    ]
    return [TokenRequest(prompt, shape.output_len.draw(random)) for prompt in prompts]


def random_text_requests(shape: WorkloadShape, seed: int | str) -> list[TextRequest]:
    """Draws requests of random words. The lengths do not depend on `seed`."""
    random_lengths, random_words = Random(0), Random(seed)

    def choose_words(num_words: int) -> Sequence[str]:
        return random_words.choices(SINGLE_TOKEN_WORDS, k=num_words)

    prefix = choose_words(shape.prefix_len)
    return [
        TextRequest(
            " ".join([*prefix, *choose_words(shape.input_len.draw(random_lengths))]),
            shape.output_len.draw(random_lengths),
        )
        for _ in range(shape.num_requests)
    ]


def arrival_times(num_requests: int, rate: float | None) -> list[float]:
    """Draws arrival times in seconds from a Poisson process. rate: requests per second; None for all at once."""
    random = Random(0)
    gaps_s = [0.0 if rate is None else random.expovariate(rate) for _ in range(num_requests - 1)]
    return list(accumulate(gaps_s, initial=0.0))
