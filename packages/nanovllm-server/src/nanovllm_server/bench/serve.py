"""The command `serve`: latencies and rates of any OpenAI-compatible server under load.

A load is a pair of a request rate and a maximum number of simultaneous requests. Each load is measured separately.
"""

import asyncio
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from itertools import compress, pairwise, product
from pathlib import Path
from statistics import fmean, median, median_low
from typing import Any

import uvloop
from tqdm import tqdm

from nanovllm_server.bench import charts
from nanovllm_server.bench.client import Endpoint, ExchangeError, TimedAnswer, chat_request, list_models, stream_chat
from nanovllm_server.bench.report import BenchError, OutputFiles, percentile, print_message, report
from nanovllm_server.bench.workload import TextRequest, WorkloadShape, arrival_times, random_text_requests
from nanovllm_server.protocol.json import JSON

PERCENTILES = (50, 90, 99)
WARM_UP_TOKENS = 4  # Output tokens of the warm-up request.
# If the client uses more than this share of one core, the client may limit the measured rate.
MAX_CLIENT_CORE_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of a run.

    model: None for the first model that the server lists.
    rates: requests per second; None for all at once. Each pair of a rate and a concurrency is one load.
    concurrencies: maximum numbers of simultaneous requests; None for no limit.
    repeat: number of runs of each load. Results are medians of the runs.
    seed: selects the words of the prompts. The server may have cached the prompts of an earlier call with this seed.
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
    """The results of one load. The JSON has the same field names.

    rate: requests per second; None for all at once.
    concurrency: maximum number of simultaneous requests; None for no limit.
    failed: number of requests without a complete answer. The other fields exclude these requests.
    seconds: time from the start of the first request to the end of the last answer.
    accepted_drafts, rejected_drafts: numbers of drafts (proposed tokens); 0 if not reported.
    tokens_per_step: mean number of output tokens that a request gets per step. Steps without drafts are included.
    client_core_share: share of one core that the client used.
    ttft: time from the start of a request to the first piece of the answer.
    itl: time between two consecutive pieces. A piece may have several tokens.
    tpot: time from the first piece to the last piece, divided by the number of output tokens minus 1.
    e2e: time from the start of a request to the end of the answer.
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
    accepted_drafts: int
    rejected_drafts: int
    tokens_per_step: float
    client_core_share: float
    ttft: LatencyStats
    itl: LatencyStats
    tpot: LatencyStats
    e2e: LatencyStats

    @property
    def load_cells(self) -> list[str]:
        """Returns the rate and the concurrency as cells of a table."""
        return [
            "at once" if self.rate is None else f"{self.rate:g}",
            "-" if self.concurrency is None else str(self.concurrency),
        ]


def run(options: ServeOptions) -> None:
    """Measures and reports all loads. Then raises BenchError if requests failed."""
    model, results = uvloop.run(measure(options))
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
        if result.client_core_share > MAX_CLIENT_CORE_SHARE:
            print_message(
                f"at {result.output_tokens_per_second:.0f} tok/s this client used {result.client_core_share:.0%} of a "
                "core: the server may be faster"
            )
    if options.files.plot is not None:
        _plot(options.files.plot, title, results)
    if num_failed := sum(result.failed for result in results):
        raise BenchError(f"{num_failed} requests failed: the results leave these requests out")


async def measure(options: ServeOptions) -> tuple[str, list[LoadResult]]:
    """Returns the model's name and one result per load. Raises BenchError if a load has no answers."""
    try:
        model = options.model or (await list_models(options.endpoint))[0]
        await _send_request(options, model, TextRequest("Hello", WARM_UP_TOKENS))
    except ExchangeError as error:
        raise BenchError(f"the server doesn't answer: {error}") from error
    results: list[LoadResult] = []
    for rate, concurrency in product(options.rates, options.concurrencies):
        runs: list[LoadResult] = []
        for _ in range(options.repeat):
            # Each run has new words, so that the server's prefix cache has no prompt of an earlier run.
            requests = random_text_requests(options.shape, f"{options.seed}-{len(results)}-{len(runs)}")
            runs.append(await _measure_load(options, model, requests, rate, concurrency))
        results.append(_median_result(runs))
    return model, results


async def _measure_load(
    options: ServeOptions, model: str, requests: Sequence[TextRequest], rate: float | None, concurrency: int | None
) -> LoadResult:
    semaphore = asyncio.Semaphore(concurrency or len(requests))
    label = f"rate {rate or 'inf'}, concurrency {concurrency or 'any'}"
    with tqdm(total=len(requests), desc=label, unit="req", disable=not sys.stderr.isatty()) as progress_bar:
        start_cpu_s, start = time.process_time(), time.perf_counter()

        async def send_at(request: TextRequest, arrival_s: float) -> TimedAnswer | ExchangeError:
            await asyncio.sleep(start + arrival_s - time.perf_counter())
            async with semaphore:
                try:
                    return await _send_request(options, model, request)
                except ExchangeError as error:
                    return error
                finally:
                    progress_bar.update()

        outcomes = await asyncio.gather(*map(send_at, requests, arrival_times(len(requests), rate)))
        client_core_share = (time.process_time() - start_cpu_s) / (time.perf_counter() - start)
    answers = [outcome for outcome in outcomes if isinstance(outcome, TimedAnswer)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, ExchangeError)]
    if not answers:
        raise BenchError(f"all requests failed ({label}), the first: {failures[0]}")
    if failures:
        print_message(f"{len(failures)} of {len(requests)} requests failed ({label}), the first: {failures[0]}")
    return _summarize(answers, len(failures), rate, concurrency, client_core_share)


