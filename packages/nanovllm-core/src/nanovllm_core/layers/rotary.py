"""Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864) as one table."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_kernels.elementwise import Rotation, plan_rotation


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Context extension of Llama 3.1: divides slow frequencies by `factor`, and interpolates towards fast ones.

    A frequency is slow if its wavelength exceeds original_max_position / low_freq_factor, and fast if it is below
    original_max_position / high_freq_factor. Source: Llama team 2024, https://arxiv.org/abs/2407.21783, and its code.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Context extension of YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071).

    factor: divides the frequency of dimensions with less than `beta_slow` turns within the original context. Dimensions
        with more than `beta_fast` turns keep their frequency; a linear ramp connects both.
    attention_factor: multiplies cosines and sines.
    mscale_all_dim: weight for `yarn_mscale`, by which some families multiply whole heads too; 0 for off.
    truncate: round the ramp's ends to whole dimensions.
    """

    factor: float
    original_max_position: int
    attention_factor: float
    mscale_all_dim: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """The factor by which YaRN multiplies queries and keys if a context is extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """theta: base of the frequencies. scaling: None for no extension. fraction: rotated share of each head."""

    theta: float
    scaling: Llama3Scaling | YarnScaling | None = None
    fraction: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Number of leading dimensions of a head of `head_dim` that are rotated."""
        return round(head_dim * self.fraction)


class RotaryEmbedding:
    """A table of rotations, float32 [max_position, rotary_dim], and its lookup for each step."""

    def __init__(self, config: RotaryConfig, rotary_dim: int, max_position: int, device: torch.device):
        self._table = rotary_table(config, rotary_dim, max_position, device)

    def plan(self, positions: Tensor) -> Rotation:
        """The rotation for all layers of a step. positions: int64 [T]."""
        return plan_rotation(self._table, positions)


def rotary_table(config: RotaryConfig, rotary_dim: int, max_position: int, device: torch.device) -> Tensor:
    """Cosines, then sines, of every position's angles: float32 [max_position, rotary_dim] on `device`.

    Computed on the CPU for every device, so that all ranks and machines have the same table.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / config.theta**exponents
    attention_factor = 1.0
    match config.scaling:
        case Llama3Scaling():
            frequencies = _apply_llama3_scaling(frequencies, config.scaling)
        case YarnScaling():
            frequencies = _apply_yarn_scaling(frequencies, config.scaling, config.theta)
            attention_factor = config.scaling.attention_factor
        case None:
            pass
    angles = torch.arange(max_position, dtype=torch.float32).unsqueeze(1) * frequencies
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor).to(device)


def _apply_llama3_scaling(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    periods = scaling.original_max_position * frequencies / (2 * math.pi)
    # 0 for slow frequencies, 1 for fast frequencies.
    unscaled_share = ((periods - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (unscaled_share + (1.0 - unscaled_share) / scaling.factor)


def _apply_yarn_scaling(frequencies: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    rotary_dim = 2 * frequencies.shape[0]

    def dimension_of(turns: float) -> float:
        """The dimension that makes `turns` turns within the original context."""
        period = scaling.original_max_position / (turns * 2 * math.pi)
        return rotary_dim * math.log(period) / (2 * math.log(theta))

    start, end = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, rotary_dim - 1)
    if start == end:
        # Avoid a division by zero.
        end += 0.001
    scaled_share = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - start) / (end - start)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * scaled_share + frequencies * (1.0 - scaled_share)
