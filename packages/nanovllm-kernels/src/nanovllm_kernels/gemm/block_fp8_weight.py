"""Defines a linear layer's weight in block FP8."""

from typing import NamedTuple

from torch import Tensor

# Number of a row's neighbouring elements that share a scale. In a weight, GROUP x GROUP elements share a scale.
GROUP = 128


class BlockFP8Weight(NamedTuple):
    """Holds a quantised weight [N, K]. An element is its e4m3 value times its block's scale.

    data: float8_e4m3fn [N, K], contiguous.
    scales: float32 [ceil(N / block_rows), ceil(K / 128)], one per block of `block_rows` rows and 128 columns.
    block_rows: 128, or less if the weight is a concatenation of weights with partial blocks.
    counters: int32, one per output tile of a launch that splits K; 0 between launches. None: no launch splits K.
    """

    data: Tensor
    scales: Tensor
    block_rows: int = GROUP
    counters: Tensor | None = None
