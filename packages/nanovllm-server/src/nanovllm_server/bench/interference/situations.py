"""The five cases of `nanovllm-bench interference`, each measured on one server."""

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from nanovllm_server.bench.client import Answer
from nanovllm_server.bench.interference.chats import ChatClient, DecodeStreams, Target, decoding
from nanovllm_server.bench.interference.prompts import Message, conversation, single_message, with_next_turn
from nanovllm_server.bench.interference.sizes import Sizes
from nanovllm_server.bench.report import median, percentile

# Tokens in the prompt of a decoding stream.
STREAM_PROMPT_LEN = 64
# A turn hits the prefix cache if the server reports at least this share of the history as cached.
HIT_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class InterferenceSettings:
    """How to measure. seed: decides all texts and arrival times. timeout_s: limit of one request."""

    sizes: Sizes
    seed: str
    temperature: float
    timeout_s: float
    repeat: int


@dataclass(slots=True)
class CaseResult:
    """The figures of one case on one server, over all its repetitions.

    figures: values by name. A name ends in its unit, except for counts. NaN if no request was answered.
    ttfts_ms: every measured time to the first token, by kind of request.
    misses: turns for which the server did not report the history as cached.
    """

    case: str
    num_requests: int = 0
    errors: list[str] = field(default_factory=list[str])
    figures: dict[str, float] = field(default_factory=dict[str, float])
    ttfts_ms: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    misses: int = 0

    def add_ttfts(self, kind: str, answers: Iterable[Answer | None]) -> None:
        """Record the TTFT of each request that was answered."""
        self.ttfts_ms.setdefault(kind, []).extend(1000 * ttft_s(answer) for answer in answers if answer is not None)

    def summarize_ttfts(self, kind: str) -> None:
        """Turn the recorded TTFTs of a kind of request into figures."""
        self.figures |= _summary(f"{kind}_ttft", self.ttfts_ms.get(kind, ()))

    def summarize_gaps(self, kind: str, gaps_s: Sequence[float]) -> None:
        """Turn gaps between pieces into figures."""
        self.figures |= _summary(f"{kind}_gap", [1000 * gap for gap in gaps_s])
        self.figures[f"{kind}_gaps"] = len(gaps_s)


def ttft_s(answer: Answer) -> float:
    """Seconds from sending the request to the first piece of its answer."""
    return answer.pieces[0] - answer.sent


