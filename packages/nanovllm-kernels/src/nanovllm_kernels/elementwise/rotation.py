"""Types of the operators that rotate queries and keys."""

from typing import NamedTuple

from torch import Tensor


class RotationFactors(NamedTuple):
    """Factors [T, 1, rot], float32, which rotate the first rot dimensions: x * cos + (x with swapped halves) * sin."""

    cos: Tensor
    sin: Tensor


class Rotation(NamedTuple):
    """Rotation of a step's tokens, from `plan_rotation`. `factors` is None on CUDA."""

    cos_sin: Tensor
    positions: Tensor
    factors: RotationFactors | None


class QKNorm(NamedTuple):
    """RMSNorm of each query and key head before the rotation. The weights are [D], as for `rms_norm`."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
