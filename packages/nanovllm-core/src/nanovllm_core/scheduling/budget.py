"""Limits of a step in tokens and predicted seconds, and the sizes of prompt chunks within them."""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from nanovllm_core.scheduling.policy import DECODE_STEPS
from nanovllm_core.scheduling.step_time import StepTimeModel, StepWork
from nanovllm_kernels.attention import ONE_TOKEN_ROUNDS, AttentionRounds, attention_pairs

# The unused share of a time limit is this multiple of the mean excess of steps over their predictions, because some
# steps exceed the mean. It is at most _MAX_MARGIN.
_MARGIN_EXCESSES = 6
_MAX_MARGIN = 0.2
# If attention takes at least _ATTENTION_SHARE of a chunk's time, the chunk is cut where its attention rounds would
# leave more than _IDLE_SHARE of the device idle on average.
_ATTENTION_SHARE = 0.4
_IDLE_SHARE = 0.2


class StepLimits(NamedTuple):
    """Bounds of every step.

    num_tokens: tokens of decodes and prompts.
    target_s: time of a step with decodes, in seconds; None for the larger of `mixed_step_s` and DECODE_STEPS usual
        decode steps.
    prompt_step_s: time of a step with prompts only, in seconds.
    mixed_step_s: time in seconds, see `target_s`.
    rounds: the rounds in which the device computes attention of chunks.
    padded_tokens: token counts to which steps with prompts are padded, rising; larger steps are not padded.
    """

    num_tokens: int
    target_s: float | None = None
    prompt_step_s: float = float("inf")
    mixed_step_s: float = float("inf")
    rounds: AttentionRounds = ONE_TOKEN_ROUNDS
    padded_tokens: tuple[int, ...] = ()

    def seconds(self, num_decodes: int, decode_step_s: float) -> float:
        """The time limit of a step with `num_decodes` decodes. decode_step_s: time of a usual decode step."""
        if num_decodes == 0:
            return max(self.prompt_step_s, self.target_s or 0.0)
        return self.target_s or max(self.mixed_step_s, DECODE_STEPS * decode_step_s)

    def padded(self, num_tokens: int) -> int:
        """The tokens that a step with prompts computes, padding included."""
        at = bisect_left(self.padded_tokens, num_tokens)
        return self.padded_tokens[at] if at < len(self.padded_tokens) else num_tokens


