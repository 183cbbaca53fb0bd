"""The command `serve`: latencies and rates of any OpenAI-compatible server under load.

Each pair of a request rate and a limit of concurrency is one load, and gives one row of the results.
"""

import asyncio
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from itertools import compress, pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from tqdm import tqdm

from nanovllm_server.bench import charts
from nanovllm_server.bench.client import Endpoint, ExchangeError, TimedAnswer, chat_request, list_models, stream_chat
from nanovllm_server.bench.report import BenchError, OutputFiles, percentile, print_message, report
from nanovllm_server.bench.workload import TextRequest, WorkloadShape, arrival_times, random_text_requests
from nanovllm_server.protocol.json import JSON

PERCENTILES = (50, 90, 99)
WARM_UP_TOKENS = 4
# Above this share of one core, the client may limit the measurement.
MAX_CLIENT_BUSY = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of a run.

    model: None for the first model that the server lists.
    rates: requests per second; None for all at once.
    concurrencies: maximum number of simultaneous requests; None for no limit.
    seed: selects the words. A server may have prompts of an earlier run with this seed in its prefix cache.
    """

    endpoint: Endpoint
    model: str | None
    shape: WorkloadShape
    rates: Sequence[float | None]
    concurrencies: Sequence[int | None]
    temperature: float
    seed: int
    repeat: int
    files: OutputFiles


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Mean and percentiles of a latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The figures of one load. Names of the fields are those of the JSON.

    rate: requests per second; None for all at once.
    concurrency: maximum number of simultaneous requests; None for no limit.
    failed: number of requests without a complete answer; they are in no other figure.
    seconds: time from the first request to the end of the last answer.
    prompt_tokens, cached_tokens, output_tokens: sums over the requests.
    busy: the client's share of one core.
    ttft: time from sending a request to the first piece of its answer.
    itl: time between pieces.
    tpot: time per token after the first piece; a piece may have several tokens.
    e2e: time from sending a request to the end of its answer.
    """

    rate: float | None
    concurrency: int | None
    failed: int
    seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    busy: float
    ttft: LatencyStats
    itl: LatencyStats
    tpot: LatencyStats
    e2e: LatencyStats

    @property
    def load_texts(self) -> list[str]:
        """The rate and the limit of concurrency, as shown in tables."""
        return [
            "at once" if self.rate is None else f"{self.rate:g}",
            "-" if self.concurrency is None else str(self.concurrency),
        ]


def run(options: ServeOptions) -> None:
    """Measures, shows tables, writes the figures. Raises BenchError, at the end, if requests failed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        model, results = runner.run(measure(options))
    title = f"serve: {model}; {options.shape}, median of {options.repeat}"
    report(
        "serve",
        title,
        [_rate_table(results), _latency_table(results)],
        {
            "model": model,
            "num_requests": options.shape.num_requests,
            "input_len": str(options.shape.input_len),
            "output_len": str(options.shape.output_len),
            "prefix_len": options.shape.prefix_len,
            "temperature": options.temperature,
            "seed": options.seed,
            "repeat": options.repeat,
            "points": [asdict(result) for result in results],
        },
        options.files,
    )
    for result in results:
        if result.busy > MAX_CLIENT_BUSY:
            print_message(
                f"at {result.output_tokens_per_second:.0f} tok/s this client used {result.busy:.0%} of a core: the "
                "server may be faster"
            )
    if options.files.plot is not None:
        _plot(options.files.plot, title, results)
    if num_failed := sum(result.failed for result in results):
        raise BenchError(f"{num_failed} requests failed: they are in no figure")


async def measure(options: ServeOptions) -> tuple[str, list[LoadResult]]:
    """The model's name, and a result for each pair of rate and concurrency. Raises BenchError."""
    try:
        model = options.model or (await list_models(options.endpoint))[0]
        await _send_request(options, model, TextRequest("Hello", WARM_UP_TOKENS))
    except ExchangeError as error:
        raise BenchError(f"the server doesn't answer: {error}") from error
    results: list[LoadResult] = []
    for rate, concurrency in product(options.rates, options.concurrencies):
        runs: list[LoadResult] = []
        for _ in range(options.repeat):
            # New words each time, so that the prefix cache has only the shared prefix.
            requests = random_text_requests(options.shape, f"{options.seed}-{len(results)}-{len(runs)}")
            runs.append(await _measure_load(options, model, requests, rate, concurrency))
        results.append(_median_result(runs))
    return model, results


async def _measure_load(
    options: ServeOptions, model: str, requests: Sequence[TextRequest], rate: float | None, concurrency: int | None
) -> LoadResult:
    semaphore = asyncio.Semaphore(concurrency or len(requests))
    label = f"rate {rate or 'inf'}, concurrency {concurrency or 'any'}"
    with tqdm(total=len(requests), desc=label, unit="req", disable=not sys.stderr.isatty()) as bar:
        start_cpu, start = time.process_time(), time.perf_counter()

        async def send_at(request: TextRequest, arrival_s: float) -> TimedAnswer | ExchangeError:
            await asyncio.sleep(start + arrival_s - time.perf_counter())
            async with semaphore:
                try:
                    return await _send_request(options, model, request)
                except ExchangeError as error:
                    return error
                finally:
                    bar.update()

        outcomes = await asyncio.gather(*map(send_at, requests, arrival_times(len(requests), rate)))
        busy = (time.process_time() - start_cpu) / (time.perf_counter() - start)
    answers = [outcome for outcome in outcomes if isinstance(outcome, TimedAnswer)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, ExchangeError)]
    if not answers:
        raise BenchError(f"all requests failed ({label}), the first: {failures[0]}")
    if failures:
        print_message(f"{len(failures)} of {len(requests)} requests failed ({label}), the first: {failures[0]}")
    return _summarize(answers, len(failures), rate, concurrency, busy)


