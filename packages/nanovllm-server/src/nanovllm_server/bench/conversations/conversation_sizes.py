"""The cases of `conversations` and their sizes. Imports nothing slow, because --help needs this module."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from nanovllm_server.bench.argument_types import integer_at_least_1, integer_at_least_2
from nanovllm_server.bench.server_cases.workload_sizes import WorkloadSizes, size_field
from nanovllm_server.flag_types import positive_number

CASE_NAMES = ("returns", "burst")
# Functions that draw a think time (the pause before a turn). Arguments: random generator, mean in seconds.
THINK_TIMES: dict[str, Callable[[Random, float], float]] = {
    "constant": lambda _, mean_s: mean_s,
    "uniform": lambda random, mean_s: random.uniform(0, 2 * mean_s),
    "exponential": lambda random, mean_s: random.expovariate(1 / mean_s),
}
# Headings above the flags in --help. A heading names the cases that use the sizes under it.
_ALL, _RETURNS, _BURST = "returns and burst", "returns", "burst"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSizes(WorkloadSizes):
    """Sizes of the workloads of all cases. Lengths of prompts include the tokens of the chat template."""

    first_len: int = size_field(_ALL, integer_at_least_1, 16_000, "prompt tokens of a conversation's first turn")
    turn_len: int = size_field(_ALL, integer_at_least_1, 400, "prompt tokens of each later user message")
    output_len: int = size_field(_ALL, integer_at_least_1, 64, "tokens of each answer")
    think_time_s: float = size_field(
        _ALL, positive_number, 10.0, "mean pause of a conversation before each turn; pause before a burst", metavar="S"
    )
    concurrency: int = size_field(
        _ALL, integer_at_least_1, 16, "maximum number of simultaneous requests, except in a burst"
    )
    conversations: int = size_field(
        _RETURNS, integer_at_least_1, 64, "number of conversations, which run at the same time"
    )
    turns: int = size_field(_RETURNS, integer_at_least_2, 4, "turns of each conversation, at least 2")
    think_distribution: str = size_field(
        _RETURNS, str, "exponential", "distribution of the pauses", choices=tuple(THINK_TIMES)
    )
    cold_prompts: int = size_field(
        _RETURNS,
        integer_at_least_1,
        3,
        "for each turn from the second, number of cold (uncached) prompts with this turn's length",
    )
    burst: int = size_field(_BURST, integer_at_least_1, 24, "conversations that return at the same moment")

    def describe(self, case: str) -> str:
        """Returns a description of a case in one line."""
        lengths = f"{self.first_len:,} tokens, then {self.turn_len:,} per turn; answers of {self.output_len:,}"
        return {
            "returns": f"{self.conversations} conversations of {self.turns} turns: {lengths}; "
            f"{self.think_distribution} pauses of {self.think_time_s:g} s; {self.concurrency} requests at a time",
            "burst": f"{self.burst} conversations return at the same moment after {self.think_time_s:g} s: {lengths}",
        }[case]
