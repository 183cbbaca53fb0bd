"""Runs the selected cases on each server in turn, and reports the figures."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Generic, Protocol, TypeVar

import uvloop

from nanovllm_server.bench.client import Endpoint
from nanovllm_server.bench.report import BenchError, OutputFiles, print_message, report
from nanovllm_server.bench.server_cases.case_client import CaseClient, ServerUnderTest, prepare_server
from nanovllm_server.bench.server_cases.case_results import CaseResult, ServerResult, make_table
from nanovllm_server.bench.server_cases.workload_sizes import WorkloadSizes

SizesT = TypeVar("SizesT", bound=WorkloadSizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSettings(Generic[SizesT]):
    """How to measure the cases. seed: selects all texts and random delays. timeout_s: limit of one request."""

    sizes: SizesT
    seed: str
    temperature: float
    timeout_s: float
    repeat: int


class CaseRunner(Protocol):
    """Measures the cases of a command on one server."""

    async def measure(self, case: str, client: CaseClient, result: CaseResult) -> None:
        """Warms the server up for a case, measures the case and adds the figures to `result`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOptions(Generic[SizesT]):
    """Options of a run.

    endpoints: (label, endpoints of the replicas) for each server.
    model: None for the first model that a server lists.
    """

    benchmark: str
    make_runner: Callable[[ServerUnderTest, CaseSettings[SizesT]], CaseRunner]
    endpoints: Sequence[tuple[str, Sequence[Endpoint]]]
    model: str | None
    cases: Sequence[str]
    settings: CaseSettings[SizesT]
    files: OutputFiles


def run(options: CaseOptions[SizesT]) -> None:
    """Measures and reports all cases. Then raises BenchError if requests failed."""
    results = uvloop.run(measure(options))
    settings = options.settings
    models = ", ".join(f"{result.server.label} {result.server.model}" for result in results)
    title = f"{options.benchmark}: {models}; seed {settings.seed}, percentiles over {settings.repeat} repetitions"
    case_lines = [f"  {case}: {settings.sizes.describe(case)}" for case in options.cases]
    report(
        options.benchmark,
        "\n".join([title, *case_lines]),
        [make_table(results)],
        {
            "seed": settings.seed,
            "temperature": settings.temperature,
            "timeout_s": settings.timeout_s,
            "repeat": settings.repeat,
            "sizes": asdict(settings.sizes),
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


async def measure(options: CaseOptions[SizesT]) -> list[ServerResult]:
    """Measures every case on every server. Raises BenchError if a server does not answer at all."""
    settings = options.settings
    servers = [
        await prepare_server(label, endpoints, options.model, settings.temperature, settings.timeout_s)
        for label, endpoints in options.endpoints
    ]
    results: list[ServerResult] = []
    for server in servers:
        runner = options.make_runner(server, settings)
        case_results: list[CaseResult] = []
        for case in options.cases:
            print_message(f"{server.label}: {case}: {settings.sizes.describe(case)}")
            client = CaseClient(server.endpoints, server.model, settings.temperature, settings.timeout_s)
            result = CaseResult(case)
            await runner.measure(case, client, result)
            result.num_requests, result.errors = client.num_sent, client.errors
            _print_warnings(server.label, result)
            case_results.append(result)
        results.append(ServerResult(server, case_results))
    return results


def _print_warnings(label: str, result: CaseResult) -> None:
    warnings = result.warnings
    if result.errors:
        warnings = [f"{len(result.errors)} requests failed, the first: {result.errors[0]}", *warnings]
    for warning in warnings:
        print_message(f"{label}: {result.case}: {warning}")
