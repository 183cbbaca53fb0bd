"""The six cases of `nanovllm-bench interference`, each measured on one server."""

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence
from random import Random

from nanovllm_server.bench.client import TimedAnswer
from nanovllm_server.bench.interference.decode_streams import DecodeStreams
from nanovllm_server.bench.interference.interference_sizes import InterferenceSizes
from nanovllm_server.bench.server_cases.case_client import CaseClient, ServerUnderTest
from nanovllm_server.bench.server_cases.case_command import CaseSettings
from nanovllm_server.bench.server_cases.case_results import CaseResult, median_or_nan
from nanovllm_server.bench.server_cases.prompt_texts import Message, conversation, single_message, with_next_turn

STREAM_PROMPT_LEN = 64
# A turn (a new user message) hits the prefix cache if at least this share of the conversation's history is cached.
MIN_HIT_SHARE = 0.8


class InterferenceRunner:
    """Measures the cases on one server."""

    def __init__(self, server: ServerUnderTest, settings: CaseSettings[InterferenceSizes]):
        self._server = server
        self._settings = settings
        self._sizes = settings.sizes
        # TTFTs of long prompts that run alone. short-beside-long spreads its short requests over the median TTFT.
        self._long_alone_ttfts_s: list[float] = []
        self._measure_by_case = {
            "long-alone": self._measure_long_alone,
            "short-beside-long": self._measure_short_beside_long,
            "decodes-beside-long": self._measure_decodes_beside_long,
            "decodes-beside-arrivals": self._measure_decodes_beside_arrivals,
            "turn": self._measure_turn,
            "turns-beside-decodes": self._measure_turns_beside_decodes,
        }

    async def measure(self, case: str, client: CaseClient, result: CaseResult) -> None:
        """Warms the server up for a case, then measures the case."""
        await self._measure_by_case[case](client, result)

    async def _measure_long_alone(self, client: CaseClient, result: CaseResult) -> None:
        answers = await self._send_long_alone(client, self._settings.repeat)
        result.figures["long_prompt_tokens"] = median_or_nan(answer.prompt_tokens for answer in answers)
        result.add_ttfts("long", answers)
        result.summarize_ttfts("long")

    async def _send_long_alone(self, client: CaseClient, repeat: int) -> list[TimedAnswer]:
        await self._warm_up_prompts(client, self._sizes.long_len, "long", 1)
        prompts = self._single_prompts(self._sizes.long_len, repeat, "long alone")
        answers = [answer for prompt in prompts if (answer := await client.send(prompt, 1)) is not None]
        self._long_alone_ttfts_s = [answer.ttft_s for answer in answers]
        return answers

    async def _measure_short_beside_long(self, client: CaseClient, result: CaseResult) -> None:
        sizes = self._sizes
        if not self._long_alone_ttfts_s:
            await self._send_long_alone(client, 1)
        alone_ttft_s = median_or_nan(self._long_alone_ttfts_s)
        await self._warm_up_prompts(client, sizes.short_len, "short", sizes.output_len)
        for repetition in range(self._settings.repeat if self._long_alone_ttfts_s else 0):
            random = Random(f"{self._settings.seed} arrivals {repetition}")
            long_prompt = self._single_prompt(sizes.long_len, f"long beside {repetition}")
            short_prompts = self._single_prompts(sizes.short_len, sizes.num_short, f"short {repetition}")
            short_requests = [
                client.send(
                    prompt, sizes.output_len, delay_s=(index + random.random()) / sizes.num_short * alone_ttft_s
                )
                for index, prompt in enumerate(short_prompts)
            ]
            long_answer, *short_answers = await asyncio.gather(client.send(long_prompt, 1), *short_requests)
            result.add_ttfts("short", short_answers)
            result.add_ttfts("long", [long_answer])
        result.summarize_ttfts("short")
        result.summarize_ttfts("long")
        result.figures["long_alone_ttft_p50_ms"] = 1000 * alone_ttft_s
        result.figures["long_ttft_over_alone"] = result.figures["long_ttft_p50_ms"] / (1000 * alone_ttft_s)

    async def _measure_decodes_beside_long(self, client: CaseClient, result: CaseResult) -> None:
        sizes = self._sizes
        await self._warm_up_streams(client, sizes.streams)
        await self._warm_up_prompts(client, sizes.prompt_len, "burst", 1)
        baseline_gaps_s: list[float] = []
        burst_gaps_s: list[float] = []  # A burst is several prompts that arrive at once.
        answers_by_burst: list[list[TimedAnswer | None]] = []
        client_core_shares: list[float] = []
        for repetition in range(self._settings.repeat):
            prompts = self._single_prompts(sizes.prompt_len, sizes.num_prompts, f"burst {repetition}")
            stream_prompts = self._single_prompts(STREAM_PROMPT_LEN, sizes.streams, f"burst stream {repetition}")
            async with DecodeStreams(client, stream_prompts, sizes.stream_len) as streams:
                baseline_start = await streams.wait_until_decoding()
                await asyncio.sleep(sizes.baseline_s)
                burst_start, start_cpu_s = time.perf_counter(), time.process_time()
                answers_by_burst.append(await asyncio.gather(*(client.send(prompt, 1) for prompt in prompts)))
                burst_end = _find_latest_first_piece_time(answers_by_burst[-1])
                client_core_shares.append((time.process_time() - start_cpu_s) / (time.perf_counter() - burst_start))
                await streams.wait_for_pieces_after(burst_end)
                baseline_gaps_s += streams.list_gaps_within(baseline_start, burst_start)
                burst_gaps_s += streams.list_gaps_overlapping(burst_start, burst_end)
        result.summarize_gaps("baseline", baseline_gaps_s)
        result.summarize_gaps("beside", burst_gaps_s)
        ttfts_by_burst = [sorted(answer.ttft_s for answer in burst if answer is not None) for burst in answers_by_burst]
        for rank in range(sizes.num_prompts):
            name = "last" if rank == sizes.num_prompts - 1 else str(rank + 1)
            ttfts_ms = [1000 * ttfts[rank] for ttfts in ttfts_by_burst if len(ttfts) == sizes.num_prompts]
            result.figures[f"prompt_{name}_ttft_p50_ms"] = median_or_nan(ttfts_ms)
        answers = [answer for burst in answers_by_burst for answer in burst if answer is not None]
        result.add_ttfts("prompt", answers)
        result.figures["prompt_tokens"] = median_or_nan(answer.prompt_tokens for answer in answers)
        result.figures["client_busy_percent"] = 100 * max(client_core_shares)

    async def _measure_decodes_beside_arrivals(self, client: CaseClient, result: CaseResult) -> None:
        sizes, settings = self._sizes, self._settings
        await self._warm_up_streams(client, sizes.streams)
        await self._warm_up_prompts(client, sizes.prompt_len, "arrivals", 1)
        gaps_s_by_rate: dict[float, list[float]] = {rate: [] for rate in sizes.arrival_rates}
        for rate, repetition in itertools.product(sizes.arrival_rates, range(settings.repeat)):
            seed = f"arrivals {rate:g} {repetition}"
            delays_s = _draw_arrivals(Random(f"{settings.seed} {seed}"), rate, sizes.arrival_period_s)
            prompts = self._single_prompts(sizes.prompt_len, len(delays_s), seed)
            stream_prompts = self._single_prompts(STREAM_PROMPT_LEN, sizes.streams, f"{seed} stream")
            async with DecodeStreams(client, stream_prompts, sizes.stream_len) as streams:
                start = await streams.wait_until_decoding()
                requests = [
                    client.send(prompt, 1, delay_s=delay_s) for prompt, delay_s in zip(prompts, delays_s, strict=True)
                ]
                answers, _ = await asyncio.gather(asyncio.gather(*requests), asyncio.sleep(sizes.arrival_period_s))
                end = max(start + sizes.arrival_period_s, _find_latest_first_piece_time(answers))
                await streams.wait_for_pieces_after(end)
                gaps_s_by_rate[rate] += streams.list_gaps_overlapping(start, end)
            result.add_ttfts(f"rate_{rate:g}", answers)
        for rate, gaps_s in gaps_s_by_rate.items():
            if rate > 0:
                result.summarize_ttfts(f"rate_{rate:g}")
            result.summarize_gaps(f"rate_{rate:g}", gaps_s)

    async def _measure_turn(self, client: CaseClient, result: CaseResult) -> None:
        self._server.require_one_replica(result.case)
        sizes = self._sizes
        history_answers: list[TimedAnswer] = []
        turn_answers: list[TimedAnswer | None] = []
        num_misses = 0
        # The first conversation warms the server up.
        for index in range(sizes.turn_conversations + 1):
            history = self._history_prompt(f"turn {index}")
            history_answer = await client.send(history, 1)
            if history_answer is None:
                continue
            seeds = [f"turn {index} {repetition}" for repetition in range(self._settings.repeat)]
            prompts = [self._next_turn_prompt(history, seed) for seed in seeds]
            answers = [await client.send(prompt, sizes.output_len) for prompt in prompts]
            if index > 0:
                history_answers.append(history_answer)
                turn_answers += answers
                num_misses += _count_misses(answers, history_answer.prompt_tokens)
        result.add_ttfts("history", history_answers)
        result.add_ttfts("turn", turn_answers)
        result.summarize_ttfts("turn")
        result.figures["history_ttft_p50_ms"] = median_or_nan(result.ttfts_ms["history"])
        _add_cache_figures(result, turn_answers, num_misses)

    async def _measure_turns_beside_decodes(self, client: CaseClient, result: CaseResult) -> None:
        self._server.require_one_replica(result.case)
        sizes = self._sizes
        await self._warm_up_streams(client, sizes.turn_streams)
        histories: list[tuple[list[Message], int]] = []  # (messages, prompt tokens) of each conversation.
        for index in range(sizes.conversations):
            history = self._history_prompt(f"conversation {index}")
            history_answer = await client.send(history, 1)
            if history_answer is not None:
                histories.append((history, history_answer.prompt_tokens))
        turn_answers: list[TimedAnswer | None] = []
        num_misses = 0
        for kind, interval_s in (("at_once", 0.0), ("spaced", sizes.turn_interval_ms / 1000)):
            gaps_s: list[float] = []
            for repetition in range(self._settings.repeat):
                seed = f"{kind} {repetition}"
                stream_prompts = self._single_prompts(STREAM_PROMPT_LEN, sizes.turn_streams, f"turn stream {seed}")
                async with DecodeStreams(client, stream_prompts, sizes.stream_len) as streams:
                    await streams.wait_until_decoding()
                    if repetition == 0 and histories:
                        await client.send(self._next_turn_prompt(histories[0][0], f"{seed} warm-up"), sizes.output_len)
                    prompts = [
                        self._next_turn_prompt(history, f"{seed} {index}")
                        for index, (history, _) in enumerate(histories)
                    ]
                    answers, new_gaps_s = await self._send_turns_beside_streams(client, streams, prompts, interval_s)
                gaps_s += new_gaps_s
                turn_answers += answers
                result.add_ttfts(kind, answers)
                for answer, (_, history_tokens) in zip(answers, histories, strict=True):
                    num_misses += _count_misses([answer], history_tokens)
            result.summarize_ttfts(kind)
            result.summarize_gaps(kind, gaps_s)
        _add_cache_figures(result, turn_answers, num_misses)

    async def _send_turns_beside_streams(
        self, client: CaseClient, streams: DecodeStreams, prompts: Sequence[list[Message]], interval_s: float
    ) -> tuple[list[TimedAnswer | None], list[float]]:
        """Sends the turns. Returns the answers, and the streams' gaps in seconds until every turn has a first token."""
        start = time.perf_counter()
        output_len, delays_s = self._sizes.output_len, [index * interval_s for index in range(len(prompts))]
        requests = [
            client.send(prompt, output_len, delay_s=delay_s) for prompt, delay_s in zip(prompts, delays_s, strict=True)
        ]
        answers = await asyncio.gather(*requests)
        end = _find_latest_first_piece_time(answers)
        await streams.wait_for_pieces_after(end)
        return answers, streams.list_gaps_overlapping(start, end)

    async def _warm_up_prompts(self, client: CaseClient, num_tokens: int, seed_suffix: str, max_tokens: int) -> None:
        """Sends a prompt to each replica."""
        for prompt in self._single_prompts(num_tokens, len(self._server.endpoints), f"{seed_suffix} warm-up"):
            await client.send(prompt, max_tokens)

    async def _warm_up_streams(self, client: CaseClient, num_streams: int) -> None:
        prompts = self._single_prompts(STREAM_PROMPT_LEN, num_streams, "stream warm-up")
        await asyncio.gather(*(client.send(prompt, self._sizes.output_len) for prompt in prompts))

    def _single_prompt(self, num_tokens: int, seed_suffix: str) -> list[Message]:
        return single_message(self._server.prompt_token_costs, num_tokens, f"{self._settings.seed} {seed_suffix}")

    def _single_prompts(self, num_tokens: int, num_prompts: int, seed_suffix: str) -> list[list[Message]]:
        return [self._single_prompt(num_tokens, f"{seed_suffix} {index}") for index in range(num_prompts)]

    def _history_prompt(self, seed_suffix: str) -> list[Message]:
        costs, sizes = self._server.prompt_token_costs, self._sizes
        seed = f"{self._settings.seed} {seed_suffix}"
        return conversation(costs, sizes.conversation_len, sizes.message_len, seed)

    def _next_turn_prompt(self, history: Sequence[Message], seed_suffix: str) -> list[Message]:
        costs, seed = self._server.prompt_token_costs, f"{self._settings.seed} {seed_suffix}"
        turn_len, answer_len = self._sizes.turn_len, self._sizes.turn_len // 4
        return with_next_turn(costs, history, answer_len, turn_len - answer_len, seed)


