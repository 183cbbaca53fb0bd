"""The command `soak`: sends random traffic to a server, and checks memory, blocks, statuses and answers."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import orjson
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from nanovllm_server.bench.client import Endpoint, ExchangeError, fetch, list_models
from nanovllm_server.bench.report import BenchError, InvalidSettingsError, OutputFiles, Table, print_message, report
from nanovllm_server.bench.soak.server_processes import ProcessMemory, ServerProcesses
from nanovllm_server.bench.soak.soak_traffic import Outcome, TrafficSource, count_long_prompt_bytes, run_exchange
from nanovllm_server.bench.soak.warm_up import Phase, WarmUp

MIB = 1 << 20
PROGRESS_INTERVAL_S = 60.0
# Time in which a server without requests must free all blocks of the KV cache.
IDLE_TIMEOUT_S = 120.0
IDLE_POLL_INTERVAL_S = 0.5
# Gauges that are 0 on a server without requests.
IDLE_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
MAX_SHOWN_FAILURES = 10
# Number of large schemas in the warm-up. They fill the server's 256 MiB grammar cache.
NUM_LARGE_SCHEMAS = 160
# Only this number of clients send large schemas, so that each schema compiles in time on a slow machine.
NUM_SCHEMA_CLIENTS = 4
# Minimum total text of the long prompts in the warm-up, which fills one worker's 64 MiB cache of encoded text. The
# clients send more until memory is flat, because each worker has its own cache.
MIN_LONG_PROMPT_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """Settings of a soak.

    model: None for the first model that the server lists.
    server_pid: the server's parent process, on this machine.
    duration_s: time of the traffic, including the warm-up.
    max_warm_up_s: the warm-up ends at this time, even if memory still grows. Memory is measured after the warm-up.
    min_flat_s: each phase of the warm-up ends when memory has been flat for this time.
    max_growth_percent: the soak fails if the memory of a process grows by at least this much.
    """

    endpoint: Endpoint
    model: str | None
    server_pid: int
    num_clients: int
    max_prompt_words: int
    duration_s: float
    max_warm_up_s: float
    min_flat_s: float
    sample_interval_s: float
    max_growth_percent: float
    seed: int
    files: OutputFiles


@dataclass(slots=True)
class TrafficCounts:
    """Counts of exchanges (request and answer).

    num_5xx: number of 5xx answers in the server's metrics, which also count exchanges that the client aborted.
    """

    exchanges_by_kind: Counter[str] = field(default_factory=Counter[str])
    answers_by_status: Counter[int] = field(default_factory=Counter[int])
    failures: list[str] = field(default_factory=list[str])
    num_5xx: int = 0

    def add(self, kind: str, outcome: Outcome) -> None:
        """Counts one exchange."""
        self.exchanges_by_kind[kind] += 1
        if outcome.status is not None:
            self.answers_by_status[outcome.status] += 1
        if outcome.failure is not None:
            self.failures.append(f"{kind}: {outcome.failure}")


@dataclass(frozen=True, slots=True)
class SoakResult:
    """Result of a soak.

    was_flat: whether memory was flat at the end of the warm-up.
    lasting: processes that are in every sample. short_lived: all other processes.
    busy_gauges: the IDLE_GAUGES that stay above 0 after the traffic, as values by name.
    """

    model: str
    warm_up_s: float
    was_flat: bool
    counts: TrafficCounts
    lasting: list[ProcessMemory]
    short_lived: list[ProcessMemory]
    busy_gauges: dict[str, float]

    def violations(self, max_growth_percent: float) -> list[str]:
        """Returns one text for each rule that the server broke."""
        counts = self.counts
        grown_processes = [memory for memory in self.lasting if memory.growth_percent >= max_growth_percent]
        return [
            *(
                f"process {memory.pid} ({memory.role}) grew by {memory.growth_percent:.2f}%"
                for memory in grown_processes
            ),
            *(f"{name} is {value:g} on the idle server" for name, value in self.busy_gauges.items()),
            *([f"{counts.num_5xx} answers with a status of 5xx"] if counts.num_5xx else []),
            *([f"{len(counts.failures)} failed exchanges"] if counts.failures else []),
        ]


def run(options: SoakOptions) -> None:
    """Runs the soak and reports it. Raises BenchError if the server breaks a rule."""
    result = uvloop.run(soak(options))
    violations = result.violations(options.max_growth_percent)
    counts = result.counts
    report(
        "soak",
        f"soak: {result.model}; {options.num_clients} clients, {options.duration_s / 60:g} minutes, of which "
        f"{result.warm_up_s / 60:.1f} are the warm-up, after which memory {'was flat' if result.was_flat else 'grew'}",
        [
            _memory_table(result),
            [["status", "answers"], *([str(key), str(num)] for key, num in sorted(counts.answers_by_status.items()))],
            [["exchange", "number"], *([key, str(num)] for key, num in sorted(counts.exchanges_by_kind.items()))],
        ],
        {
            "model": result.model,
            "num_clients": options.num_clients,
            "duration_s": options.duration_s,
            "warm_up_s": result.warm_up_s,
            "was_flat_after_warm_up": result.was_flat,
            "processes": [
                {
                    "pid": memory.pid,
                    "parent_pid": memory.parent_pid,
                    "role": memory.role,
                    "is_lasting": memory in result.lasting,
                    "growth_percent": memory.growth_percent,
                    "rss_bytes": [*memory.rss_bytes],
                }
                for memory in (*result.lasting, *result.short_lived)
            ],
            "statuses": {str(status): num for status, num in counts.answers_by_status.items()},
            "exchanges": {**counts.exchanges_by_kind},
            "num_5xx": counts.num_5xx,
            "failures": [*counts.failures],
            "violations": [*violations],
        },
        options.files,
    )
    for failure in counts.failures[:MAX_SHOWN_FAILURES]:
        print_message(failure)
    if violations:
        raise BenchError("; ".join(violations))


def _memory_table(result: SoakResult) -> Table:
    header = ["pid", "parent", "process", "samples", "start MiB", "max MiB", "end MiB", "growth %"]
    return [
        header,
        *(
            [
                *map(str, (memory.pid, memory.parent_pid, memory.role, len(memory.rss_bytes))),
                *(f"{size / MIB:.1f}" for size in (memory.start_bytes, max(memory.rss_bytes), memory.end_bytes)),
                f"{memory.growth_percent:.2f}",
            ]
            for memory in result.lasting
        ),
        *_short_lived_rows(result.short_lived),
    ]


def _short_lived_rows(memories: list[ProcessMemory]) -> Table:
    """Returns one row per parent, for all its short-lived processes, such as those that check schemas."""
    memories_by_parent: dict[int, list[ProcessMemory]] = {}
    for memory in memories:
        memories_by_parent.setdefault(memory.parent_pid, []).append(memory)
    return [
        [
            *(f"{len(children)} others", str(parent_pid), children[0].role),
            str(sum(len(child.rss_bytes) for child in children)),
            *("", f"{max(max(child.rss_bytes) for child in children) / MIB:.1f}", "", "not lasting"),
        ]
        for parent_pid, children in memories_by_parent.items()
    ]


async def soak(options: SoakOptions) -> SoakResult:
    """Sends the traffic and samples memory. Raises BenchError if the server does not answer at all."""
    if options.endpoint.uses_tls:
        raise InvalidSettingsError("soak sends malformed requests over plain HTTP: give a base URL with http://")
    processes = ServerProcesses(options.server_pid)
    try:
        model = options.model or (await list_models(options.endpoint))[0]
        max_model_len = await _read_max_model_len(options.endpoint, model)
        num_previous_5xx = _count_5xx(await _read_metrics(options.endpoint))
    except ExchangeError as error:
        raise BenchError(f"the server doesn't answer: {error}") from error
    counts = TrafficCounts()
    start_time = time.monotonic()
    end_time = start_time + options.duration_s
    num_long_prompts = -(-MIN_LONG_PROMPT_BYTES // count_long_prompt_bytes(max_model_len))
    warm_up = WarmUp(options.min_flat_s, start_time + options.max_warm_up_s, NUM_LARGE_SCHEMAS, num_long_prompts)
    source = TrafficSource(options.endpoint, model, f"{options.seed}-lengths", options.max_prompt_words)
    for exchange in source.build_prompts_of_all_lengths(max_model_len):
        if time.monotonic() < start_time + options.max_warm_up_s:
            counts.add("prompt of each length", await run_exchange(source, exchange))
    async with asyncio.TaskGroup() as tasks:
        for index in range(options.num_clients):
            source = TrafficSource(options.endpoint, model, f"{options.seed}-{index}", options.max_prompt_words)
            sends_schemas = index < NUM_SCHEMA_CLIENTS
            tasks.create_task(
                _fill_and_run(source, counts, warm_up, max_model_len, end_time, sends_schemas=sends_schemas)
            )
        warm_up_end_time = await _sample_memory(options, processes, counts, warm_up, end_time)
    try:
        busy_gauges = await wait_until_idle(options.endpoint)
        counts.num_5xx = _count_5xx(await _read_metrics(options.endpoint)) - num_previous_5xx
    except ExchangeError as error:
        raise BenchError(f"the server doesn't answer after the traffic: {error}") from error
    warm_up_s = warm_up_end_time - start_time
    return SoakResult(model, warm_up_s, warm_up.is_flat, counts, *processes.split_by_lifetime(), busy_gauges)


async def _fill_and_run(
    source: TrafficSource,
    counts: TrafficCounts,
    warm_up: WarmUp,
    max_model_len: int,
    end_time: float,
    *,
    sends_schemas: bool,
) -> None:
    """Sends requests that fill caches, then random requests until `end_time`."""
    while warm_up.phase is Phase.FILL and time.monotonic() < end_time:
        if sends_schemas and warm_up.num_large_schemas_left > 0:
            warm_up.num_large_schemas_left -= 1
            counts.add("large schema", await run_exchange(source, source.build_large_schema_request()))
        else:
            warm_up.num_long_prompts_left -= 1
            counts.add("long prompt", await run_exchange(source, source.build_long_prompt_request(max_model_len)))
    while time.monotonic() < end_time:
        kind, exchange = source.draw()
        counts.add(kind, await run_exchange(source, exchange))


async def _sample_memory(
    options: SoakOptions, processes: ServerProcesses, counts: TrafficCounts, warm_up: WarmUp, end_time: float
) -> float:
    """Samples memory until `end_time`. Returns the time at which the warm-up ended."""
    warm_up_end_time = end_time
    next_progress_time = 0.0
    while (now := time.monotonic()) < end_time:
        rss_bytes = processes.current_rss_bytes()
        previous_phase = warm_up.phase
        warm_up.add_sample(now, processes.current_anonymous_bytes())
        if warm_up.phase is Phase.MEASURE:
            warm_up_end_time = min(warm_up_end_time, now)
            processes.sample()
        if now >= next_progress_time or warm_up.phase is not previous_phase:
            next_progress_time = now + PROGRESS_INTERVAL_S
            sizes = ", ".join(f"{pid}: {size / MIB:.1f}" for pid, size in rss_bytes.items())
            num_exchanges = counts.exchanges_by_kind.total()
            print_message(
                f"{warm_up.phase.name.lower()}: {(end_time - now) / 60:.1f} minutes left, {num_exchanges} exchanges, "
                f"{len(counts.failures)} failures; MiB by process: {sizes}"
            )
        await asyncio.sleep(min(options.sample_interval_s, max(end_time - now, 0)))
    processes.sample()
    return warm_up_end_time


async def wait_until_idle(endpoint: Endpoint) -> dict[str, float]:
    """Waits until all IDLE_GAUGES are 0. Returns the gauges that are not 0 after IDLE_TIMEOUT_S, by name."""
    end_time = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        busy_gauges = {
            sample.name: sample.value
            for sample in await _read_metrics(endpoint)
            if sample.name.partition(":")[2] in IDLE_GAUGES and sample.value
        }
        if not busy_gauges or time.monotonic() >= end_time:
            return busy_gauges
        await asyncio.sleep(IDLE_POLL_INTERVAL_S)


async def _read_max_model_len(endpoint: Endpoint, model: str) -> int:
    for entry in orjson.loads(await fetch(endpoint, "/models"))["data"]:
        if entry["id"] == model:
            return entry["max_model_len"]
    raise BenchError(f"the server has no model {model}: leave --model out for the first one")


async def _read_metrics(endpoint: Endpoint) -> list[Sample]:
    text = (await fetch(replace(endpoint, path_prefix=""), "/metrics")).decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def _count_5xx(samples: list[Sample]) -> int:
    return sum(int(sample.value) for sample in _http_samples(samples) if sample.labels["status"].startswith("5"))


def _http_samples(samples: list[Sample]) -> Iterator[Sample]:
    return (sample for sample in samples if sample.name.partition(":")[2] == "http_requests_total")
