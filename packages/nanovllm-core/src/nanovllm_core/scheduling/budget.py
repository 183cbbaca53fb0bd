"""How much a step may compute: tokens, and seconds as the step-time model predicts them."""

from typing import NamedTuple

from nanovllm_core.scheduling.policy import DECODE_STEPS
from nanovllm_core.scheduling.step_time import StepTimeModel, StepWork

# The part of a limit that stays unused grows with the model's error, up to this.
_MAX_MARGIN = 0.2
# A chunk is cut to a multiple of `chunk_multiple` if at least this share of it remains.
_LEAST_REMAINING = 0.75


class StepLimits(NamedTuple):
    """Bounds of every step.

    num_tokens: tokens of decodes and prompts.
    target_s: time of a step that has decodes, in seconds; None for the larger of `prompt_step_s` and a few usual
        decode steps.
    prompt_step_s: time of a step of prompts alone, in seconds.
    chunk_multiple: chunk lengths at which attention fills the device evenly are multiples of so many tokens.
    """

    num_tokens: int
    target_s: float | None = None
    prompt_step_s: float = float("inf")
    chunk_multiple: int = 1

    def seconds(self, num_decodes: int, decode_step_s: float) -> float:
        """The limit of a step with `num_decodes` decodes. decode_step_s: time of a usual decode step."""
        if num_decodes == 0:
            return max(self.prompt_step_s, self.target_s or 0.0)
        return self.target_s or max(self.prompt_step_s, DECODE_STEPS * decode_step_s)


class StepBudget:
    """What a step still has for prompts: `tokens`, and `seconds` by the step-time model."""

    def __init__(self, limits: StepLimits, model: StepTimeModel, decodes: StepWork, block_size: int):
        self._model = model
        self._block_size = block_size
        self._chunk_multiple = limits.chunk_multiple
        self.tokens = limits.num_tokens - decodes.num_tokens
        limit = limits.seconds(decodes.num_tokens, model.decode_step_s)
        self.seconds = limit * (1 - min(model.error, _MAX_MARGIN)) - model.predict(decodes)
        self._has_chunk = False

    def chunk(self, start: int, end: int) -> int:
        """Tokens to compute of a prompt whose first `start` of `end` tokens are computed.

        All that remain, or up to a block boundary. The step's first chunk has at least a block, so that prompts never
        starve beside slow decodes.
        """
        most = min(self.tokens, self._model.chunk_tokens(start, self.seconds))
        if not self._has_chunk:
            most = max(most, min(self.tokens, self._block_size))
        if end - start <= most:
            return end - start
        size = self._block_size
        num_tokens = int(start + most) // size * size - start
        multiple = num_tokens // self._chunk_multiple * self._chunk_multiple
        if multiple >= _LEAST_REMAINING * num_tokens:
            num_tokens = (start + multiple) // size * size - start
        return max(num_tokens, 0)

    def take(self, start: int, num_tokens: int) -> float:
        """Spend what a chunk of `num_tokens` after `start` takes, and return its seconds."""
        seconds = self._model.chunk_seconds(start, num_tokens)
        self.tokens -= num_tokens
        self.seconds -= seconds
        self._has_chunk = True
        return seconds
