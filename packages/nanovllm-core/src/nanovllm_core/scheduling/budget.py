"""Limits of a step in tokens and predicted seconds, and the sizes of prompt chunks within them."""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from nanovllm_core.scheduling.step_time import StepTimeModel, StepWork
from nanovllm_kernels.attention import ONE_TOKEN_ROUNDS, AttentionRounds, attention_pairs

# Without a target time, a step with prompts and decodes may take the time of this many usual decode steps.
MIN_MIXED_DECODE_STEPS = 4
# A budget leaves a margin of the time limit unused: this multiple of the mean excess of steps over their predictions,
# because some steps exceed the mean, and at most _MAX_MARGIN of the limit.
_MARGIN_PER_EXCESS = 6
_MAX_MARGIN = 0.2
# If attention takes at least _MIN_ATTENTION_SHARE of a chunk's time, the chunk is cut where its attention rounds would
# leave more than _MAX_IDLE_SHARE of the device idle on average.
_MIN_ATTENTION_SHARE = 0.4
_MAX_IDLE_SHARE = 0.2


class StepLimits(NamedTuple):
    """Bounds of every step.

    max_tokens: tokens of decodes and prompts.
    target_s: time limit of a step with decodes, in seconds; None for the larger of `mixed_step_s` and
        MIN_MIXED_DECODE_STEPS usual decode steps.
    prompt_step_s: time limit of a step with prompts only, in seconds.
    mixed_step_s: time limit in seconds, see `target_s`.
    rounds: the rounds in which the device computes attention of chunks.
    padded_tokens: token counts to which steps with prompts are padded, rising; larger steps are not padded.
    """

    max_tokens: int
    target_s: float | None = None
    prompt_step_s: float = float("inf")
    mixed_step_s: float = float("inf")
    rounds: AttentionRounds = ONE_TOKEN_ROUNDS
    padded_tokens: tuple[int, ...] = ()

    def time_limit_s(self, num_decodes: int, decode_step_s: float) -> float:
        """The time limit of a step with `num_decodes` decodes. decode_step_s: time of a usual decode step."""
        if num_decodes == 0:
            return max(self.prompt_step_s, self.target_s or 0.0)
        return self.target_s or max(self.mixed_step_s, MIN_MIXED_DECODE_STEPS * decode_step_s)

    def pad(self, num_tokens: int) -> int:
        """The number of tokens that a step with prompts computes, padding included."""
        index = bisect_left(self.padded_tokens, num_tokens)
        return self.padded_tokens[index] if index < len(self.padded_tokens) else num_tokens