class Situations:
    """Measures the cases on one server."""

    def __init__(self, target: Target, settings: InterferenceSettings):
        self._target = target
        self._settings = settings
        self._sizes = settings.sizes
        # TTFTs of the long prompt alone, which short-beside-long needs as well.
        self._long_alone_s: list[float] = []
        self._measures = {
            "long-alone": self._long_alone,
            "short-beside-long": self._short_beside_long,
            "decodes-beside-long": self._decodes_beside_long,
            "turn": self._turn,
            "turns-beside-decodes": self._turns_beside_decodes,
        }

    async def measure(self, case: str) -> CaseResult:
        """Warm the server up for a case and measure the case."""
        settings = self._settings
        client = ChatClient(self._target.endpoint, self._target.model, settings.temperature, settings.timeout_s)
        result = CaseResult(case)
        await self._measures[case](client, result)
        result.num_requests, result.errors = client.num_sent, client.errors
        return result

    async def _long_alone(self, client: ChatClient, result: CaseResult) -> None:
        answers = await self._ask_long_alone(client, self._settings.repeat)
        result.figures["long_prompt_tokens"] = _median(answer.prompt_tokens for answer in answers)
        result.add_ttfts("long", answers)
        result.summarize_ttfts("long")

    async def _ask_long_alone(self, client: ChatClient, times: int) -> list[Answer]:
        await client.ask(self._single(self._sizes.long_len, "long warm-up"), 1)
        prompts = [self._single(self._sizes.long_len, f"long alone {index}") for index in range(times)]
        answers = [answer for prompt in prompts if (answer := await client.ask(prompt, 1)) is not None]
        self._long_alone_s = [ttft_s(answer) for answer in answers]
        return answers

    async def _short_beside_long(self, client: ChatClient, result: CaseResult) -> None:
        sizes = self._sizes
        if not self._long_alone_s:
            await self._ask_long_alone(client, 1)
        alone_s = _median(self._long_alone_s)
        await client.ask(self._single(sizes.short_len, "short warm-up"), sizes.output_len)
        for repetition in range(self._settings.repeat if self._long_alone_s else 0):
            jitter = Random(f"{self._settings.seed} arrivals {repetition}")
            long = self._single(sizes.long_len, f"long beside {repetition}")
            requests = [
                client.ask(
                    self._single(sizes.short_len, f"short {repetition} {index}"),
                    sizes.output_len,
                    delay_s=(index + jitter.random()) / sizes.num_short * alone_s,
                )
                for index in range(sizes.num_short)
            ]
            long_answer, *short_answers = await asyncio.gather(client.ask(long, 1), *requests)
            result.add_ttfts("short", short_answers)
            result.add_ttfts("long", [long_answer])
        result.summarize_ttfts("short")
        result.summarize_ttfts("long")
        result.figures["long_alone_ttft_p50_ms"] = 1000 * alone_s
        result.figures["long_ttft_over_alone"] = result.figures["long_ttft_p50_ms"] / (1000 * alone_s)

    async def _decodes_beside_long(self, client: ChatClient, result: CaseResult) -> None:
        sizes = self._sizes
        await self._warm_up_streams(client, sizes.streams)
        await client.ask(self._single(sizes.prompt_len, "burst warm-up"), 1)
        baseline: list[float] = []
        beside: list[float] = []
        bursts: list[list[Answer | None]] = []
        busy: list[float] = []
        for repetition in range(self._settings.repeat):
            prompts = [
                self._single(sizes.prompt_len, f"burst {repetition} {index}") for index in range(sizes.num_prompts)
            ]
            stream_prompts = self._stream_prompts(sizes.streams, f"burst stream {repetition}")
            async with decoding(client, stream_prompts, sizes.stream_len) as streams:
                begin = await streams.wait_until_decoding()
                await asyncio.sleep(sizes.baseline_s)
                start, cpu = time.perf_counter(), time.process_time()
                bursts.append(await asyncio.gather(*(client.ask(prompt, 1) for prompt in prompts)))
                end = _last_first_token(bursts[-1])
                busy.append((time.process_time() - cpu) / (time.perf_counter() - start))
                await streams.wait_for_pieces_after(end)
                baseline += streams.gaps_within(begin, start)
                beside += streams.gaps_touching(start, end)
        result.summarize_gaps("baseline", baseline)
        result.summarize_gaps("beside", beside)
        ranked = [sorted(ttft_s(answer) for answer in burst if answer is not None) for burst in bursts]
        for rank in range(sizes.num_prompts):
            name = "last" if rank == sizes.num_prompts - 1 else str(rank + 1)
            of_rank = [1000 * ttfts[rank] for ttfts in ranked if len(ttfts) == sizes.num_prompts]
            result.figures[f"prompt_{name}_ttft_p50_ms"] = _median(of_rank)
        for burst in bursts:
            result.add_ttfts("prompt", burst)
        result.figures["prompt_tokens"] = _median(
            answer.prompt_tokens for burst in bursts for answer in burst if answer is not None
        )
        result.figures["client_busy_percent"] = 100 * max(busy)

    async def _turn(self, client: ChatClient, result: CaseResult) -> None:
        sizes = self._sizes
        firsts: list[Answer] = []
        turns: list[Answer | None] = []
        # The first conversation warms the server up.
        for index in range(sizes.num_turns + 1):
            history = self._history(f"turn {index}")
            first = await client.ask(history, 1)
            if first is None:
                continue
            prompts = [self._next_turn(history, f"turn {index} {again}") for again in range(self._settings.repeat)]
            answers = [await client.ask(prompt, sizes.output_len) for prompt in prompts]
            if index > 0:
                firsts.append(first)
                turns += answers
                result.misses += _count_misses(answers, first.prompt_tokens)
        result.add_ttfts("history", firsts)
        result.add_ttfts("turn", turns)
        result.summarize_ttfts("turn")
        result.figures["history_ttft_p50_ms"] = _median(result.ttfts_ms["history"])
        _add_cache_figures(result, turns)

    async def _turns_beside_decodes(self, client: ChatClient, result: CaseResult) -> None:
        sizes = self._sizes
        await self._warm_up_streams(client, sizes.turn_streams)
        histories: list[tuple[list[Message], int]] = []
        for index in range(sizes.conversations):
            history = self._history(f"conversation {index}")
            first = await client.ask(history, 1)
            if first is not None:
                histories.append((history, first.prompt_tokens))
        turns: list[Answer | None] = []
        for kind, interval_s in (("at_once", 0.0), ("spaced", sizes.turn_interval_ms / 1000)):
            gaps: list[float] = []
            for repetition in range(self._settings.repeat):
                seed = f"{kind} {repetition}"
                async with decoding(
                    client, self._stream_prompts(sizes.turn_streams, f"turn stream {seed}"), sizes.stream_len
                ) as streams:
                    await streams.wait_until_decoding()
                    if repetition == 0 and histories:
                        await client.ask(self._next_turn(histories[0][0], f"{seed} warm-up"), sizes.output_len)
                    prompts = [
                        self._next_turn(history, f"{seed} {index}") for index, (history, _) in enumerate(histories)
                    ]
                    answers, touching = await self._turns_beside(client, streams, prompts, interval_s)
                gaps += touching
                turns += answers
                result.add_ttfts(kind, answers)
                for answer, (_, history_tokens) in zip(answers, histories, strict=True):
                    result.misses += _count_misses([answer], history_tokens)
            result.summarize_ttfts(kind)
            result.summarize_gaps(kind, gaps)
        _add_cache_figures(result, turns)

    async def _turns_beside(
        self, client: ChatClient, streams: DecodeStreams, prompts: Sequence[list[Message]], interval_s: float
    ) -> tuple[list[Answer | None], list[float]]:
        """Send turns beside streams; returns the answers, and the streams' gaps until all turns have a first token."""
        start = time.perf_counter()
        answers = await asyncio.gather(
            *(
                client.ask(prompt, self._sizes.output_len, delay_s=index * interval_s)
                for index, prompt in enumerate(prompts)
            )
        )
        end = _last_first_token(answers)
        await streams.wait_for_pieces_after(end)
        return answers, streams.gaps_touching(start, end)

    async def _warm_up_streams(self, client: ChatClient, num_streams: int) -> None:
        prompts = self._stream_prompts(num_streams, "stream warm-up")
        await asyncio.gather(*(client.ask(prompt, self._sizes.output_len) for prompt in prompts))

    def _single(self, num_tokens: int, name: str) -> list[Message]:
        return single_message(self._target.costs, num_tokens, f"{self._settings.seed} {name}")

    def _stream_prompts(self, count: int, name: str) -> list[list[Message]]:
        return [self._single(STREAM_PROMPT_LEN, f"{name} {index}") for index in range(count)]

    def _history(self, name: str) -> list[Message]:
        sizes = self._sizes
        seed = f"{self._settings.seed} {name}"
        return conversation(self._target.costs, sizes.conversation_len, sizes.message_len, seed)

    def _next_turn(self, history: Sequence[Message], name: str) -> list[Message]:
        return with_next_turn(self._target.costs, history, self._sizes.turn_len, f"{self._settings.seed} {name}")


def _count_misses(turns: Iterable[Answer | None], history_tokens: int) -> int:
    return sum(turn is not None and turn.cached_tokens < HIT_SHARE * history_tokens for turn in turns)


def _add_cache_figures(result: CaseResult, turns: Sequence[Answer | None]) -> None:
    answered = [turn for turn in turns if turn is not None]
    result.figures["turn_prompt_tokens"] = _median(turn.prompt_tokens for turn in answered)
    result.figures["turn_cached_tokens"] = _median(turn.cached_tokens for turn in answered)
    result.figures["turn_cache_misses"] = result.misses


def _last_first_token(answers: Iterable[Answer | None]) -> float:
    return max((answer.pieces[0] for answer in answers if answer is not None), default=time.perf_counter())


def _summary(name: str, values_ms: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values_ms) or [math.nan]
    return {
        f"{name}_p50_ms": percentile(ordered, 50),
        f"{name}_p99_ms": percentile(ordered, 99),
        f"{name}_max_ms": ordered[-1],
    }


def _median(values: Iterable[float]) -> float:
    return median([*values] or [math.nan])
