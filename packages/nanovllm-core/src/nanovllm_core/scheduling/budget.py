"""Limits of a step in tokens and seconds, and the sizes of prompt chunks within these limits."""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from nanovllm_core.scheduling.step_time import StepTimeModel, StepWork
from nanovllm_kernels.attention import PROPORTIONAL_ESTIMATOR, AttentionEstimator, attention_pairs

# Without a target time, the time limit of a step with prompts and decodes is at least the time of this many steps with
# the decodes alone.
MIN_MIXED_DECODE_STEPS = 4
# Steps may take longer than predicted, so a budget leaves a share of the time limit unused. The share is the smaller of
# _MAX_MARGIN and _MARGIN_PER_EXCESS times `StepTimeModel.mean_excess`.
_MARGIN_PER_EXCESS = 6
_MAX_MARGIN = 0.2
# A GPU computes the attention of a chunk in rounds, each for the same number of queries. A chunk drops its last round
# if both are true: more than _MAX_IDLE_SHARE of the capacity of all its rounds would be idle, and attention takes at
# least _MIN_ATTENTION_SHARE of the chunk's time.
_MIN_ATTENTION_SHARE = 0.4
_MAX_IDLE_SHARE = 0.2


class StepLimits(NamedTuple):
    """Limits of every step.

    max_tokens: maximum number of tokens of each group of requests (see `Scheduler`).
    target_s: time limit of a step with prompts and decodes; None: see `mixed_step_limit_s`.
    prompt_step_limit_s: time limit of a step without decodes, unless `target_s` is larger.
    mixed_step_limit_s: if `target_s` is None, the time limit of a step with prompts and decodes is
        `mixed_step_limit_s` or the time of MIN_MIXED_DECODE_STEPS decode steps, whichever is larger.
    attention_estimator: estimates how long the attention of chunks takes.
    padded_token_counts: numbers of tokens per group, in ascending order. A step with prompts is padded to the next of
        these numbers. Larger steps are not padded.
    """

    max_tokens: int
    target_s: float | None = None
    prompt_step_limit_s: float = float("inf")
    mixed_step_limit_s: float = float("inf")
    attention_estimator: AttentionEstimator = PROPORTIONAL_ESTIMATOR
    padded_token_counts: tuple[int, ...] = ()

    def time_limit_s(self, decode_step_s: float | None) -> float:
        """The time limit of a step. decode_step_s: time of a step with the decodes alone; None: no decodes."""
        if decode_step_s is None:
            return max(self.prompt_step_limit_s, self.target_s or 0.0)
        return self.target_s or max(self.mixed_step_limit_s, MIN_MIXED_DECODE_STEPS * decode_step_s)

    def pad(self, num_tokens: int) -> int:
        """The number of tokens that a step with prompts and `num_tokens` tokens computes, including padding."""
        index = bisect_left(self.padded_token_counts, num_tokens)
        return self.padded_token_counts[index] if index < len(self.padded_token_counts) else num_tokens


