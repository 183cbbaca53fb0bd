"""Results of cases, and the table that compares servers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from nanovllm_server.bench.client import TimedAnswer
from nanovllm_server.bench.report import percentile
from nanovllm_server.bench.server_cases.case_client import ServerUnderTest


@dataclass(slots=True)
class CaseResult:
    """The results of one case on one server over all repetitions. The JSON has the same field names.

    figures: metrics by name, such as `long_ttft_p50_ms`. A metric is NaN if no request was answered.
    ttfts_ms: times to the first token by kind of request, such as `long`.
    warnings: reasons to doubt the figures.
    """

    case: str
    num_requests: int = 0
    errors: list[str] = field(default_factory=list[str])
    figures: dict[str, float] = field(default_factory=dict[str, float])
    ttfts_ms: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    warnings: list[str] = field(default_factory=list[str])

    def add_ttfts(self, kind: str, answers: Iterable[TimedAnswer | None]) -> None:
        """Records the times to the first token of the requests that were answered."""
        self.ttfts_ms.setdefault(kind, []).extend(1000 * answer.ttft_s for answer in answers if answer is not None)

    def summarize_ttfts(self, kind: str) -> None:
        """Adds to `figures` the percentiles of the recorded times to the first token."""
        self.figures |= _percentile_figures(f"{kind}_ttft", self.ttfts_ms.get(kind, ()))

    def summarize_gaps(self, kind: str, gaps_s: Sequence[float]) -> None:
        """Adds to `figures` the number of gaps (times between pieces), and the percentiles of the gaps."""
        self.figures |= _percentile_figures(f"{kind}_gap", [1000 * gap for gap in gaps_s])
        self.figures[f"{kind}_gaps"] = len(gaps_s)


@dataclass(frozen=True, slots=True)
class ServerResult:
    """The results of all cases on one server."""

    server: ServerUnderTest
    case_results: list[CaseResult]


def median_or_nan(values: Iterable[float]) -> float:
    """Returns the median. NaN if there are no values."""
    return median([*values] or [math.nan])


def make_table(results: Sequence[ServerResult]) -> list[list[str]]:
    """Returns a table with one row per case and metric, and one column per server."""
    rows = [["case", "figure", *(result.server.label for result in results)]]
    for results_of_case in zip(*(result.case_results for result in results), strict=True):
        values_by_figure = {
            name: [result.figures[name] for result in results_of_case] for name in results_of_case[0].figures
        }
        values_by_figure["requests"] = [result.num_requests for result in results_of_case]
        values_by_figure["failed"] = [len(result.errors) for result in results_of_case]
        rows += [
            [results_of_case[0].case, name.replace("_", " "), *(_format_figure(name, value) for value in values)]
            for name, values in values_by_figure.items()
        ]
    return rows


def _format_figure(name: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if isinstance(value, int) or name.endswith("tokens") else f"{value:.2f}"


def _percentile_figures(name: str, values_ms: Iterable[float]) -> dict[str, float]:
    sorted_ms = sorted(values_ms) or [math.nan]
    return {
        **{f"{name}_p{percent}_ms": percentile(sorted_ms, percent) for percent in (50, 90, 99)},
        f"{name}_max_ms": sorted_ms[-1],
    }
