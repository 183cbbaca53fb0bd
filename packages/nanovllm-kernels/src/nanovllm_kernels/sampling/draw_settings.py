"""Settings of the draw of tokens, and constants that all sampling operators share."""

from typing import NamedTuple

from torch import Tensor

# This bit of a token's count is set if the prompt contains the token.
IN_PROMPT_BIT = 1 << 30
# Below this temperature, the likeliest token is chosen.
MIN_TEMPERATURE = 1e-5
# Smallest logit of a token that a mask allows: finite even when divided by MIN_TEMPERATURE.
MIN_ALLOWED_LOGIT = -1e30


class DrawSettings(NamedTuple):
    """Settings of the draw of B rows. The filters top-k, top-p and min-p apply in this order.

    temperature: float32 [B]. Below MIN_TEMPERATURE the likeliest token is chosen, with the lowest id if tokens tie.
    top_k: int32 [B], 0 for off. Keeps logits that are at least the k-th largest logit.
    top_p: float32 [B], 1 for off. Keeps the likeliest tokens until their probabilities p sum up to top_p, and tokens
        that tie with the last of them (Holtzman et al. 2020).
    min_p: float32 [B], 0 for off. Keeps p >= min_p * max(p) (Nguyen et al. 2024).
    seeds: int64 [B], seeds of the random numbers.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
