"""Chat prompts of about n tokens, for a server whose tokenizer the client does not have."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from nanovllm_server.bench.workload import WORDS
from nanovllm_server.protocol.json import JSON

Message: TypeAlias = dict[str, JSON]

# Words in the prompts that measure token costs: a sample of average length, few enough for every context length.
SAMPLE = WORDS[::4]


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Tokens that a server counts for the parts of a chat prompt.

    per_word: tokens of one word.
    per_message: tokens that the chat template adds to each message.
    per_request: tokens that the chat template adds once per request.
    """

    per_word: float
    per_message: float
    per_request: float

    def num_words(self, num_tokens: int, num_messages: int) -> int:
        """Words with which a request of `num_messages` messages has `num_tokens` tokens; at least one per message."""
        words = (num_tokens - self.per_request - num_messages * self.per_message) / self.per_word
        return max(num_messages, round(words))


async def measure_token_costs(count_tokens: Callable[[list[Message]], Awaitable[int]]) -> TokenCosts:
    """Fit token costs to what a server counts.

    count_tokens: sends messages to the server and returns `usage.prompt_tokens`.
    """
    once, twice = " ".join(SAMPLE), " ".join(SAMPLE * 2)
    one_short = await count_tokens([_message("user", once)])
    one_long = await count_tokens([_message("user", twice)])
    three_short = await count_tokens([_message(role, once) for role in ("user", "assistant", "user")])
    # A server that reports no usable counts gets one token per word.
    per_word = (one_long - one_short) / len(SAMPLE) or 1.0
    per_message = (three_short - one_short) / 2 - len(SAMPLE) * per_word
    per_request = one_short - per_message - len(SAMPLE) * per_word
    return TokenCosts(per_word, per_message, per_request)


def single_message(costs: TokenCosts, num_tokens: int, seed: str) -> list[Message]:
    """A prompt of one user message."""
    return [_message("user", _words(Random(seed), costs.num_words(num_tokens, 1)))]


def conversation(costs: TokenCosts, num_tokens: int, message_len: int, seed: str) -> list[Message]:
    """A prompt of many messages that alternate between user and assistant; the first and the last are the user's.

    message_len: tokens of each message.
    """
    random = Random(seed)
    num_messages = max(1, num_tokens // message_len) | 1
    num_words = costs.num_words(num_tokens, num_messages)
    ends = [num_words * (index + 1) // num_messages for index in range(num_messages)]
    counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    roles = ("user", "assistant")
    return [_message(roles[index % 2], _words(random, count)) for index, count in enumerate(counts)]


def with_next_turn(costs: TokenCosts, history: Sequence[Message], num_tokens: int, seed: str) -> list[Message]:
    """The history, then an assistant's and a user's message that together have `num_tokens` tokens."""
    random = Random(seed)
    num_words = max(2, round((num_tokens - 2 * costs.per_message) / costs.per_word))
    answer_words = max(1, num_words // 4)
    return [
        *history,
        _message("assistant", _words(random, answer_words)),
        _message("user", _words(random, num_words - answer_words)),
    ]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _words(random: Random, count: int) -> str:
    return " ".join(random.choices(WORDS, k=count))
