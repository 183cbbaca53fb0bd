"""Types of the operators that rotate queries and keys."""

from typing import NamedTuple

from torch import Tensor


class RotationFactors(NamedTuple):
    """Factors of a head's first rot dimensions, float32 [T, 1, rot]: x * cos + (x with swapped halves) * sin."""

    cos: Tensor
    sin: Tensor


class Rotation(NamedTuple):
    """How a step's tokens are rotated, the same for every layer. Made by `plan_rotation`.

    cos_sin, positions: as given to `plan_rotation`.
    factors: gathered once per step on a CPU, None on CUDA.
    """

    cos_sin: Tensor
    positions: Tensor
    factors: RotationFactors | None


class QKNorm(NamedTuple):
    """RMSNorm of each query and key head before the rotation: weights [D] as for `rms_norm`, and epsilon."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
