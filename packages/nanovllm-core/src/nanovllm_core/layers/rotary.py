"""Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864) as one table.

This room must not know who rotates by it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_kernels.elementwise import Rotation, plan_rotation


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 stretches its context: slow frequencies by `factor`, fast ones not, those between smoothly.

    A frequency is slow when its wavelength exceeds original_max_position / low_freq_factor, fast when it is below
    original_max_position / high_freq_factor. (Llama team 2024, https://arxiv.org/abs/2407.21783, and its model code.)
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """How YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071) stretches a context: dimensions that turn more than
    `beta_fast` times within the original one keep their frequency, those that turn less than `beta_slow` times have it
    divided by `factor`, and those between in part, by a ramp over dimensions.

    attention_factor: what cosines and sines are multiplied by. mscale_all_dim: the weight, see `yarn_mscale`, by which
    some families multiply whole heads as well; 0 for none. truncate: the ramp begins and ends at whole dimensions.
    """

    factor: float
    original_max_position: int
    attention_factor: float
    mscale_all_dim: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """By what YaRN multiplies queries and keys where a context is stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """theta: the base of the frequencies. scaling: None for none. fraction: how much of each head is rotated."""

    theta: float
    scaling: Llama3Scaling | YarnScaling | None = None
    fraction: float = 1.0

    def rotated(self, head_dim: int) -> int:
        """How many dimensions of a head of `head_dim` are rotated, the first ones."""
        return round(head_dim * self.fraction)


class RotaryEmbedding:
    """The table of one kind of rotation, float32 [max_position, rotary_dim], and each step's look-up in it."""

    def __init__(self, config: RotaryConfig, rotary_dim: int, max_position: int, device: torch.device):
        self._table = rotary_table(config, rotary_dim, max_position, device)

    def plan(self, positions: Tensor) -> Rotation:
        """What every layer of a step rotates by; positions: int64 [T]."""
        return plan_rotation(self._table, positions)


def rotary_table(config: RotaryConfig, rotary_dim: int, max_position: int, device: torch.device) -> Tensor:
    """Cosines, then sines, of every position's angles: float32 [max_position, rotary_dim] on `device`.

    Computed on the CPU whatever the device, so that all ranks and all machines rotate by the same table.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / config.theta**exponents
    factor = 1.0
    match config.scaling:
        case Llama3Scaling():
            frequencies = _scaled(frequencies, config.scaling)
        case YarnScaling():
            frequencies = _ramped(frequencies, config.scaling, config.theta)
            factor = config.scaling.attention_factor
        case None:
            pass
    angles = torch.arange(max_position, dtype=torch.float32).unsqueeze(1) * frequencies
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).to(device)


def _scaled(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    periods = scaling.original_max_position * frequencies / (2 * math.pi)
    # 0 for slow frequencies, 1 for fast ones.
    keep = ((periods - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def _ramped(frequencies: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    rotary_dim = 2 * frequencies.shape[0]

    def dimension(turns: float) -> float:
        """Which one turns so often within the original context."""
        position = scaling.original_max_position / (turns * 2 * math.pi)
        return rotary_dim * math.log(position) / (2 * math.log(theta))

    begin, end = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, rotary_dim - 1)
    if begin == end:
        # The least ramp that there is.
        end += 0.001
    slowed = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - begin) / (end - begin)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * slowed + frequencies * (1.0 - slowed)
