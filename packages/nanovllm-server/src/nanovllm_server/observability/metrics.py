"""Prometheus metrics of the engine and of all workers. Metrics that also exist in vLLM have vLLM's name and meaning."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, product
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from nanovllm_core.engine.status import EngineInfo, EngineStats
from nanovllm_server.observability.histograms import Histogram
from nanovllm_server.observability.shared_counters import KeyedCounters, SharedCounters

MetricsPrefix = Literal["nanovllm", "vllm"]
# Value of vLLM's label `engine`. vLLM numbers its engines; this server has one engine.
ENGINE_INDEX = "0"
# Maps current names of vLLM's metrics to former names, which dashboards still use.
FORMER_VLLM_NAMES = {
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
}

# Upper bounds of histogram buckets. E2E: time to the last token. PHASE: time of queue, prefill, decode or inference.
# LAG: delay of an event loop.
TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5, 10, 20, 40, 80, 160)
ITL_BOUNDS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)
E2E_BOUNDS_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480, 960)
PHASE_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
LAG_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
TOKEN_COUNT_BOUNDS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
CHOICE_COUNT_BOUNDS = (1, 2, 5, 10, 20)

# Each of these paths has its own counters. All other paths share the counters of OTHER_PATH.
COUNTED_PATHS = (
    *("/", "/health", "/ready", "/ping", "/load", "/version", "/metrics", "/openapi.json"),
    *("/v1/models", "/v1/chat/completions"),
)
OTHER_PATH = "other"
STATUSES = range(100, 600)  # HTTP status codes


# Pairs (labels, value). Each sample has these labels and the labels that all metrics have.
Samples = Iterable[tuple[Mapping[str, str], float]]


class Metrics(Collector):
    """All metrics of one server.

    model: value of the label `model_name`.
    prefix: prefix of all names except the names of process metrics. "vllm" adds vLLM's label `engine`.
    read_stats: returns the engine's current statistics.
    process_metrics: metrics of the server's processes (memory, CPU time, open files); None to leave them out.
    """

    def __init__(
        self,
        model: str,
        info: EngineInfo,
        read_stats: Callable[[], EngineStats],
        counters: SharedCounters,
        *,
        prefix: MetricsPrefix = "nanovllm",
        process_metrics: Collector | None = None,
    ):
        self._prefix: MetricsPrefix = prefix
        self._labels = {"model_name": model} | ({"engine": ENGINE_INDEX} if prefix == "vllm" else {})
        self._info = info
        self._read_stats = read_stats
        histogram = partial(Histogram, counters=counters)
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TTFT_BOUNDS_S
        )
        self.inter_token_latency = histogram("inter_token_latency_seconds", "From one token to the next.", ITL_BOUNDS_S)
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "Mean time between a choice's tokens.", ITL_BOUNDS_S
        )
        self.e2e_latency = histogram("e2e_request_latency_seconds", "From arrival to the last token.", E2E_BOUNDS_S)
        self.queue_time = histogram(
            "request_queue_time_seconds", "From submission to the engine until the first step.", PHASE_BOUNDS_S
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", PHASE_BOUNDS_S
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "From the first token to the last token.", PHASE_BOUNDS_S
        )
        self.inference_time = histogram(
            "request_inference_time_seconds", "From the first step to the last token.", PHASE_BOUNDS_S
        )
        self.prompt_tokens = histogram("request_prompt_tokens", "Tokens of a request's prompt.", TOKEN_COUNT_BOUNDS)
        self.computed_prompt_tokens = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens not found in the prefix cache.", TOKEN_COUNT_BOUNDS
        )
        self.generation_tokens = histogram(
            "request_generation_tokens", "Tokens of a choice's output.", TOKEN_COUNT_BOUNDS
        )
        self.max_generation_tokens = histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest choice.", TOKEN_COUNT_BOUNDS
        )
        self.num_choices = histogram("request_params_n", "Values of n.", CHOICE_COUNT_BOUNDS)
        self.max_tokens = histogram("request_params_max_tokens", "Values of max_tokens.", TOKEN_COUNT_BOUNDS)
        self.event_loop_lag = histogram(
            "http_event_loop_lag_seconds",
            "Delay of the event loops of HTTP workers, sampled four times per second.",
            LAG_BOUNDS_S,
        )
        self._histograms = [value for value in vars(self).values() if isinstance(value, Histogram)]
        self.prompt_tokens_total = counters.claim(1)
        self.finish_reasons: KeyedCounters[str] = KeyedCounters(counters, ("stop", "length", "tool_calls", "abort"))
        self.http_exchanges = KeyedCounters(counters, tuple(product((*COUNTED_PATHS, OTHER_PATH), STATUSES)))
        self._registry = CollectorRegistry()
        self._registry.register(self)
        if process_metrics is not None:
            self._registry.register(process_metrics)

    def count_http(self, path: str, status: int) -> None:
        """Counts one HTTP exchange."""
        self.http_exchanges.increment((path if path in COUNTED_PATHS else OTHER_PATH, status))

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics for prometheus-client."""
        for family in (*self._collect_engine_metrics(), *self._collect_worker_metrics()):
            yield family
            former_name = FORMER_VLLM_NAMES.get(family.name.removeprefix("vllm:"))
            if self._prefix == "vllm" and former_name is not None:
                yield _copy_with_name(family, f"vllm:{former_name}")

    def _collect_worker_metrics(self) -> Iterator[Metric]:
        for histogram in self._histograms:
            yield self._make_histogram(histogram.name, histogram.help_text, *histogram.read_buckets_and_sum())
        num_prompt_tokens = self.prompt_tokens_total.total(0)
        help_text = "Prompt tokens computed or found in the prefix cache, once per request."
        yield self._make_counter("prompt_tokens", help_text, [({}, num_prompt_tokens)])
        counts_by_reason = dict(self.finish_reasons.items())
        if self._prefix == "vllm":
            # vLLM's engine does not know tool calls, so vLLM's reason "stop" includes tool calls.
            counts_by_reason["stop"] += counts_by_reason.pop("tool_calls")
        samples = [({"finished_reason": reason}, count) for reason, count in counts_by_reason.items()]
        yield self._make_counter("request_success", "Choices that ended, by reason.", samples)
        exchange_family = CounterMetricFamily(
            f"{self._prefix}:http_requests",
            "HTTP exchanges; status 499: the client disconnected.",
            labels=["path", "status"],
        )
        for (path, status), count in self.http_exchanges.items():
            if count:
                exchange_family.add_metric([path, str(status)], count)
        yield exchange_family

    def _collect_engine_metrics(self) -> Iterator[Metric]:
        stats, info = self._read_stats(), self._info
        cache_labels = {
            "cache_dtype": info.kv_cache_dtype,
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "enable_prefix_caching": str(info.prefix_caching),
        }
        yield self._make_gauge("cache_config_info", "Configuration of the KV cache; always 1.", [(cache_labels, 1)])
        for name, help_text, value in (
            ("num_requests_running", "Requests that take part in steps.", stats.num_requests_running),
            ("num_requests_waiting", "Requests in the engine's queue.", stats.num_requests_waiting),
            ("kv_cache_usage_perc", "Share of the KV cache that requests hold, 0 to 1.", stats.kv_cache_usage),
            ("step_limit_seconds", "Longest planned time of a step with prompts and decodes.", stats.step_limit_s),
            ("decode_step_seconds", "Time of a usual step without prompts.", stats.decode_step_s),
            ("step_time_error_ratio", "Mean relative error of predicted step times.", stats.step_time_error),
        ):
            yield self._make_gauge(name, help_text, [({}, value)])
        yield self._make_gauge(
            "step_time_coefficient_seconds",
            "Coefficients that predict step times: fixed, per token, per token of decode context, per pair of a "
            "prompt's query and key tokens, per proposal of drafts, per late cache entry of a draft model.",
            [({"term": term}, seconds) for term, seconds in stats.step_time_coefficients],
        )
        for name, help_text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_queried_prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_cached_prompt_tokens),
            ("num_preemptions", "Requests put back into the queue because the cache was full.", stats.num_preemptions),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("engine_steps", "Steps of the engine.", stats.num_steps),
        ):
            yield self._make_counter(name, help_text, [({}, value)])
        # vLLM gives this name to a histogram, although `_total` usually marks a counter.
        bounds = [str(float(size)) for size, _ in stats.num_steps_by_size[:-1]]
        counts = accumulate(count for _, count in stats.num_steps_by_size) if stats.num_steps_by_size else [0]
        buckets = list(zip([*bounds, "+Inf"], counts, strict=True))
        help_text = "Prompt tokens, decode tokens and drafts per step."
        yield self._make_histogram("iteration_tokens_total", help_text, buckets, stats.num_computed_tokens)
        yield self._make_counter(
            "graph_mode",
            "Steps by the part replayed from CUDA graphs, and by kind: decodes, decodes with drafts, or with prompts.",
            [({"mode": mode, "batch": batch}, count) for mode, batch, count in stats.graph_steps],
        )
        if stats.loaded_tokens:
            yield from self._collect_tier_metrics(stats)
        if info.transfer_address or info.transfer_peers:
            yield from self._collect_transfer_metrics(stats)
        if info.draft_method is not None:
            yield from self._collect_draft_metrics(info.draft_method, stats)

    def _collect_tier_metrics(self, stats: EngineStats) -> Iterator[Metric]:
        """Yields the metrics of the KV cache's other tiers: copies of cached blocks in host memory and on disk."""
        for name, help_text, label, totals in (
            ("kv_offload_hits", "Prompt tokens loaded from host memory or disk.", "tier", stats.loaded_tokens),
            ("kv_offload_bytes", "Bytes copied between tiers of the KV cache.", "copy", stats.copied_bytes),
            ("kv_offload_copy_seconds", "Time of copies between tiers of the KV cache.", "copy", stats.copy_s),
        ):
            yield self._make_counter(name, help_text, [({label: value}, total) for value, total in totals])
        for name, help_text, value in (
            (
                "kv_offload_recomputed_tokens",
                "Prompt tokens faster to compute than to load.",
                stats.rejected_load_tokens,
            ),
            (
                "kv_offload_failed_loads",
                "Loads that failed, after which the prompt was computed.",
                stats.num_failed_loads,
            ),
            ("kv_offload_wait_seconds", "Time of requests that waited for loads.", stats.load_wait_s),
        ):
            yield self._make_counter(name, help_text, [({}, value)])

    def _collect_transfer_metrics(self, stats: EngineStats) -> Iterator[Metric]:
        """Yields the metrics of KV blocks that travel between this engine and other engines."""
        help_text = "Prompts, by the outcome of fetching their blocks from another engine."
        yield self._make_counter(
            "kv_transfer_requests", help_text, [({"outcome": outcome}, count) for outcome, count in stats.fetches]
        )
        for name, help_text, value in (
            ("kv_transfer_tokens", "Prompt tokens fetched from other engines.", stats.fetched_tokens),
            ("kv_transfer_fetched_bytes", "Bytes fetched from other engines.", stats.fetched_bytes),
            ("kv_transfer_served_bytes", "Bytes that other engines fetched.", stats.served_bytes),
            ("kv_transfer_wait_seconds", "Time of requests that waited for fetches.", stats.fetch_s),
        ):
            yield self._make_counter(name, help_text, [({}, value)])
        help_text = "Fetches by other engines for which this engine holds blocks."
        yield self._make_gauge("kv_transfer_leases", help_text, [({}, stats.num_leases)])

    def _collect_draft_metrics(self, method: str, stats: EngineStats) -> Iterator[Metric]:
        # vLLM's metrics have no label for the method.
        labels = {} if self._prefix == "vllm" else {"method": method}
        num_verified, num_accepted = stats.verified_drafts_by_position, stats.accepted_drafts_by_position
        num_drafts = num_verified[0] if num_verified else 0
        for name, help_text, value in (
            ("spec_decode_num_drafts", "Number of times that a step verified drafts of a request.", num_drafts),
            ("spec_decode_num_draft_tokens", "Drafts (proposed tokens) verified.", sum(num_verified)),
            ("spec_decode_num_accepted_tokens", "Drafts accepted.", sum(num_accepted)),
        ):
            yield self._make_counter(name, help_text, [(labels, value)])
        for name, help_text, totals in (
            ("spec_decode_num_draft_tokens_per_pos", "Drafts verified, by position.", num_verified),
            ("spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by position.", num_accepted),
        ):
            samples = [({**labels, "position": str(position)}, total) for position, total in enumerate(totals)]
            yield self._make_counter(name, help_text, samples)

    def _make_gauge(self, name: str, help_text: str, samples: Samples) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", help_text)
        for labels, value in samples:
            family.add_sample(family.name, {**self._labels, **labels}, value)
        return family

    def _make_counter(self, name: str, help_text: str, samples: Samples) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", help_text)
        for labels, value in samples:
            family.add_sample(f"{family.name}_total", {**self._labels, **labels}, value)
        return family

    def _make_histogram(
        self, name: str, help_text: str, buckets: Sequence[tuple[str, float]], value_sum: float
    ) -> Metric:
        family = HistogramMetricFamily(f"{self._prefix}:{name}", help_text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, value_sum)
        return family


def _copy_with_name(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        renamed.add_sample(name + sample.name.removeprefix(family.name), sample.labels, sample.value)
    return renamed
