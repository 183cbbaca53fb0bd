"""Requests of benchmarks: prompts of random tokens or words, the same in every call. Imports nothing slow."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

# Largest token id in nano-vllm's benchmark, which `throughput` repeats by default.
MAX_TOKEN_ID = 10_000

# After a space, each word is one token in the vocabularies of GPT-2, Llama, Qwen and their descendants.
# So the client knows a prompt's length in tokens without the server's tokenizer.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education"
)
SINGLE_TOKEN_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Numbers of tokens from `low` to `high`, all equally likely."""

    low: int
    high: int

    def draw(self, random: Random) -> int:
        """Returns a random length."""
        return random.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """The number of requests and their lengths in tokens.

    input_len: tokens of a prompt, without the shared prefix.
    output_len: tokens to generate for a request.
    prefix_len: tokens with which all prompts begin.
    """

    num_requests: int
    input_len: LengthRange
    output_len: LengthRange
    prefix_len: int = 0

    def __str__(self) -> str:
        prefix = f"{self.prefix_len} shared + " if self.prefix_len else ""
        return f"{self.num_requests} requests, {prefix}{self.input_len} tokens in, {self.output_len} out"


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """The token ids of a prompt, and the number of tokens to generate."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TextRequest:
    """The text of a user's message, and the number of tokens to generate."""

    text: str
    max_tokens: int


def random_prompts(num_prompts: int, length: int, vocab_size: int) -> list[tuple[int, ...]]:
    """`num_prompts` prompts of `length` random tokens."""
    random = Random(0)
    return [tuple(random.randrange(vocab_size) for _ in range(length)) for _ in range(num_prompts)]


def random_requests(shape: WorkloadShape, vocab_size: int) -> list[TokenRequest]:
    """Requests of this shape. The shape of nano-bench, 256 x 100..1024 in and out, has 133,966 output tokens."""
    random = Random(0)
    max_token_id = min(MAX_TOKEN_ID, vocab_size - 1)
    prefix = tuple(random.randint(0, max_token_id) for _ in range(shape.prefix_len))
    prompts = [
        prefix + tuple(random.randint(0, max_token_id) for _ in range(shape.input_len.draw(random)))
        for _ in range(shape.num_requests)
    ]
    return [TokenRequest(prompt, shape.output_len.draw(random)) for prompt in prompts]


def random_text_requests(shape: WorkloadShape, seed: int | str) -> list[TextRequest]:
    """Requests of this shape, in words of one token. The lengths are always the same; `seed` selects the words."""
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
    """Arrival times in seconds: a Poisson process with `rate` requests per second. rate: None for all at once."""
    random = Random(0)
    time_s = 0.0
    times: list[float] = []
    for _ in range(num_requests):
        times.append(time_s)
        time_s += random.expovariate(rate) if rate is not None else 0.0
    return times