async def _send_request(options: ServeOptions, model: str, request: TextRequest) -> TimedAnswer:
    messages: list[JSON] = [{"role": "user", "content": request.text}]
    body = chat_request(model, messages, request.max_tokens, options.temperature)
    return await stream_chat(options.endpoint, body)


def _summarize(
    answers: Sequence[TimedAnswer],
    num_failed: int,
    rate: float | None,
    concurrency: int | None,
    client_core_share: float,
) -> LoadResult:
    duration_s = max(answer.end_time for answer in answers) - min(answer.start_time for answer in answers)
    output_tokens = sum(answer.output_tokens for answer in answers)
    accepted_drafts = sum(answer.accepted_drafts for answer in answers)
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
        accepted_drafts=accepted_drafts,
        rejected_drafts=sum(answer.rejected_drafts for answer in answers),
        # Each step gives a request its accepted drafts and one other token. Only a request's last step may give none.
        tokens_per_step=output_tokens / max(output_tokens - accepted_drafts, 1),
        client_core_share=client_core_share,
        ttft=latency_stats(answer.ttft_s for answer in answers),
        itl=latency_stats(after - before for answer in answers for before, after in pairwise(answer.piece_times)),
        tpot=latency_stats(
            (answer.piece_times[-1] - answer.piece_times[0]) / (answer.output_tokens - 1)
            for answer in answers
            if answer.output_tokens > 1
        ),
        e2e=latency_stats(answer.end_time - answer.start_time for answer in answers),
    )


def latency_stats(latencies_s: Iterable[float]) -> LatencyStats:
    """Computes the statistics, which are NaN if there are no latencies."""
    sorted_ms = sorted(1000 * latency for latency in latencies_s) or [math.nan]
    return LatencyStats(fmean(sorted_ms), *(percentile(sorted_ms, percent) for percent in PERCENTILES))


def _median_result(runs: Sequence[LoadResult]) -> LoadResult:
    """Returns the median of each field over several runs of one load. `failed` is the sum over all runs."""
    values_by_field: dict[str, Any] = {
        field.name: _median_value([getattr(run, field.name) for run in runs]) for field in fields(LoadResult)
    }
    values_by_field["failed"] = sum(run.failed for run in runs)
    return LoadResult(**values_by_field)


def _median_value(values: Sequence[Any]) -> Any:
    if isinstance(values[0], LatencyStats):
        return LatencyStats(*map(median, zip(*map(astuple, values), strict=True)))
    if isinstance(values[0], float):
        return median(values)
    return median_low(values) if isinstance(values[0], int) else values[0]


def _rate_table(results: Sequence[LoadResult]) -> list[list[str]]:
    count_headers = ["failed", "tokens in", "cached", "tokens out", "seconds"]
    header = ["rate", "concurrency", *count_headers, "req/s", "output tok/s", "client busy"]
    rows = [
        [
            *result.load_cells,
            *map(str, (result.failed, result.prompt_tokens, result.cached_tokens, result.output_tokens)),
            f"{result.seconds:.2f}",
            f"{result.requests_per_second:.2f}",
            f"{result.output_tokens_per_second:.1f}",
            f"{result.client_core_share:.0%}",
        ]
        for result in results
    ]
    if any(result.accepted_drafts + result.rejected_drafts for result in results):
        header += ["accepted drafts", "rejected", "tokens/step"]
        for row, result in zip(rows, results, strict=True):
            row += [str(result.accepted_drafts), str(result.rejected_drafts), f"{result.tokens_per_step:.2f}"]
    return [header, *rows]


def _latency_table(results: Sequence[LoadResult]) -> list[list[str]]:
    table = [["rate", "concurrency", "ms", "mean", "p50", "p90", "p99"]]
    for result in results:
        for name in ("ttft", "itl", "tpot", "e2e"):
            values = astuple(getattr(result, name))
            table.append([*result.load_cells, name.upper(), *(f"{value:.2f}" for value in values)])
    return table


def _plot(path: Path, title: str, results: Sequence[LoadResult]) -> None:
    # Labels leave out the rate or the concurrency if all loads have the same value.
    is_in_label = [len(set(column)) > 1 for column in zip(*(result.load_cells for result in results), strict=True)]
    charts.draw_curves(
        path,
        title,
        "output tok/s",
        [result.output_tokens_per_second for result in results],
        [", ".join(compress(result.load_cells, is_in_label)) for result in results],
        {
            f"{name.upper()}, ms": {
                field: [getattr(getattr(result, name), field) for result in results] for field in ("p50", "p99")
            }
            for name in ("ttft", "itl", "e2e")
        },
    )