class StepBudget:
    """The tokens and the time of a step that remain for prompts.

    decodes: the step's work without prompts.
    chunk_unit: a chunk that does not finish its prompt ends at a multiple of this many tokens.
    """

    def __init__(self, limits: StepLimits, step_time_model: StepTimeModel, decodes: StepWork, chunk_unit: int):
        self._limits = limits
        self._model = step_time_model
        self._chunk_unit = chunk_unit
        # Includes all added chunks; their attention pairs are not rounded up to whole rounds.
        self._work = decodes
        # (start, number of tokens) of each added chunk.
        self._chunks: list[tuple[int, int]] = []
        usable_share = 1 - min(_MARGIN_PER_EXCESS * self._model.mean_excess, _MAX_MARGIN)
        decode_step_s = self._model.decode_step_s
        self._limit_s = usable_share * limits.time_limit_s(decodes.num_tokens, decode_step_s)
        # A chunk that does not finish its prompt may delay prompts that finish in the step only as much as decodes.
        self._shared_limit_s = min(self._limit_s, usable_share * limits.time_limit_s(1, decode_step_s))
        self._has_unfinished_prompt = False

    @property
    def is_full(self) -> bool:
        """Whether no further chunk fits."""
        return self._has_unfinished_prompt or self._num_remaining_tokens <= 0

    @property
    def _num_remaining_tokens(self) -> int:
        return self._limits.max_tokens - self._work.num_tokens

    def size_chunk(self, start: int, end: int) -> int:
        """Number of tokens to compute of a prompt of `end` tokens, of which the first `start` are computed.

        Returns all remaining tokens, or fewer that end at a multiple of the unit; 0 once a chunk did not finish its
        prompt. The step's first chunk has at least one unit, so that prompts do not starve beside slow decodes.
        """
        if self.is_full:
            return 0
        num_tokens = self._size_within(start, end, self._limit_s)
        if self._chunks and start + num_tokens < end:
            num_tokens = self._size_within(start, end, self._shared_limit_s)
        return num_tokens

    def add_chunk(self, start: int, end: int, num_tokens: int) -> float:
        """Add a chunk of `num_tokens` to the step, and return its predicted seconds. start, end: see `size_chunk`."""
        work = self._work
        prompt_pairs = work.prompt_pairs + attention_pairs(start, num_tokens)
        self._work = StepWork(work.num_tokens + num_tokens, work.decode_context, prompt_pairs)
        self._chunks.append((start, num_tokens))
        self._has_unfinished_prompt = start + num_tokens < end
        return self._model.chunk_seconds(start, num_tokens)

    def _size_within(self, start: int, end: int, limit_s: float) -> int:
        """`size_chunk` for a step that takes at most `limit_s`."""
        unit = self._chunk_unit
        remaining_s = limit_s - self._model.predict(self._work)
        max_tokens = min(self._num_remaining_tokens, end - start, self._model.max_chunk_tokens(start, remaining_s))
        num_tokens = self._shorten_for_padding(start, int(max_tokens), limit_s)
        if not self._chunks:
            num_tokens = max(num_tokens, min(self._num_remaining_tokens, end - start, unit))
        if start + num_tokens < end:
            num_tokens = (start + num_tokens) // unit * unit - start
        # On a CPU rounds are shorter than a unit: chunks are not shortened for them.
        if self._limits.rounds.num_tokens >= unit:
            num_tokens = self._shorten_for_rounds(start, num_tokens, end, limit_s)
            num_tokens = self._drop_idle_round(start, num_tokens, end)
        return max(num_tokens, 0)

    def _shorten_for_padding(self, start: int, num_tokens: int, limit_s: float) -> int:
        """`num_tokens`, or as many of them as fit within `limit_s` including the step's padding.

        Padding costs time in matrix products, not in attention. So the chunk is shortened until attention fits, or to
        the next smaller padded size, whichever computes more tokens.
        """
        work, padded_sizes = self._work, self._limits.padded_tokens
        step_tokens = work.num_tokens + num_tokens
        padded_tokens = self._limits.pad(step_tokens)
        if num_tokens <= 0 or padded_tokens == step_tokens:
            return num_tokens
        attention_s = limit_s - self._model.predict(work._replace(num_tokens=padded_tokens))
        fitting_tokens = min(num_tokens, self._model.max_attention_tokens(start, attention_s))
        num_smaller_sizes = bisect_right(padded_sizes, step_tokens)
        unpadded_tokens = padded_sizes[num_smaller_sizes - 1] - work.num_tokens if num_smaller_sizes else 0
        return max(int(fitting_tokens), unpadded_tokens)

    def _shorten_for_rounds(self, start: int, num_tokens: int, end: int, limit_s: float) -> int:
        """`num_tokens`, or fewer so that the step stays within `limit_s` when attention takes whole rounds.

        The step's first chunk has at least one round.
        """
        is_first, is_last = not self._chunks, start + num_tokens == end
        full_rounds = self._tokens_before_last_round(start, num_tokens)
        if num_tokens <= 0 or (is_first and full_rounds <= 0) or self._fits(start, num_tokens, limit_s):
            return num_tokens
        # A partial round takes as long as a whole one: leave the tokens to the next step.
        if is_last and full_rounds <= 0:
            return 0
        chunk_ends = range(start + full_rounds, start + num_tokens, self._chunk_unit)
        num_fitting = bisect_left(
            chunk_ends,
            True,
            key=lambda chunk_end: chunk_end > start and not self._fits(start, chunk_end - start, limit_s),
        )
        return chunk_ends[max(num_fitting - 1, 0)] - start

    def _drop_idle_round(self, start: int, num_tokens: int, end: int) -> int:
        """`num_tokens`; without the last round if the prompt is cut anyway and that round would be mostly idle."""
        round_tokens = self._limits.rounds.num_tokens
        num_rounds = -(-num_tokens // round_tokens)
        if num_rounds < 2 or start + num_tokens == end:
            return num_tokens
        is_idle = num_tokens < (1 - _MAX_IDLE_SHARE) * num_rounds * round_tokens
        attention_s = self._model.attention_seconds(start, num_tokens)
        has_short_attention = attention_s < _MIN_ATTENTION_SHARE * self._model.chunk_seconds(start, num_tokens)
        return self._tokens_before_last_round(start, num_tokens) if is_idle and not has_short_attention else num_tokens

    def _tokens_before_last_round(self, start: int, num_tokens: int) -> int:
        """Number of tokens of the chunk before its last round, down to a multiple of the unit."""
        round_tokens, unit = self._limits.rounds.num_tokens, self._chunk_unit
        num_rounds = -(-num_tokens // round_tokens)
        return (start + (num_rounds - 1) * round_tokens) // unit * unit - start

    def _fits(self, start: int, num_tokens: int, limit_s: float) -> bool:
        """Whether the step stays within `limit_s` with this chunk, if attention takes whole rounds of the device."""
        prompt_pairs = self._limits.rounds.estimate_pairs([*self._chunks, (start, num_tokens)])
        padded_tokens = self._limits.pad(self._work.num_tokens + num_tokens)
        return self._model.predict(StepWork(padded_tokens, self._work.decode_context, prompt_pairs)) <= limit_s
