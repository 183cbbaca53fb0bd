"""`nanovllm-bench serve`: latencies and rates of any OpenAI-compatible server under load.

Each rate and each limit of concurrency gives one point of the curve of latency over throughput.
"""

import asyncio
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path

import uvloop
from tqdm import tqdm

from nanovllm_server.bench import plot
from nanovllm_server.bench.client import Answer, Endpoint, ExchangeError, chat_request, list_models, stream_chat
from nanovllm_server.bench.report import BenchError, Results, keep, machine, median, one_line, percentile, show
from nanovllm_server.bench.workload import ChatWork, WorkloadShape, arrivals, random_chats
from nanovllm_server.protocol.json import JSON

PERCENTILES = (50, 90, 99)
# Above this share of one core, the client may limit the measurement.
BUSY = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeJob:
    """Options of a run.

    model: None for the first model that the server lists.
    rates: requests per second; None for all at once.
    concurrencies: most requests at once; None for no limit.
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
    results: Results


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Point:
    """The figures for one load.

    failed: requests without a complete answer; they are in no other figure.
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
    ttft: Spread
    itl: Spread
    tpot: Spread
    e2e: Spread

    @property
    def load(self) -> list[str]:
        """The rate and the limit of concurrency, as text."""
        return [
            "at once" if self.rate is None else f"{self.rate:g}",
            "-" if self.concurrency is None else str(self.concurrency),
        ]


def run(job: ServeJob) -> None:
    """Measures, shows tables, writes the figures. Raises BenchError, at the end, if requests failed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        model, points = runner.run(measure(job))
    facts = machine()
    title = f"serve: {model}; {job.shape}, median of {job.repeat}"
    show(title, one_line(facts), *_tables(points))
    for point in points:
        if point.busy > BUSY:
            sys.stderr.write(
                f"nanovllm-bench: at {point.output_tokens_per_second:.0f} tok/s this client used {point.busy:.0%} of "
                "a core: the server may be faster\n"
            )
    keep(
        job.results.json,
        {
            "benchmark": "serve",
            "environment": facts,
            "model": model,
            "num_requests": job.shape.num_requests,
            "input_len": str(job.shape.input),
            "output_len": str(job.shape.output),
            "prefix_len": job.shape.prefix,
            "temperature": job.temperature,
            "seed": job.seed,
            "repeat": job.repeat,
            "points": [asdict(point) for point in points],
        },
    )
    if job.results.plot is not None:
        _plot(job.results.plot, title, points)
    if failed := sum(point.failed for point in points):
        raise BenchError(f"{failed} requests failed: they are in no figure")


async def measure(job: ServeJob) -> tuple[str, list[Point]]:
    """The model's name, and a point for each pair of rate and concurrency. Raises BenchError."""
    try:
        model = job.model or (await list_models(job.endpoint))[0]
        warm_up = ChatWork("Hello", 4)
        await stream_chat(job.endpoint, _body(job, model, warm_up))
    except ExchangeError as error:
        raise BenchError(f"the server doesn't answer: {error}") from error
    points: list[Point] = []
    for rate in job.rates:
        for concurrency in job.concurrencies:
            runs: list[Point] = []
            for _ in range(job.repeat):
                # New words each time, so that the prefix cache has only the shared prefix.
                works = random_chats(job.shape, f"{job.seed}-{len(points)}-{len(runs)}")
                runs.append(await _measure_point(job, model, works, rate, concurrency))
            points.append(_medians(runs))
    return model, points


async def _measure_point(
    job: ServeJob, model: str, works: Sequence[ChatWork], rate: float | None, concurrency: int | None
) -> Point:
    limiter = asyncio.Semaphore(concurrency or len(works))
    label = f"rate {rate or 'inf'}, concurrency {concurrency or 'any'}"
    with tqdm(total=len(works), desc=label, unit="req", disable=not sys.stderr.isatty()) as bar:
        cpu, start = time.process_time(), time.perf_counter()

        async def one(work: ChatWork, at: float) -> Answer | ExchangeError:
            await asyncio.sleep(start + at - time.perf_counter())
            async with limiter:
                try:
                    return await stream_chat(job.endpoint, _body(job, model, work))
                except ExchangeError as error:
                    return error
                finally:
                    bar.update()

        outcomes = await asyncio.gather(*map(one, works, arrivals(len(works), rate)))
        busy = (time.process_time() - cpu) / (time.perf_counter() - start)
    answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, ExchangeError)]
    if not answers:
        raise BenchError(f"all requests failed ({label}), the first: {failures[0]}")
    if failures:
        sys.stderr.write(f"{len(failures)} of {len(works)} requests failed ({label}), the first: {failures[0]}\n")
    return _point(answers, len(failures), rate, concurrency, busy)