class StepBudget:
    """The tokens and the time of a step that are left for prompts.

    decodes: the step's work without prompts.
    unit: chunks that do not end their prompt end at a multiple of so many tokens.
    """

    def __init__(self, limits: StepLimits, model: StepTimeModel, decodes: StepWork, unit: int):
        self._limits = limits
        self._model = model
        self._unit = unit
        # Includes all chunks taken so far; their attention pairs are not rounded up to whole rounds.
        self._work = decodes
        self._chunks: list[tuple[int, int]] = []
        used = 1 - min(_MARGIN_EXCESSES * model.excess, _MAX_MARGIN)
        self._limit_s = used * limits.seconds(decodes.num_tokens, model.decode_step_s)
        # A chunk that does not finish its prompt may delay prompts that finish in the step only as much as decodes.
        self._shared_limit_s = min(self._limit_s, used * limits.seconds(1, model.decode_step_s))
        self._has_cut = False

    @property
    def is_full(self) -> bool:
        """Whether no further chunk fits."""
        return self._has_cut or self._num_tokens_left <= 0

    @property
    def _num_tokens_left(self) -> int:
        return self._limits.num_tokens - self._work.num_tokens

    def chunk(self, start: int, end: int) -> int:
        """Tokens to compute of a prompt of `end` tokens, of which the first `start` are computed.

        Returns all remaining tokens, or fewer that end at a multiple of the unit; 0 once a chunk did not finish its
        prompt. The step's first chunk has at least one unit, so that prompts do not starve beside slow decodes.
        """
        if self.is_full:
            return 0
        num_tokens = self._sized(start, end, self._limit_s)
        if self._chunks and start + num_tokens < end:
            num_tokens = self._sized(start, end, self._shared_limit_s)
        return num_tokens

    def _sized(self, start: int, end: int, limit_s: float) -> int:
        """`chunk` for a step that takes at most `limit_s`."""
        unit = self._unit
        seconds = limit_s - self._model.predict(self._work)
        most = min(self._num_tokens_left, end - start, self._model.chunk_tokens(start, seconds))
        num_tokens = self._within_limit(start, int(most), limit_s)
        if not self._chunks:
            num_tokens = max(num_tokens, min(self._num_tokens_left, end - start, unit))
        if start + num_tokens < end:
            num_tokens = (start + num_tokens) // unit * unit - start
        # On a CPU rounds are shorter than a unit: chunks are not cut for them.
        if self._limits.rounds.num_tokens >= unit:
            num_tokens = self._within_rounds(start, num_tokens, end, limit_s)
            num_tokens = self._evened(start, num_tokens, end)
        return max(num_tokens, 0)

    def take(self, start: int, end: int, num_tokens: int) -> float:
        """Add a chunk of `num_tokens` to the step, and return its seconds. start, end: see `chunk`."""
        work = self._work
        pairs = work.prompt_pairs + attention_pairs(start, num_tokens)
        self._work = StepWork(work.num_tokens + num_tokens, work.decode_context, pairs)
        self._chunks.append((start, num_tokens))
        self._has_cut = start + num_tokens < end
        return self._model.chunk_seconds(start, num_tokens)

    def _within_limit(self, start: int, num_tokens: int, limit_s: float) -> int:
        """`num_tokens`, or as many of them as fit within `limit_s` including the step's padding.

        Padding costs time in matrix products, not in attention. So the chunk is shortened until attention fits, or to
        the next smaller padded size, whichever computes more tokens.
        """
        work = self._work
        total = work.num_tokens + num_tokens
        padded = self._limits.padded(total)
        if num_tokens <= 0 or padded == total:
            return num_tokens
        attention_s = limit_s - self._model.predict(work._replace(num_tokens=padded))
        fitting = min(num_tokens, self._model.attention_tokens(start, attention_s))
        below = bisect_right(self._limits.padded_tokens, total) - 1
        full = 0 if below < 0 else self._limits.padded_tokens[below] - work.num_tokens
        return max(int(fitting), full)

    def _within_rounds(self, start: int, num_tokens: int, end: int, limit_s: float) -> int:
        """`num_tokens`, or fewer so that the step stays within `limit_s` when attention takes whole rounds.

        The step's first chunk has at least one round.
        """
        is_first, is_last = not self._chunks, start + num_tokens == end
        round_before = self._round_before(start, num_tokens)
        if num_tokens <= 0 or (is_first and round_before <= 0) or self._fits(start, num_tokens, limit_s):
            return num_tokens
        # A partial round takes as long as a whole one: leave the tokens to the next step.
        if is_last and round_before <= 0:
            return 0
        ends = range(start + round_before, start + num_tokens, self._unit)
        num_fitting = bisect_left(
            ends, True, key=lambda each: each > start and not self._fits(start, each - start, limit_s)
        )
        return ends[max(num_fitting - 1, 0)] - start

    def _evened(self, start: int, num_tokens: int, end: int) -> int:
        """`num_tokens`; without the last round if the chunk is cut anyway and that round would be mostly idle."""
        round_tokens = self._limits.rounds.num_tokens
        rounds = -(-num_tokens // round_tokens)
        if rounds < 2 or start + num_tokens == end:
            return num_tokens
        is_idle = num_tokens < (1 - _IDLE_SHARE) * rounds * round_tokens
        attention_s = self._model.attention_seconds(start, num_tokens)
        is_short = attention_s < _ATTENTION_SHARE * self._model.chunk_seconds(start, num_tokens)
        return self._round_before(start, num_tokens) if is_idle and not is_short else num_tokens

    def _round_before(self, start: int, num_tokens: int) -> int:
        """Tokens of the chunk before its last round, up to a multiple of the unit."""
        round_tokens, unit = self._limits.rounds.num_tokens, self._unit
        rounds = -(-num_tokens // round_tokens)
        return (start + (rounds - 1) * round_tokens) // unit * unit - start

    def _fits(self, start: int, num_tokens: int, limit_s: float) -> bool:
        """Whether the step stays within `limit_s` with this chunk, if attention takes whole rounds of the device."""
        pairs = self._limits.rounds.estimate_pairs([*self._chunks, (start, num_tokens)])
        total = self._limits.padded(self._work.num_tokens + num_tokens)
        return self._model.predict(StepWork(total, self._work.decode_context, pairs)) <= limit_s
