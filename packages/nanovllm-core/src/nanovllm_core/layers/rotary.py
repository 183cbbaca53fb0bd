"""Computes rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_kernels.elementwise import Rotation, plan_rotation


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Context extension of Llama 3.1 (Llama team 2024, https://arxiv.org/abs/2407.21783).

    Let w be a frequency's wavelength. Frequencies with w > original_max_position / low_freq_factor are divided by
    `factor`. Frequencies with w < original_max_position / high_freq_factor are unchanged. The others are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Context extension of YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071).

    factor: divisor of the frequencies with fewer than `beta_slow` turns in the original context. Frequencies with more
        than `beta_fast` turns are unchanged. A linear ramp connects both ranges.
    attention_factor: multiplies cosines and sines.
    mscale_all_dim: coefficient for `yarn_mscale`. MLA multiplies attention scores by the square of that function's
        result. 0 for no scaling.
    truncate: whether the ramp starts and ends at whole indices of dimension pairs.
    """

    factor: float
    original_max_position: int
    attention_factor: float
    mscale_all_dim: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def yarn_mscale(factor: float, coefficient: float = 1.0) -> float:
    """YaRN's multiplier of queries and keys for a context that is extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Options of rotary embeddings.

    theta: base of the frequencies.
    scaling: context extension; None for no extension.
    fraction: share of each head's dimensions that are rotated.
    """

    theta: float
    scaling: Llama3Scaling | YarnScaling | None = None
    fraction: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Number of rotated dimensions, which are the first dimensions of a head."""
        return round(head_dim * self.fraction)


class RotaryEmbedding:
    """Holds the rotations of all positions."""

    def __init__(self, config: RotaryConfig, rotary_dim: int, max_position: int, device: torch.device):
        self._table = rotary_table(config, rotary_dim, max_position, device)

    def plan(self, positions: Tensor) -> Rotation:
        """Plan the rotation of a step's tokens, for all layers. positions: int64 [T]."""
        return plan_rotation(self._table, positions)


def rotary_table(config: RotaryConfig, rotary_dim: int, max_position: int, device: torch.device) -> Tensor:
    """Returns float32 [max_position, rotary_dim]. Each row holds the cosines of a position's angles, then the sines."""
    # The CPU computes the table, so that every device gets equal numbers.
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
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    unscaled_share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (unscaled_share + (1.0 - unscaled_share) / scaling.factor)


def _apply_yarn_scaling(frequencies: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    rotary_dim = 2 * frequencies.shape[0]

    def pair_index_of(turns: float) -> float:
        """The fractional index of the dimension pair that turns `turns` times within the original context."""
        inverse_frequency = scaling.original_max_position / (turns * 2 * math.pi)
        return rotary_dim * math.log(inverse_frequency) / (2 * math.log(theta))

    start, end = pair_index_of(scaling.beta_fast), pair_index_of(scaling.beta_slow)
    if scaling.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, rotary_dim - 1)
    if start == end:
        # Avoid a division by zero.
        end += 0.001
    scaled_share = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - start) / (end - start)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * scaled_share + frequencies * (1.0 - scaled_share)
