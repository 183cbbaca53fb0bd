"""The cases of `throughput`, `latency` and `prefill`. A case has requests, and computes a rate from a run's times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from nanovllm_server.bench.offline.engine_runs import RunTiming
from nanovllm_server.bench.workload import IntegerRange, TokenRequest, WorkloadShape, random_prompts, random_requests


@dataclass(frozen=True, slots=True)
class Case:
    """Requests to submit at once. compute_rate: computes tokens per second from the times of one run."""

    name: str
    requests: list[TokenRequest]
    compute_rate: Callable[[RunTiming], float]

    @property
    def num_prompt_tokens(self) -> int:
        """Returns the total number of prompt tokens of all requests."""
        return sum(len(request.prompt) for request in self.requests)

    def median_rate(self, timings: Sequence[RunTiming]) -> float:
        """Returns the median rate of several runs."""
        return median(map(self.compute_rate, timings))


@dataclass(frozen=True, slots=True)
class OfflineBenchmark:
    """The cases of one command. needs_time_to_all_first_tokens: whether rates need `RunTiming.all_first_tokens_s`."""

    command: Literal["throughput", "latency", "prefill"]
    title: str
    rate_unit: str
    needs_time_to_all_first_tokens: bool
    cases: list[Case]


def throughput_benchmark(shape: WorkloadShape, vocab_size: int) -> OfflineBenchmark:
    """Returns a benchmark of many requests at once. Its rate is output tokens per second of the whole run."""

    def output_rate(timing: RunTiming) -> float:
        return timing.num_tokens / timing.last_token_s

    case = Case(str(shape), random_requests(shape, vocab_size), output_rate)
    return OfflineBenchmark(
        "throughput", "throughput", "output tok/s", needs_time_to_all_first_tokens=False, cases=[case]
    )


def latency_benchmark(batch_sizes: Sequence[int], input_len: int, output_len: int, vocab_size: int) -> OfflineBenchmark:
    """Returns a benchmark of a few requests at once. Its rate covers the time after all requests have a first token.

    output_len: at least 2.
    """
    prompts = random_prompts(max(batch_sizes), input_len, vocab_size)

    def make_case(batch_size: int) -> Case:
        def decode_rate(timing: RunTiming) -> float:
            if timing.all_first_tokens_s is None:
                raise ValueError("the time of the first tokens was not measured")
            return (timing.num_tokens - batch_size) / (timing.last_token_s - timing.all_first_tokens_s)

        requests = [TokenRequest(prompt, output_len) for prompt in prompts[:batch_size]]
        return Case(f"batch {batch_size}", requests, decode_rate)

    title = f"latency: decode, {input_len} tokens in, {output_len} out"
    cases = [make_case(batch_size) for batch_size in batch_sizes]
    return OfflineBenchmark("latency", title, "decode tok/s", needs_time_to_all_first_tokens=True, cases=cases)


def prefill_benchmark(num_requests: int, input_len: int, vocab_size: int) -> OfflineBenchmark:
    """Returns a benchmark of prompts with one output token each. The rate is prompt tokens per second."""
    shape = WorkloadShape(num_requests, IntegerRange(input_len, input_len), IntegerRange(1, 1))

    def prompt_rate(timing: RunTiming) -> float:
        return num_requests * input_len / timing.last_token_s

    case = Case(f"{num_requests} x {input_len}", random_requests(shape, vocab_size), prompt_rate)
    return OfflineBenchmark("prefill", "prefill", "prompt tok/s", needs_time_to_all_first_tokens=False, cases=[case])
