"""Builds chat prompts of about a given number of tokens. The client does not have the server's tokenizer."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import TypeAlias

from nanovllm_server.bench.workload import SINGLE_TOKEN_WORDS
from nanovllm_server.protocol.json import JSON

Message: TypeAlias = dict[str, JSON]

# Words of the prompts that measure token costs: a quarter of all words, so that the prompts fit into any context.
SAMPLE_WORDS = SINGLE_TOKEN_WORDS[::4]


@dataclass(frozen=True, slots=True)
class PromptTokenCosts:
    """Tokens that a server counts for the parts of a chat prompt.

    per_message: tokens that the chat template adds to each message.
    per_request: tokens that the chat template adds once per request.
    """

    per_word: float
    per_message: float
    per_request: float

    def num_words(self, num_tokens: int, num_messages: int) -> int:
        """Returns the number of words for a request of `num_tokens` tokens; at least one word per message."""
        num_words = (num_tokens - self.per_request - num_messages * self.per_message) / self.per_word
        return max(num_messages, round(num_words))


async def measure_token_costs(count_tokens: Callable[[list[Message]], Awaitable[int]]) -> PromptTokenCosts:
    """Computes the costs from three prompts. count_tokens: sends messages and returns `usage.prompt_tokens`."""
    short_text, long_text = " ".join(SAMPLE_WORDS), " ".join(SAMPLE_WORDS * 2)
    short_tokens = await count_tokens([_message("user", short_text)])
    long_tokens = await count_tokens([_message("user", long_text)])
    three_messages_tokens = await count_tokens([_message(role, short_text) for role in ("user", "assistant", "user")])
    # If the server reports the same number of tokens (for example 0) for both texts, assume one token per word.
    per_word = (long_tokens - short_tokens) / len(SAMPLE_WORDS) or 1.0
    per_message = (three_messages_tokens - short_tokens) / 2 - len(SAMPLE_WORDS) * per_word
    per_request = short_tokens - per_message - len(SAMPLE_WORDS) * per_word
    return PromptTokenCosts(per_word, per_message, per_request)


def single_message(costs: PromptTokenCosts, num_tokens: int, seed: str) -> list[Message]:
    """Returns a prompt of one user message with random words."""
    return [_message("user", _random_words(Random(seed), costs.num_words(num_tokens, 1)))]


def conversation(costs: PromptTokenCosts, num_tokens: int, message_len: int, seed: str) -> list[Message]:
    """Returns a conversation of about `num_tokens` tokens in messages of about `message_len` tokens.

    The user has the first and the last message.
    """
    random = Random(seed)
    num_messages = max(1, num_tokens // message_len) | 1  # an odd number, so that the user has the last message
    num_words = costs.num_words(num_tokens, num_messages)
    boundaries = [num_words * index // num_messages for index in range(num_messages + 1)]
    roles = ("user", "assistant")
    return [
        _message(roles[index % 2], _random_words(random, end_word - first_word))
        for index, (first_word, end_word) in enumerate(pairwise(boundaries))
    ]


def with_next_turn(
    costs: PromptTokenCosts, history: Sequence[Message], answer_len: int, message_len: int, seed: str
) -> list[Message]:
    """Appends an assistant's answer of `answer_len` tokens and a user's message of `message_len` tokens."""
    random = Random(seed)
    new_messages = [
        _message(role, _random_words(random, max(1, round((num_tokens - costs.per_message) / costs.per_word))))
        for role, num_tokens in (("assistant", answer_len), ("user", message_len))
    ]
    return [*history, *new_messages]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _random_words(random: Random, num_words: int) -> str:
    return " ".join(random.choices(SINGLE_TOKEN_WORDS, k=num_words))
