"""The requests of `throughput`, `latency` and `prefill`, and the rate that each computes from their times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from nanovllm_server.bench.engine import Timing
from nanovllm_server.bench.workload import Lengths, Work, WorkloadShape, random_prompts, random_works

OfflineProgram = Literal["throughput", "latency", "prefill"]


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that are submitted at once. rate: computes the case's figure from a run's times."""

    name: str
    works: list[Work]
    rate: Callable[[Timing], float]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(work.prompt) for work in self.works)


@dataclass(frozen=True, slots=True)
class Program:
    """The cases of one benchmark.

    unit: unit of the rates.
    needs_first: the rates depend on the time of the first tokens.
    """

    name: OfflineProgram
    title: str
    unit: str
    needs_first: bool
    cases: list[Case]


def throughput(shape: WorkloadShape, vocab_size: int) -> Program:
    """Many requests at once: tokens made, over the whole of it."""

    def rate(timing: Timing) -> float:
        return timing.num_tokens / timing.last

    case = Case(str(shape), random_works(shape, vocab_size), rate)
    return Program("throughput", "throughput", "output tok/s", needs_first=False, cases=[case])


def latency(batches: Sequence[int], input_len: int, output_len: int, vocab_size: int) -> Program:
    """A few requests at once. The rate is the number of tokens after each request's first one, divided by the time
    from the moment at which all requests have their first token. output_len: at least 2.
    """
    prompts = random_prompts(max(batches), input_len, vocab_size)

    def case(batch: int) -> Case:
        def rate(timing: Timing) -> float:
            if timing.first is None:
                raise ValueError("the time of the first tokens was not measured")
            return (timing.num_tokens - batch) / (timing.last - timing.first)

        return Case(f"batch {batch}", [Work(prompt, output_len) for prompt in prompts[:batch]], rate)

    title = f"latency: decode, {input_len} tokens in, {output_len} out"
    return Program("latency", title, "decode tok/s", needs_first=True, cases=[case(batch) for batch in batches])


def prefill(num_requests: int, input_len: int, vocab_size: int) -> Program:
    """Requests for one token each. The rate is the number of prompt tokens divided by the whole time."""
    shape = WorkloadShape(num_requests, Lengths(input_len, input_len), Lengths(1, 1))
    works = random_works(shape, vocab_size)

    def rate(timing: Timing) -> float:
        return num_requests * input_len / timing.last

    case = Case(f"{num_requests} x {input_len}", works, rate)
    return Program("prefill", "prefill", "prompt tok/s", needs_first=False, cases=[case])
