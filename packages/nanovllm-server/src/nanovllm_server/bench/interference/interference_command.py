"""Runs the selected cases on each server in turn, and reports the figures."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import uvloop

from nanovllm_server.bench.client import Endpoint
from nanovllm_server.bench.interference.case_client import MeasuredServer, connect
from nanovllm_server.bench.interference.case_runner import CaseResult, CaseRunner, CaseSettings
from nanovllm_server.bench.report import BenchError, OutputFiles, print_message, report


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceOptions:
    """Options of a run. endpoints: (label, endpoint) pairs. model: None for the first model that a server lists."""

    endpoints: Sequence[tuple[str, Endpoint]]
    model: str | None
    cases: Sequence[str]
    settings: CaseSettings
    files: OutputFiles


@dataclass(frozen=True, slots=True)
class ServerResult:
    """The results of all cases on one server."""

    server: MeasuredServer
    case_results: list[CaseResult]


def run(options: InterferenceOptions) -> None:
    """Measures and reports all cases. Then raises BenchError if requests failed."""
    results = uvloop.run(measure(options))
    settings = options.settings
    models = ", ".join(f"{result.server.label} {result.server.model}" for result in results)
    title = f"interference: {models}; seed {settings.seed}, percentiles over {settings.repeat} repetitions"
    case_lines = [f"  {case}: {settings.workload.describe(case)}" for case in options.cases]
    report(
        "interference",
        "\n".join([title, *case_lines]),
        [make_table(results)],
        {
            "seed": settings.seed,
            "temperature": settings.temperature,
            "timeout_s": settings.timeout_s,
            "repeat": settings.repeat,
            "sizes": asdict(settings.workload),
            "servers": [
                {
                    "label": result.server.label,
                    "model": result.server.model,
                    "token_costs": asdict(result.server.prompt_token_costs),
                    "cases": [*map(asdict, result.case_results)],
                }
                for result in results
            ],
        },
        options.files,
    )
    if num_failed := sum(len(case.errors) for result in results for case in result.case_results):
        raise BenchError(f"{num_failed} requests failed: the results leave these requests out")


async def measure(options: InterferenceOptions) -> list[ServerResult]:
    """Measures every case on every server. Raises BenchError if a server does not answer at all."""
    settings = options.settings
    servers = [
        await connect(label, endpoint, options.model, settings.temperature, settings.timeout_s)
        for label, endpoint in options.endpoints
    ]
    results: list[ServerResult] = []
    for server in servers:
        runner = CaseRunner(server, settings)
        case_results: list[CaseResult] = []
        for case in options.cases:
            print_message(f"{server.label}: {case}: {settings.workload.describe(case)}")
            case_results.append(await runner.measure(case))
            _print_warnings(server.label, case_results[-1])
        results.append(ServerResult(server, case_results))
    return results


def make_table(results: Sequence[ServerResult]) -> list[list[str]]:
    """Returns a table with one row per case and metric, and one column per server."""
    rows = [["case", "figure", *(result.server.label for result in results)]]
    # `case_results` holds the results of one case on all servers.
    for case_results in zip(*(result.case_results for result in results), strict=True):
        values_by_figure = {name: [result.figures[name] for result in case_results] for name in case_results[0].figures}
        values_by_figure["requests"] = [result.num_requests for result in case_results]
        values_by_figure["failed"] = [len(result.errors) for result in case_results]
        rows += [
            [case_results[0].case, name.replace("_", " "), *(_format_figure(name, value) for value in values)]
            for name, values in values_by_figure.items()
        ]
    return rows


def _format_figure(name: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if isinstance(value, int) or name.endswith("tokens") else f"{value:.2f}"


def _print_warnings(label: str, result: CaseResult) -> None:
    if result.errors:
        print_message(f"{label}: {result.case}: {len(result.errors)} requests failed, the first: {result.errors[0]}")
    if result.misses:
        print_message(
            f"{label}: {result.case}: {result.misses} turns missed the prefix cache, or the server does not report "
            "cached_tokens"
        )
