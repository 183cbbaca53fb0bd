"""The cases of `interference` and their sizes. Imports nothing slow, because --help needs this module."""

from dataclasses import dataclass

from nanovllm_server.bench.argument_types import finite_rates, integer_at_least_1, integer_at_least_2
from nanovllm_server.bench.server_cases.workload_sizes import WorkloadSizes, size_field
from nanovllm_server.flag_types import positive_number

CASE_NAMES = (
    "long-alone",
    "short-beside-long",
    "decodes-beside-long",
    "decodes-beside-arrivals",
    "turn",
    "turns-beside-decodes",
)
# Headings above the flags in --help. A heading names the cases that use the sizes under it.
_LONG, _TURNS = "long-alone and short-beside-long", "turn and turns-beside-decodes"
_DECODES, _ARRIVALS = "decodes-beside-long and decodes-beside-arrivals", "decodes-beside-arrivals"


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceSizes(WorkloadSizes):
    """Sizes of the workloads of all cases. A turn is a new user message of a conversation.

    Lengths of prompts include the tokens of the chat template.
    """

    long_len: int = size_field(_LONG, integer_at_least_1, 100_000, "tokens of the long prompt")
    num_short: int = size_field(_LONG, integer_at_least_1, 20, "short requests beside the long prompt")
    short_len: int = size_field(_LONG, integer_at_least_1, 100, "tokens of a short prompt")
    output_len: int = size_field(_LONG, integer_at_least_1, 16, "tokens of the answer to a short prompt, and to a turn")
    streams: int = size_field(_DECODES, integer_at_least_1, 64, "decoding streams")
    stream_len: int = size_field(
        _DECODES, integer_at_least_2, 4096, "maximum tokens of each decoding stream, in all cases"
    )
    baseline_s: float = size_field(_DECODES, positive_number, 2.0, "time that the streams decode alone", metavar="S")
    prompt_len: int = size_field(
        _DECODES, integer_at_least_1, 30_000, "tokens of each prompt that arrives while the streams decode"
    )
    num_prompts: int = size_field(
        _DECODES, integer_at_least_1, 3, "number of prompts that arrive at once in the case decodes-beside-long"
    )
    arrival_rates: tuple[float, ...] = size_field(
        _ARRIVALS, finite_rates, "0,0.5,1", "prompts per second, one run per rate", metavar="RATE,..."
    )
    arrival_period_s: float = size_field(_ARRIVALS, positive_number, 20.0, "time in which prompts arrive", metavar="S")
    turn_conversations: int = size_field(_TURNS, integer_at_least_1, 5, "conversations of the case turn")
    conversations: int = size_field(_TURNS, integer_at_least_1, 20, "conversations of the case turns-beside-decodes")
    conversation_len: int = size_field(_TURNS, integer_at_least_1, 32_000, "cached tokens of a conversation")
    message_len: int = size_field(_TURNS, integer_at_least_1, 400, "tokens of each message of a conversation")
    turn_len: int = size_field(_TURNS, integer_at_least_2, 100, "prompt tokens that a turn appends to its conversation")
    turn_streams: int = size_field(_TURNS, integer_at_least_1, 32, "decoding streams of the case turns-beside-decodes")
    turn_interval_ms: float = size_field(
        _TURNS,
        positive_number,
        100.0,
        "time between turns in the second part of turns-beside-decodes, whose first part sends all turns at once",
        metavar="MS",
    )

    def describe(self, case: str) -> str:
        """Returns a description of a case in one line."""
        turn = f"{self.turn_len:,} tokens appended to {self.conversation_len:,} cached tokens"
        return {
            "long-alone": f"one prompt of {self.long_len:,} tokens, alone",
            "short-beside-long": f"{self.num_short} requests of {self.short_len:,} tokens in and {self.output_len} out "
            f"while one prompt of {self.long_len:,} tokens is computed",
            "decodes-beside-long": f"{self.streams} streams decode, then {self.num_prompts} prompts of "
            f"{self.prompt_len:,} tokens arrive at once",
            "decodes-beside-arrivals": f"{self.streams} streams decode while prompts of {self.prompt_len:,} tokens "
            f"arrive at random for {self.arrival_period_s:g} s",
            "turn": f"{self.turn_conversations} conversations, one after the other: {turn}",
            "turns-beside-decodes": f"{self.conversations} conversations beside {self.turn_streams} decoding streams: "
            f"{turn}, first all at once, then {self.turn_interval_ms:g} ms apart",
        }[case]
