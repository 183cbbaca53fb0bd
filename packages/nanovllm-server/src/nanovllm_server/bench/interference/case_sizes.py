"""The names of the cases and their sizes. Imports nothing slow, because --help needs this module."""

from dataclasses import dataclass

CASE_NAMES = ("long-alone", "short-beside-long", "decodes-beside-long", "turn", "turns-beside-decodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSizes:
    """Sizes of all cases, each named like its flag. Lengths are in tokens, the chat template's tokens included.

    long_len: the prompt of long-alone and short-beside-long.
    num_short, short_len: number and length of the short requests beside the long prompt.
    output_len: the answer to a short request, and to a turn.
    streams: number of decoding streams of decodes-beside-long.
    stream_len: maximum of one decoding stream; the client ends the streams when the measurement is over.
    baseline_s: how long the streams decode alone before the prompts arrive.
    num_prompts, prompt_len: number and length of the prompts that arrive at once beside the streams.
    num_turns: number of conversations of `turn`.
    conversations: number of conversations of turns-beside-decodes.
    conversation_len: cached tokens of each conversation.
    message_len: each message of a conversation.
    turn_len: new tokens of a turn.
    turn_streams: number of decoding streams of turns-beside-decodes.
    turn_interval_ms: time between turns in the spaced part of turns-beside-decodes.
    """

    long_len: int
    num_short: int
    short_len: int
    output_len: int
    streams: int
    stream_len: int
    baseline_s: float
    num_prompts: int
    prompt_len: int
    num_turns: int
    conversations: int
    conversation_len: int
    message_len: int
    turn_len: int
    turn_streams: int
    turn_interval_ms: float

    def describe(self, case: str) -> str:
        """A description of a case in one line."""
        turn = f"{self.turn_len:,} tokens appended to {self.conversation_len:,} cached ones"
        return {
            "long-alone": f"one prompt of {self.long_len:,} tokens, alone",
            "short-beside-long": f"{self.num_short} requests of {self.short_len:,} tokens in and {self.output_len} out "
            f"while one prompt of {self.long_len:,} tokens is computed",
            "decodes-beside-long": f"{self.streams} streams decode, then {self.num_prompts} prompts of "
            f"{self.prompt_len:,} tokens arrive at once",
            "turn": f"{self.num_turns} conversations, one after the other: {turn}",
            "turns-beside-decodes": f"{self.conversations} conversations beside {self.turn_streams} decoding streams: "
            f"{turn}, all at once and {self.turn_interval_ms:g} ms apart",
        }[case]
