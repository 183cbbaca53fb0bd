"""Runs the chosen cases on each server in turn, shows one table and writes the figures as JSON."""

import asyncio
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from nanovllm_server.bench.client import Endpoint
from nanovllm_server.bench.interference.chats import Target, connect
from nanovllm_server.bench.interference.situations import CaseResult, InterferenceSettings, Situations
from nanovllm_server.bench.report import BenchError, keep, machine, one_line, show


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceJob:
    """The options of a run.

    endpoints: servers by label, measured one after the other. model: None for the first model that a server lists.
    json: file for all figures, or None.
    """

    endpoints: Sequence[tuple[str, Endpoint]]
    model: str | None
    cases: Sequence[str]
    settings: InterferenceSettings
    json: Path | None


@dataclass(frozen=True, slots=True)
class ServerResult:
    """All cases on one server."""

    target: Target
    cases: list[CaseResult]


def run(job: InterferenceJob) -> None:
    """Measure, show a table, write the figures. Raises BenchError, at the end, if requests failed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        servers = runner.run(measure(job))
    facts = machine()
    settings = job.settings
    models = ", ".join(f"{server.target.label} {server.target.model}" for server in servers)
    title = f"interference: {models}; seed {settings.seed}, {settings.repeat} repetitions together"
    descriptions = [f"  {case}: {settings.sizes.describe(case)}" for case in job.cases]
    show("\n".join([title, *descriptions]), one_line(facts), table(servers))
    keep(
        job.json,
        {
            "benchmark": "interference",
            "environment": facts,
            "seed": settings.seed,
            "temperature": settings.temperature,
            "timeout_s": settings.timeout_s,
            "repeat": settings.repeat,
            "sizes": asdict(settings.sizes),
            "servers": [
                {
                    "label": server.target.label,
                    "model": server.target.model,
                    "token_costs": asdict(server.target.costs),
                    "cases": [asdict(case) for case in server.cases],
                }
                for server in servers
            ],
        },
    )
    if failed := sum(len(case.errors) for server in servers for case in server.cases):
        raise BenchError(f"{failed} requests failed: they are in no figure")


async def measure(job: InterferenceJob) -> list[ServerResult]:
    """Measure every case on every server. Raises BenchError if a server does not answer at all."""
    settings = job.settings
    targets = [
        await connect(label, endpoint, job.model, settings.temperature, settings.timeout_s)
        for label, endpoint in job.endpoints
    ]
    servers: list[ServerResult] = []
    for target in targets:
        situations = Situations(target, settings)
        results: list[CaseResult] = []
        for case in job.cases:
            _tell(f"{target.label}: {case}: {settings.sizes.describe(case)}")
            results.append(await situations.measure(case))
            _warn(target.label, results[-1])
        servers.append(ServerResult(target, results))
    return servers


def table(servers: Sequence[ServerResult]) -> list[list[str]]:
    """One row per figure and one column per server."""
    rows = [["case", "figure", *(server.target.label for server in servers)]]
    for results in zip(*(server.cases for server in servers), strict=True):
        counts = {"requests": [result.num_requests for result in results]}
        counts["failed"] = [len(result.errors) for result in results]
        figures = {name: [result.figures[name] for result in results] for name in results[0].figures}
        rows += [
            [results[0].case, name.replace("_", " "), *(_shown(name, value) for value in values)]
            for name, values in (figures | counts).items()
        ]
    return rows


def _shown(name: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if isinstance(value, int) or name.endswith("tokens") else f"{value:.2f}"


def _warn(label: str, result: CaseResult) -> None:
    if result.errors:
        _tell(f"{label}: {result.case}: {len(result.errors)} requests failed, the first: {result.errors[0]}")
    if result.misses:
        _tell(
            f"{label}: {result.case}: {result.misses} turns missed the prefix cache, or the server does not report "
            "cached_tokens"
        )


def _tell(text: str) -> None:
    sys.stderr.write(f"nanovllm-bench: {text}\n")
    sys.stderr.flush()