async def _send_request(options: ServeOptions, model: str, request: TextRequest) -> TimedAnswer:
    messages: list[JSON] = [{"role": "user", "content": request.text}]
    body = chat_request(model, messages, request.max_tokens, options.temperature)
    return await stream_chat(options.endpoint, body)


def _summarize(
    answers: Sequence[TimedAnswer], num_failed: int, rate: float | None, concurrency: int | None, busy: float
) -> LoadResult:
    duration_s = max(answer.end_time for answer in answers) - min(answer.sent_time for answer in answers)
    output_tokens = sum(answer.output_tokens for answer in answers)
    return LoadResult(
        rate=rate,
        concurrency=concurrency,
        failed=num_failed,
        seconds=duration_s,
        requests_per_second=len(answers) / duration_s,
        output_tokens_per_second=output_tokens / duration_s,
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        cached_tokens=sum(answer.cached_tokens for answer in answers),
        output_tokens=output_tokens,
        busy=busy,
        ttft=latency_stats(answer.ttft_s for answer in answers),
        itl=latency_stats(after - before for answer in answers for before, after in pairwise(answer.piece_times)),
        tpot=latency_stats(
            (answer.piece_times[-1] - answer.piece_times[0]) / (answer.output_tokens - 1)
            for answer in answers
            if answer.output_tokens > 1
        ),
        e2e=latency_stats(answer.end_time - answer.sent_time for answer in answers),
    )


def latency_stats(latencies_s: Iterable[float]) -> LatencyStats:
    """Mean and percentiles, with linear interpolation; NaN without values."""
    ordered_ms = sorted(1000 * latency for latency in latencies_s) or [math.nan]
    return LatencyStats(
        sum(ordered_ms) / len(ordered_ms), *(percentile(ordered_ms, percent) for percent in PERCENTILES)
    )


def _median_result(runs: Sequence[LoadResult]) -> LoadResult:
    """The median of each figure, and the sum of failed requests."""
    figures: dict[str, Any] = {
        field.name: _median_figure([getattr(run, field.name) for run in runs]) for field in fields(LoadResult)
    }
    figures["failed"] = sum(run.failed for run in runs)
    return LoadResult(**figures)


def _median_figure(values: Sequence[Any]) -> Any:
    if isinstance(values[0], LatencyStats):
        return LatencyStats(*map(median, zip(*map(astuple, values), strict=True)))
    # Integers and None are the same in all runs.
    return median(values) if isinstance(values[0], float) else values[0]


def _rate_table(results: Sequence[LoadResult]) -> list[list[str]]:
    counts = ["failed", "tokens in", "cached", "tokens out", "seconds"]
    header = ["rate", "concurrency", *counts, "req/s", "output tok/s", "client busy"]
    rows = [
        [
            *result.load_texts,
            str(result.failed),
            str(result.prompt_tokens),
            str(result.cached_tokens),
            str(result.output_tokens),
            f"{result.seconds:.2f}",
            f"{result.requests_per_second:.2f}",
            f"{result.output_tokens_per_second:.1f}",
            f"{result.busy:.0%}",
        ]
        for result in results
    ]
    return [header, *rows]


def _latency_table(results: Sequence[LoadResult]) -> list[list[str]]:
    table = [["rate", "concurrency", "ms", "mean", "p50", "p90", "p99"]]
    for result in results:
        stats_by_name = {"TTFT": result.ttft, "ITL": result.itl, "TPOT": result.tpot, "E2E": result.e2e}
        for name, stats in stats_by_name.items():
            table.append([*result.load_texts, name, *(f"{value:.2f}" for value in astuple(stats))])
    return table


def _plot(path: Path, title: str, results: Sequence[LoadResult]) -> None:
    def percentile_lines(stats_by_load: Sequence[LatencyStats]) -> dict[str, list[float]]:
        return {"p50": [stats.p50 for stats in stats_by_load], "p99": [stats.p99 for stats in stats_by_load]}

    # A label shows the rate or the concurrency only if the loads differ in it.
    differs = [len(set(column)) > 1 for column in zip(*(result.load_texts for result in results), strict=True)]
    charts.draw_curves(
        path,
        title,
        "output tok/s",
        [result.output_tokens_per_second for result in results],
        [", ".join(compress(result.load_texts, differs)) for result in results],
        {
            "TTFT, ms": percentile_lines([result.ttft for result in results]),
            "ITL, ms": percentile_lines([result.itl for result in results]),
            "E2E, ms": percentile_lines([result.e2e for result in results]),
        },
    )
