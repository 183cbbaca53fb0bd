"""The benchmarks' requests: prompts of random tokens or words, the same in every call. Imports nothing slow."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

# Largest token id in nano-vllm's benchmark, which `throughput` repeats by default.
TOP_TOKEN = 10_000

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
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Lengths:
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
    """Number and lengths of requests. prefix: tokens that all prompts share, in addition to `input`."""

    num_requests: int
    input: Lengths
    output: Lengths
    prefix: int = 0

    def __str__(self) -> str:
        prefix = f"{self.prefix} shared + " if self.prefix else ""
        return f"{self.num_requests} requests, {prefix}{self.input} tokens in, {self.output} out"


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt and the number of tokens to generate."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ChatWork:
    """A user's message and the number of tokens to generate."""

    text: str
    max_tokens: int


def random_prompts(count: int, length: int, vocab_size: int) -> list[tuple[int, ...]]:
    """`count` prompts of `length` random tokens."""
    random = Random(0)
    return [tuple(random.randrange(vocab_size) for _ in range(length)) for _ in range(count)]


def random_works(shape: WorkloadShape, vocab_size: int) -> list[Work]:
    """Random requests of that shape. The shape of nano-bench, 256 x 100..1024 in and out, has 133,966 output tokens."""
    random = Random(0)
    top = min(TOP_TOKEN, vocab_size - 1)
    prefix = tuple(random.randint(0, top) for _ in range(shape.prefix))
    prompts = [
        prefix + tuple(random.randint(0, top) for _ in range(shape.input.draw(random)))
        for _ in range(shape.num_requests)
    ]
    return [Work(prompt, shape.output.draw(random)) for prompt in prompts]


def random_chats(shape: WorkloadShape, seed: int | str) -> list[ChatWork]:
    """Messages of that shape, in words of one token each. The lengths are always the same; `seed` selects the words."""
    lengths, words = Random(0), Random(seed)

    def text(count: int) -> Sequence[str]:
        return words.choices(WORDS, k=count)

    prefix = text(shape.prefix)
    return [
        ChatWork(" ".join([*prefix, *text(shape.input.draw(lengths))]), shape.output.draw(lengths))
        for _ in range(shape.num_requests)
    ]


def arrivals(count: int, rate: float | None) -> list[float]:
    """Arrival times in seconds: a Poisson process with `rate` requests per second. rate: None for all at once."""
    random = Random(0)
    now = 0.0
    times: list[float] = []
    for _ in range(count):
        times.append(now)
        now += random.expovariate(rate) if rate is not None else 0.0
    return times
