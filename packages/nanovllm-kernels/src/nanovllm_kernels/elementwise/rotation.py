"""Types of the operators that rotate queries and keys.

In shapes, T is the number of tokens, D the size of a head, and rot the number of rotated dimensions of a head.
"""

from typing import NamedTuple

from torch import Tensor


class RotationFactors(NamedTuple):
    """Float32 factors [T, 1, rot]. The rotation of x is x * cos + concat(second_half(x), first_half(x)) * sin.

    The first half of `sin` is negated.
    """

    cos: Tensor
    sin: Tensor


class Rotation(NamedTuple):
    """Rotation of a step's tokens. cos_sin: [max_pos, rot]. positions: int64 [T]. factors: None on CUDA."""

    cos_sin: Tensor
    positions: Tensor
    factors: RotationFactors | None


class QKNorm(NamedTuple):
    """RMSNorm of each query and key head before the rotation. Each weight is [D]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