def _count_misses(answers: Iterable[TimedAnswer | None], history_tokens: int) -> int:
    return sum(answer is not None and answer.cached_tokens < MIN_HIT_SHARE * history_tokens for answer in answers)


def _add_cache_figures(result: CaseResult, turn_answers: Sequence[TimedAnswer | None], num_misses: int) -> None:
    answers = [answer for answer in turn_answers if answer is not None]
    result.figures["turn_prompt_tokens"] = median_or_nan(answer.prompt_tokens for answer in answers)
    result.figures["turn_cached_tokens"] = median_or_nan(answer.cached_tokens for answer in answers)
    result.figures["turn_cache_misses"] = num_misses
    if num_misses:
        result.warnings.append(
            f"{num_misses} turns missed the prefix cache, or the server does not report cached_tokens"
        )


def _draw_arrivals(random: Random, rate: float, duration_s: float) -> list[float]:
    """Draws the arrival times of a Poisson process, in seconds. rate: mean number of arrivals per second."""
    times_s: list[float] = []
    time_s = 0.0
    while rate > 0 and (time_s := time_s + random.expovariate(rate)) < duration_s:
        times_s.append(time_s)
    return times_s


def _find_latest_first_piece_time(answers: Iterable[TimedAnswer | None]) -> float:
    """Returns the latest arrival time of an answer's first piece; the current time if there is no answer."""
    return max((answer.piece_times[0] for answer in answers if answer is not None), default=time.perf_counter())
