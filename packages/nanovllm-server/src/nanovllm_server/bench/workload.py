"""What is asked of an engine: prompts of random tokens, the same ones every time.

This room must not know engines or what is measured, and imports nothing slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

# nano-vllm's benchmark, whose shape `throughput` has by default, draws its tokens from here.
TOP_TOKEN = 10_000

# Each is one token, after a space, in the vocabularies of GPT-2, Llama, Qwen and their descendants, so that a prompt's
# length in tokens is known without the tokenizer of the model behind the URL.
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
        """One of them."""
        return random.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """How many requests, and how long: all prompts begin with the same `prefix` tokens, which `input` doesn't count."""

    num_requests: int
    input: Lengths
    output: Lengths
    prefix: int = 0

    def __str__(self) -> str:
        prefix = f"{self.prefix} shared + " if self.prefix else ""
        return f"{self.num_requests} requests, {prefix}{self.input} tokens in, {self.output} out"


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt and how many tokens to make after it."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ChatWork:
    """A user's message and how many tokens to make after it."""

    text: str
    max_tokens: int


def random_prompts(count: int, length: int, vocab_size: int) -> list[tuple[int, ...]]:
    """`count` prompts of `length` random tokens."""
    random = Random(0)
    return [tuple(random.randrange(vocab_size) for _ in range(length)) for _ in range(count)]


def random_works(shape: WorkloadShape, vocab_size: int) -> list[Work]:
    """Work of that shape. 256 requests of 100..1024 tokens in and out, the shape of nano-bench, make 133,966 tokens."""
    random = Random(0)
    top = min(TOP_TOKEN, vocab_size - 1)
    prefix = tuple(random.randint(0, top) for _ in range(shape.prefix))
    prompts = [
        prefix + tuple(random.randint(0, top) for _ in range(shape.input.draw(random)))
        for _ in range(shape.num_requests)
    ]
    return [Work(prompt, shape.output.draw(random)) for prompt in prompts]


def random_chats(shape: WorkloadShape, seed: int | str) -> list[ChatWork]:
    """Messages of that shape in words of one token. The lengths are always the same; `seed` decides the words."""
    lengths, words = Random(0), Random(seed)

    def text(count: int) -> Sequence[str]:
        return words.choices(WORDS, k=count)

    prefix = text(shape.prefix)
    return [
        ChatWork(" ".join([*prefix, *text(shape.input.draw(lengths))]), shape.output.draw(lengths))
        for _ in range(shape.num_requests)
    ]


def arrivals(count: int, rate: float | None) -> list[float]:
    """When each request comes, in seconds from the start: a Poisson process of `rate` a second, or all at once."""
    random = Random(0)
    now = 0.0
    times: list[float] = []
    for _ in range(count):
        times.append(now)
        now += random.expovariate(rate) if rate is not None else 0.0
    return times