def _body(job: ServeJob, model: str, work: ChatWork) -> JSON:
    return chat_request(model, [{"role": "user", "content": work.text}], work.max_tokens, job.temperature)


def _point(answers: Sequence[Answer], failed: int, rate: float | None, concurrency: int | None, busy: float) -> Point:
    seconds = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
    output_tokens = sum(answer.output_tokens for answer in answers)
    return Point(
        rate=rate,
        concurrency=concurrency,
        failed=failed,
        seconds=seconds,
        requests_per_second=len(answers) / seconds,
        output_tokens_per_second=output_tokens / seconds,
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        cached_tokens=sum(answer.cached_tokens for answer in answers),
        output_tokens=output_tokens,
        busy=busy,
        ttft=spread(answer.pieces[0] - answer.sent for answer in answers),
        itl=spread(
            after - before
            for answer in answers
            for before, after in zip(answer.pieces, answer.pieces[1:], strict=False)
        ),
        tpot=spread(
            (answer.pieces[-1] - answer.pieces[0]) / (answer.output_tokens - 1)
            for answer in answers
            if answer.output_tokens > 1
        ),
        e2e=spread(answer.ended - answer.sent for answer in answers),
    )


def spread(seconds: Iterable[float]) -> Spread:
    """Mean and percentiles, with linear interpolation; NaN without values."""
    values = sorted(1000 * value for value in seconds) or [math.nan]
    return Spread(sum(values) / len(values), *(percentile(values, percent) for percent in PERCENTILES))


def _medians(runs: Sequence[Point]) -> Point:
    """The median of each figure."""

    def spreads(values: Sequence[Spread]) -> Spread:
        return Spread(
            median(value.mean for value in values),
            median(value.p50 for value in values),
            median(value.p90 for value in values),
            median(value.p99 for value in values),
        )

    return Point(
        rate=runs[0].rate,
        concurrency=runs[0].concurrency,
        failed=sum(run.failed for run in runs),
        seconds=median(run.seconds for run in runs),
        requests_per_second=median(run.requests_per_second for run in runs),
        output_tokens_per_second=median(run.output_tokens_per_second for run in runs),
        prompt_tokens=runs[0].prompt_tokens,
        cached_tokens=runs[0].cached_tokens,
        output_tokens=runs[0].output_tokens,
        busy=median(run.busy for run in runs),
        ttft=spreads([run.ttft for run in runs]),
        itl=spreads([run.itl for run in runs]),
        tpot=spreads([run.tpot for run in runs]),
        e2e=spreads([run.e2e for run in runs]),
    )


def _tables(points: Sequence[Point]) -> tuple[list[list[str]], list[list[str]]]:
    rates = [
        [
            "rate",
            "concurrency",
            "failed",
            "tokens in",
            "cached",
            "tokens out",
            "seconds",
            "req/s",
            "output tok/s",
            "client busy",
        ],
        *(
            [
                *point.load,
                str(point.failed),
                str(point.prompt_tokens),
                str(point.cached_tokens),
                str(point.output_tokens),
                f"{point.seconds:.2f}",
                f"{point.requests_per_second:.2f}",
                f"{point.output_tokens_per_second:.1f}",
                f"{point.busy:.0%}",
            ]
            for point in points
        ),
    ]
    latencies = [["rate", "concurrency", "ms", "mean", "p50", "p90", "p99"]]
    for point in points:
        for name, of in (("TTFT", point.ttft), ("ITL", point.itl), ("TPOT", point.tpot), ("E2E", point.e2e)):
            figures = (of.mean, of.p50, of.p90, of.p99)
            latencies.append([*point.load, name, *(f"{figure:.2f}" for figure in figures)])
    return rates, latencies


def _plot(path: Path, title: str, points: Sequence[Point]) -> None:
    def panel(spreads: Sequence[Spread]) -> dict[str, list[float]]:
        return {"p50": [of.p50 for of in spreads], "p99": [of.p99 for of in spreads]}

    # Labels show only those of rate and concurrency that differ.
    differs = [len(set(column)) > 1 for column in zip(*(point.load for point in points), strict=True)]
    labels = [", ".join(compress(point.load, differs)) for point in points]
    plot.curves(
        path,
        title,
        ("output tok/s", [point.output_tokens_per_second for point in points]),
        labels,
        {
            "TTFT, ms": panel([point.ttft for point in points]),
            "ITL, ms": panel([point.itl for point in points]),
            "E2E, ms": panel([point.e2e for point in points]),
        },
    )
