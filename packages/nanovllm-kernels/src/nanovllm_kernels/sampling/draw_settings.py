"""Settings of the draw, one entry per row, and the constants that all sampling operators share."""

from typing import NamedTuple

from torch import Tensor

# Bit of a row's token counts that is set for tokens of the prompt.
IN_PROMPT_BIT = 1 << 30
# Rows with a lower temperature choose the likeliest token.
MIN_TEMPERATURE = 1e-5
# Smallest logit that a mask leaves for allowed tokens; stays finite when divided by any temperature.
MIN_ALLOWED_LOGIT = -1e30


class DrawSettings(NamedTuple):
    """How each of B rows draws its token.

    temperature: float32 [B], applied first. Below MIN_TEMPERATURE: the likeliest token (the lowest id among equals).
    top_k: int32 [B], 0 for off: keeps the logits >= the k-th largest, including ties.
    top_p: float32 [B], 1 for off: of what top-k keeps, keeps the smallest set {p >= t} with a mass of at least top_p
        (Holtzman et al. 2020).
    min_p: float32 [B], 0 for off: keeps p >= min_p * max(p) (Nguyen et al. 2024).
    seeds: int64 [B].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