class StepBudget:
    """The tokens and the time that a step has left for prompts of one group of requests (see `Scheduler`).

    decode_work: the group's work without prompts.
    chunk_unit: a chunk that does not finish its prompt ends at a multiple of this many tokens.
    has_decodes: whether the step has decodes, in any group.
    """

    def __init__(
        self,
        limits: StepLimits,
        step_time_model: StepTimeModel,
        decode_work: StepWork,
        chunk_unit: int,
        *,
        has_decodes: bool,
    ):
        self._limits = limits
        self._model = step_time_model
        self._chunk_unit = chunk_unit
        # The work of decodes and added chunks. The attention of chunks is not rounded up to whole rounds here.
        self._work = decode_work
        # (start, number of tokens) of each added chunk.
        self._chunks: list[tuple[int, int]] = []
        usable_share = 1 - min(_MARGIN_PER_EXCESS * self._model.mean_excess, _MAX_MARGIN)
        # The moving average `decode_step_s` is too low for a batch that grew in steps with prompts.
        decode_step_s = max(self._model.decode_step_s, self._model.predict(decode_work))
        self._limit_s = usable_share * limits.time_limit_s(decode_step_s if has_decodes else None)
        # Time limit of the step if the chunks before the last chunk finish their prompts, and the last chunk does not.
        # The last chunk delays the finished prompts, so this limit may be lower than `_limit_s`.
        self._unfinished_chunk_limit_s = min(self._limit_s, usable_share * limits.time_limit_s(decode_step_s))
        self._has_unfinished_prompt = False

    @property
    def is_full(self) -> bool:
        """Whether no further chunk fits."""
        return self._has_unfinished_prompt or self._num_remaining_tokens <= 0

    @property
    def _num_remaining_tokens(self) -> int:
        return self._limits.max_tokens - self._work.num_tokens

    def size_chunk(self, start: int, end: int) -> int:
        """The number of tokens of a prompt's next chunk.

        start: number of computed tokens. end: number of tokens of the prompt; after a preemption, with the output.

        The first chunk of a step may have up to `chunk_unit` tokens even if the step then exceeds the time limit.
        Otherwise slow decodes could starve prompts.
        """
        if self.is_full:
            return 0
        num_tokens = self._size_chunk_within(start, end, self._limit_s)
        if self._chunks and start + num_tokens < end:
            num_tokens = self._size_chunk_within(start, end, self._unfinished_chunk_limit_s)
        return num_tokens

    def add_chunk(self, start: int, end: int, num_tokens: int) -> None:
        """Add a chunk to the step. start, end: see `size_chunk`."""
        work = self._work
        prompt_pairs = work.prompt_pairs + attention_pairs(start, num_tokens)
        self._work = work._replace(num_tokens=work.num_tokens + num_tokens, prompt_pairs=prompt_pairs)
        self._chunks.append((start, num_tokens))
        self._has_unfinished_prompt = start + num_tokens < end

    def _size_chunk_within(self, start: int, end: int, limit_s: float) -> int:
        """The number of tokens of the next chunk if the step may take `limit_s`."""
        chunk_unit = self._chunk_unit
        remaining_s = limit_s - self._model.predict(self._work)
        max_tokens = min(self._num_remaining_tokens, end - start, self._model.max_chunk_tokens(start, remaining_s))
        num_tokens = self._shorten_for_padding(start, int(max_tokens), limit_s)
        if not self._chunks:
            num_tokens = max(num_tokens, min(self._num_remaining_tokens, end - start, chunk_unit))
        if start + num_tokens < end:
            num_tokens = (start + num_tokens) // chunk_unit * chunk_unit - start
        # On a CPU, rounds are shorter than a chunk unit and do not matter.
        if self._limits.attention_estimator.tokens_per_round >= chunk_unit:
            num_tokens = self._shorten_for_rounds(start, num_tokens, end, limit_s)
            num_tokens = self._drop_idle_round(start, num_tokens, end)
        return max(num_tokens, 0)

    def _shorten_for_padding(self, start: int, num_tokens: int, limit_s: float) -> int:
        """Shorten a chunk until the padded step fits into `limit_s`.

        Padding costs time in matrix products, not in attention. Returns the larger of two lengths: the maximum length
        whose attention fits into the padded step, and the maximum length with which the step needs no padding.
        """
        work, padded_counts = self._work, self._limits.padded_token_counts
        step_tokens = work.num_tokens + num_tokens
        padded_tokens = self._limits.pad(step_tokens)
        if num_tokens <= 0 or padded_tokens == step_tokens:
            return num_tokens
        attention_limit_s = limit_s - self._model.predict(work._replace(num_tokens=padded_tokens))
        fitting_tokens = min(num_tokens, self._model.max_attention_tokens(start, attention_limit_s))
        num_smaller_counts = bisect_right(padded_counts, step_tokens)
        unpadded_tokens = padded_counts[num_smaller_counts - 1] - work.num_tokens if num_smaller_counts else 0
        return max(int(fitting_tokens), unpadded_tokens)

    def _shorten_for_rounds(self, start: int, num_tokens: int, end: int, limit_s: float) -> int:
        """Shorten a chunk until the step fits into `limit_s`. A step's first chunk loses at most its last round."""
        is_first_chunk, finishes_prompt = not self._chunks, start + num_tokens == end
        tokens_before_last_round = self._tokens_before_last_round(start, num_tokens)
        if (
            num_tokens <= 0
            or (is_first_chunk and tokens_before_last_round <= 0)
            or self._fits(start, num_tokens, limit_s)
        ):
            return num_tokens
        # The chunk has only one round. The attention of a shorter chunk would take as long, so leave the chunk to a
        # later step.
        if finishes_prompt and tokens_before_last_round <= 0:
            return 0
        first_end = start + tokens_before_last_round if is_first_chunk else start // self._chunk_unit * self._chunk_unit
        chunk_ends = range(first_end, start + num_tokens, self._chunk_unit)

        def is_too_long(chunk_end: int) -> bool:
            return chunk_end > start and not self._fits(start, chunk_end - start, limit_s)

        num_fitting = bisect_left(chunk_ends, True, key=is_too_long)
        return chunk_ends[max(num_fitting - 1, 0)] - start

    def _drop_idle_round(self, start: int, num_tokens: int, end: int) -> int:
        """Drop the last round of a chunk that does not finish its prompt if the round would be mostly idle."""
        tokens_per_round = self._limits.attention_estimator.tokens_per_round
        num_rounds = -(-num_tokens // tokens_per_round)
        if num_rounds < 2 or start + num_tokens == end:
            return num_tokens
        is_idle = num_tokens < (1 - _MAX_IDLE_SHARE) * num_rounds * tokens_per_round
        attention_s = self._model.attention_seconds(start, num_tokens)
        has_short_attention = attention_s < _MIN_ATTENTION_SHARE * self._model.chunk_seconds(start, num_tokens)
        return self._tokens_before_last_round(start, num_tokens) if is_idle and not has_short_attention else num_tokens

    def _tokens_before_last_round(self, start: int, num_tokens: int) -> int:
        """The number of tokens before the last round of a chunk, rounded down to whole chunk units."""
        tokens_per_round, chunk_unit = self._limits.attention_estimator.tokens_per_round, self._chunk_unit
        num_rounds = -(-num_tokens // tokens_per_round)
        return (start + (num_rounds - 1) * tokens_per_round) // chunk_unit * chunk_unit - start

    def _fits(self, start: int, num_tokens: int, limit_s: float) -> bool:
        """Whether the step with this chunk fits into `limit_s`, counting whole rounds of attention."""
        prompt_pairs = self._limits.attention_estimator.estimate_pairs([*self._chunks, (start, num_tokens)])
        padded_tokens = self._limits.pad(self._work.num_tokens + num_tokens)
        padded_work = self._work._replace(num_tokens=padded_tokens, prompt_pairs=prompt_pairs)
        return self._model.predict(padded_work) <= limit_s
