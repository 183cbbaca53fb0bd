"""Defines settings for drawing tokens, and constants that several sampling operators use."""

from typing import NamedTuple

from torch import Tensor

# This bit of a token's count is set if the prompt contains the token.
IN_PROMPT_BIT = 1 << 30
# Below this temperature, the likeliest token is chosen.
MIN_TEMPERATURE = 1e-5
# `apply_masks_` raises smaller logits of allowed tokens to this number. It stays finite if divided by MIN_TEMPERATURE.
MIN_ALLOWED_LOGIT = -1e30


class DrawSettings(NamedTuple):
    """Holds settings for drawing one token for each of B rows. Filters apply in this order: top-k, top-p, min-p.

    temperature: float32 [B]. Below MIN_TEMPERATURE the likeliest token is chosen, with the lowest id if tokens tie.
    top_k: int32 [B], 0 for off. Keeps logits that are at least the k-th largest logit.
    top_p: float32 [B], 1 for off. Keeps the smallest set of likeliest tokens whose probabilities add up to at least
        `top_p`, and tokens that tie with the least likely token of the set (Holtzman et al. 2020).
    min_p: float32 [B], 0 for off. Keeps tokens with probability >= min_p * largest probability (Nguyen et al. 2024).
    seeds: int64 [B].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
