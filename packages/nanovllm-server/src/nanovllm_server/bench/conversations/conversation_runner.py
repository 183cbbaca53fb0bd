"""Measures the cases of `nanovllm-bench conversations`: `returns` (turns after pauses) and `burst` (turns at once).

The assistant's messages in a prompt are random texts, not the server's answers. All servers get the same prompts.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from random import Random
from typing import TypeAlias

from nanovllm_server.bench.client import TimedAnswer
from nanovllm_server.bench.conversations.conversation_sizes import THINK_TIMES, ConversationSizes
from nanovllm_server.bench.server_cases.case_client import CaseClient, ServerUnderTest
from nanovllm_server.bench.server_cases.case_command import CaseSettings
from nanovllm_server.bench.server_cases.case_results import CaseResult, median_or_nan
from nanovllm_server.bench.server_cases.prompt_texts import Message, single_message, with_next_turn

# If more than this share of a cold prompt's tokens is cached, the command prints a warning. The server may have cached
# the chat template's tokens.
MAX_COLD_CACHED_SHARE = 0.1

# The answer to each request; None for a request that failed.
Answers: TypeAlias = list[TimedAnswer | None]


@dataclass(frozen=True, slots=True)
class Repetition:
    """The answers of one repetition of a case.

    conversations: for each conversation, one answer per turn.
    cold: answers to prompts that the server has not seen, as long as the prompts of returning turns (any turn but a
        conversation's first).
    timed: answers from which the output tokens per second are computed.
    """

    conversations: list[Answers]
    cold: Answers
    timed: Answers


class ConversationRunner:
    """Measures the cases on one server."""

    def __init__(self, server: ServerUnderTest, settings: CaseSettings[ConversationSizes]):
        self._server = server
        self._settings = settings
        self._sizes = settings.sizes

    async def measure(self, case: str, client: CaseClient, result: CaseResult) -> None:
        """Warms the server up with one conversation, then measures a case."""
        self._server.require_one_replica(case)
        for prompt in self._turn_prompts(2, f"{case} warm-up"):
            await client.send(prompt, self._sizes.output_len)
        run_case = {"returns": self._run_returns, "burst": self._run_burst}[case]
        _summarize(result, [await run_case(client, repetition) for repetition in range(self._settings.repeat)])

    async def _run_returns(self, client: CaseClient, repetition: int) -> Repetition:
        sizes, semaphore = self._sizes, asyncio.Semaphore(self._sizes.concurrency)
        conversation_names = [f"returns {repetition} {index}" for index in range(sizes.conversations)]
        # Make all texts before the first request, so that no request waits for its text.
        prompts_and_pauses = [
            (self._turn_prompts(sizes.turns, name), self._think_times(name)) for name in conversation_names
        ]
        conversations = await asyncio.gather(
            *(self._converse(client, semaphore, prompts, pauses_s) for prompts, pauses_s in prompts_and_pauses)
        )
        cold: Answers = []
        for turn in range(1, sizes.turns):
            for index in range(sizes.cold_prompts):
                prompt = self._turn_prompts(turn + 1, f"returns cold {repetition} {turn} {index}")[-1]
                cold.append(await client.send(prompt, sizes.output_len))
        return Repetition(conversations, cold, timed=[*chain.from_iterable(conversations)])

    async def _run_burst(self, client: CaseClient, repetition: int) -> Repetition:
        sizes, semaphore = self._sizes, asyncio.Semaphore(self._sizes.concurrency)
        conversation_names = [f"{repetition} {index}" for index in range(sizes.burst)]
        prompts_by_conversation = [self._turn_prompts(2, f"burst {name}") for name in conversation_names]
        first_answers = await asyncio.gather(
            *(self._send_limited(client, semaphore, prompts[0]) for prompts in prompts_by_conversation)
        )
        await asyncio.sleep(sizes.think_time_s)
        returning_answers = await self._send_at_once(client, [prompts[1] for prompts in prompts_by_conversation])
        cold_answers = await self._send_at_once(
            client, [self._turn_prompts(2, f"burst cold {name}")[1] for name in conversation_names]
        )
        return Repetition(
            [*map(list, zip(first_answers, returning_answers, strict=True))], cold_answers, timed=returning_answers
        )

    async def _converse(
        self, client: CaseClient, semaphore: asyncio.Semaphore, prompts: Sequence[list[Message]], pauses_s: list[float]
    ) -> Answers:
        """Sends the turns of one conversation, each after a pause."""
        answers: Answers = []
        for prompt, pause_s in zip(prompts, pauses_s, strict=True):
            await asyncio.sleep(pause_s)
            answers.append(await self._send_limited(client, semaphore, prompt))
        return answers

    async def _send_limited(
        self, client: CaseClient, semaphore: asyncio.Semaphore, prompt: list[Message]
    ) -> TimedAnswer | None:
        async with semaphore:
            return await client.send(prompt, self._sizes.output_len)

    async def _send_at_once(self, client: CaseClient, prompts: Sequence[list[Message]]) -> Answers:
        return await asyncio.gather(*(client.send(prompt, self._sizes.output_len) for prompt in prompts))

    def _turn_prompts(self, num_turns: int, seed_suffix: str) -> list[list[Message]]:
        """Returns the prompts of all turns of one conversation."""
        costs, sizes, seed = self._server.prompt_token_costs, self._sizes, f"{self._settings.seed} {seed_suffix}"
        prompts = [single_message(costs, sizes.first_len, seed)]
        for turn in range(1, num_turns):
            turn_seed = f"{seed} turn {turn}"
            prompts.append(with_next_turn(costs, prompts[-1], sizes.output_len, sizes.turn_len, turn_seed))
        return prompts

    def _think_times(self, seed_suffix: str) -> list[float]:
        """Returns the pause before each turn of one conversation, in seconds."""
        sizes, random = self._sizes, Random(f"{self._settings.seed} {seed_suffix} think times")
        return [THINK_TIMES[sizes.think_distribution](random, sizes.think_time_s) for _ in range(sizes.turns)]


def _summarize(result: CaseResult, repetitions: Sequence[Repetition]) -> None:
    """Adds the figures of a case to `result`."""
    conversations = [answers for repetition in repetitions for answers in repetition.conversations]
    cold = [answer for repetition in repetitions for answer in repetition.cold]
    # A turn after a failed turn is left out: the server may not have seen the history.
    returning_pairs = [
        (turn_before, turn)
        for answers in conversations
        for turn_before, turn in pairwise(answers)
        if turn_before is not None and turn is not None
    ]
    returning = [turn for _, turn in returning_pairs]
    first = [answers[0] for answers in conversations]
    for kind, answers in (("first", first), ("returning", returning), ("cold", cold)):
        result.add_ttfts(kind, answers)
        result.summarize_ttfts(kind)
    prompt_tokens = sum(turn.prompt_tokens for turn in returning) or math.nan
    history_tokens = sum(turn_before.prompt_tokens for turn_before, _ in returning_pairs)
    cached_tokens = sum(turn.cached_tokens for turn in returning)
    result.figures |= {
        "cold_over_returning_ttft_p50": result.figures["cold_ttft_p50_ms"] / result.figures["returning_ttft_p50_ms"],
        "returning_prompt_tokens": median_or_nan(turn.prompt_tokens for turn in returning),
        "returning_history_percent": 100 * history_tokens / prompt_tokens,
        "returning_cached_percent": 100 * cached_tokens / prompt_tokens,
        "output_tokens_per_second": median_or_nan(_output_rate(repetition.timed) for repetition in repetitions),
    }
    if returning and not cached_tokens:
        result.warnings.append("no returning turn has cached tokens, or the server does not report cached_tokens")
    if any(answer and answer.cached_tokens > MAX_COLD_CACHED_SHARE * answer.prompt_tokens for answer in cold):
        result.warnings.append("the server had cached cold prompts: restart the server, or choose another --seed")


def _output_rate(answers: Answers) -> float:
    """Returns the output tokens per second between the first request and the last token. NaN without answers."""
    complete = [answer for answer in answers if answer is not None]
    if not complete:
        return math.nan
    duration_s = max(answer.end_time for answer in complete) - min(answer.start_time for answer in complete)
    return sum(answer.output_tokens for answer in complete) / duration_s
