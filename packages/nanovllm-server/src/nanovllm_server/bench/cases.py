"""What `throughput`, `latency` and `prefill` ask of an engine, and the rate that each makes of the times.

This room must not know who does the work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from nanovllm_server.bench.engine import Timing
from nanovllm_server.bench.workload import Lengths, Work, WorkloadShape, random_prompts, random_works

OfflineProgram = Literal["throughput", "latency", "prefill"]


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that are handed over at once, and what to make of when their tokens came."""

    name: str
    works: list[Work]
    rate: Callable[[Timing], float]

    @property
    def prompt_tokens(self) -> int:
        """Tokens in, of all requests."""
        return sum(len(work.prompt) for work in self.works)


@dataclass(frozen=True, slots=True)
class Program:
    """The cases of one benchmark.

    unit: of the rates. needs_first: whether they depend on when the first token came.
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
    """A few requests at once: tokens made after the first of each, over the time from when all had theirs to the last.

    `output_len` is at least 2.
    """
    prompts = random_prompts(max(batches), input_len, vocab_size)

    def case(batch: int) -> Case:
        def rate(timing: Timing) -> float:
            if timing.first is None:
                raise ValueError("nobody looked at when the first tokens came")
            return (timing.num_tokens - batch) / (timing.last - timing.first)

        return Case(f"batch {batch}", [Work(prompt, output_len) for prompt in prompts[:batch]], rate)

    title = f"latency: decode, {input_len} tokens in, {output_len} out"
    return Program("latency", title, "decode tok/s", needs_first=True, cases=[case(batch) for batch in batches])


def prefill(num_requests: int, input_len: int, vocab_size: int) -> Program:
    """Prompts and one token each: tokens of prompt, over the whole of it."""
    shape = WorkloadShape(num_requests, Lengths(input_len, input_len), Lengths(1, 1))
    works = random_works(shape, vocab_size)

    def rate(timing: Timing) -> float:
        return num_requests * input_len / timing.last

    case = Case(f"{num_requests} x {input_len}", works, rate)
    return Program("prefill", "prefill", "prompt tok/s", needs_first=False, cases=[case])
