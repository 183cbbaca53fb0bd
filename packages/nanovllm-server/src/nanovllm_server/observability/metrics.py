"""Prometheus metrics of the engine and of all workers. Most names are vLLM's, with another prefix."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, product

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from nanovllm_core.engine.status import EngineInfo, EngineStats
from nanovllm_server.observability.shared_counters import KeyedCounters, SharedCounters

PREFIX = "nanovllm:"

# Upper bounds of histogram buckets.
TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5, 10, 20, 40, 80, 160)
ITL_BOUNDS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)
E2E_BOUNDS_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480, 960)
QUEUE_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LAG_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
TOKEN_COUNT_BOUNDS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

# Each of these paths has its own counters. All other paths share the counters of OTHER_PATH.
COUNTED_PATHS = (
    *("/", "/health", "/ready", "/ping", "/load", "/version", "/metrics", "/openapi.json"),
    *("/v1/models", "/v1/chat/completions"),
)
OTHER_PATH = "other"
STATUSES = range(100, 600)


class Histogram:
    """Counts observations in buckets. Fast enough for one observation per token. Not thread-safe."""

    def __init__(self, name: str, help_text: str, bounds: tuple[float, ...], counters: SharedCounters):
        self.name = name
        self.help_text = help_text
        self._bounds = bounds
        # One counter per bound, one for larger values, one for the sum of all values.
        self._counters = counters.claim(len(bounds) + 2)
        self._sum_index = len(bounds) + 1

    def observe(self, value: float, count: int = 1) -> None:
        """Records `count` observations of `value`."""
        self._counters.add(bisect_left(self._bounds, value), count)
        self._counters.add(self._sum_index, value * count)

    def observe_since(self, start: float) -> None:
        """Records the seconds since `start`, a time of `time.monotonic`."""
        self.observe(time.monotonic() - start)

    def buckets_and_sum(self) -> tuple[list[tuple[str, float]], float]:
        """Returns upper bounds with cumulative counts, and the sum of all values. Both include all workers."""
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        counts = accumulate(map(self._counters.total, range(len(bounds))))
        return list(zip(bounds, counts, strict=True)), self._counters.total(self._sum_index)


class Metrics(Collector):
    """All metrics of one server, which every worker can report."""

    def __init__(
        self, model_name: str, info: EngineInfo, read_stats: Callable[[], EngineStats], counters: SharedCounters
    ):
        histogram = partial(Histogram, counters=counters)
        self._model_name = model_name
        self._info = info
        self._read_stats = read_stats
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TTFT_BOUNDS_S
        )
        self.inter_token_latency = histogram("inter_token_latency_seconds", "From one token to the next.", ITL_BOUNDS_S)
        self.e2e_latency = histogram("e2e_request_latency_seconds", "From arrival to the last token.", E2E_BOUNDS_S)
        self.queue_time = histogram(
            "request_queue_time_seconds", "From arrival until the engine has the request.", QUEUE_BOUNDS_S
        )
        self.prompt_tokens = histogram("request_prompt_tokens", "Tokens of a request's prompt.", TOKEN_COUNT_BOUNDS)
        self.generation_tokens = histogram(
            "request_generation_tokens", "Tokens of a request's output.", TOKEN_COUNT_BOUNDS
        )
        self.event_loop_lag = histogram(
            "http_event_loop_lag_seconds",
            "Delay of the event loops of HTTP workers, four samples a second.",
            LAG_BOUNDS_S,
        )
        self.finish_reasons: KeyedCounters[str] = KeyedCounters(counters, ("stop", "length", "tool_calls", "abort"))
        self.http_exchanges = KeyedCounters(counters, tuple(product((*COUNTED_PATHS, OTHER_PATH), STATUSES)))
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count_http(self, path: str, status: int) -> None:
        """Counts one HTTP exchange."""
        self.http_exchanges.count((path if path in COUNTED_PATHS else OTHER_PATH, status))

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics for prometheus-client."""
        yield self._cache_config()
        yield from self._engine_metrics()
        for histogram in (
            self.time_to_first_token,
            self.inter_token_latency,
            self.e2e_latency,
            self.queue_time,
            self.prompt_tokens,
            self.generation_tokens,
            self.event_loop_lag,
        ):
            family = HistogramMetricFamily(PREFIX + histogram.name, histogram.help_text, labels=["model_name"])
            buckets, value_sum = histogram.buckets_and_sum()
            family.add_metric([self._model_name], buckets, value_sum)
            yield family
        sequences = CounterMetricFamily(
            PREFIX + "request_success", "Sequences that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self.finish_reasons.items():
            sequences.add_metric([self._model_name, reason], count)
        yield sequences
        exchanges = CounterMetricFamily(
            PREFIX + "http_requests", "HTTP exchanges; status 499: the client disconnected.", labels=["path", "status"]
        )
        for (path, status), count in self.http_exchanges.items():
            if count:
                exchanges.add_metric([path, str(status)], count)
        yield exchanges

    def _cache_config(self) -> Metric:
        info = self._info
        labels = {
            "model_name": self._model_name,
            "cache_dtype": info.kv_cache_dtype,
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
        }
        help_text = "Configuration of the KV cache; always 1."
        gauge = GaugeMetricFamily(PREFIX + "cache_config_info", help_text, labels=list(labels))
        gauge.add_metric(list(labels.values()), 1)
        return gauge

    def _engine_metrics(self) -> Iterator[Metric]:
        stats = self._read_stats()
        for name, help_text, value in (
            ("num_requests_running", "Requests that take part in steps.", stats.num_requests_running),
            ("num_requests_waiting", "Requests in the engine's queue.", stats.num_requests_waiting),
            ("kv_cache_usage_perc", "Share of the KV cache that requests hold, 0 to 1.", stats.kv_cache_usage),
            ("step_limit_seconds", "Longest planned time of a step with prompts and decodes.", stats.step_limit_s),
            ("decode_step_seconds", "Time of a usual step without prompts.", stats.decode_step_s),
            ("step_time_error_ratio", "Mean relative error of predicted step times.", stats.step_time_error),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        step_times = GaugeMetricFamily(
            PREFIX + "step_time_coefficient_seconds",
            "Coefficients that predict step times: fixed, per token, per token of decode context, per pair of "
            "prompt tokens that attend to each other.",
            labels=["model_name", "term"],
        )
        for term, seconds in stats.step_time_coefficients:
            step_times.add_metric([self._model_name, term], seconds)
        yield step_times
        for name, help_text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("num_preemptions", "Requests put back into the queue because the cache was full.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens received.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("iteration_tokens", "Tokens computed, of prompts and decodes.", stats.iteration_tokens),
            ("engine_steps", "Steps of the engine.", stats.num_steps),
        ):
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        steps = CounterMetricFamily(
            PREFIX + "graph_mode",
            "Steps by the part replayed from CUDA graphs, and by whether all requests decoded.",
            labels=["model_name", "mode", "batch"],
        )
        for mode, batch, count in stats.graph_steps:
            steps.add_metric([self._model_name, mode, batch], count)
        yield steps
