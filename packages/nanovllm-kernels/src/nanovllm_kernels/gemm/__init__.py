"""Linear layers, with the weight prepacked where the CPU gains by it.

This room must not know which layer a weight belongs to.

Measured on two cores with AMX, bf16, microseconds, plain `F.linear` against the packed product (rows = tokens):

    K -> N           M=1        M=8        M=64       M=512      M=1024
    576 -> 3072      121 / 59   149 / 60   279 / 171  1022 / 863 2021 / 1467
    1536 -> 576      64 / 28    66 / 29    115 / 87   560 / 610  1101 / 1322
    576 -> 49152     2159/1217  2196/1173  3945/2419

The packing is told a number of rows to plan for. 8 is within noise of the best of {1, 8, 64, 512} up to 64 rows; at 512
rows and more only 1536 -> 576 preferred another (1: 462 us), and decode at 8 rows would pay for it elsewhere (96 us
against 60).
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.platform import can_pack_bf16

PLANNED_ROWS = 8
# Of the logits of one row, how many a CPU computes again in float32.
REFINED_LOGITS = 16
# Logits searched as one for the largest.
RUN = 64


class PackedWeight(NamedTuple):
    """A linear layer's weight, made ready for `linear`; of shape [N, K] as the plain one.

    data: in oneDNN's own blocked layout when `blocked`, which no torch operator but `linear`'s understands; else plain.
    """

    data: Tensor
    blocked: bool


def pack_linear(weight: Tensor) -> PackedWeight:
    """Make `weight` [N, K] ready for `linear`. A bf16 weight on a CPU that multiplies bf16 natively is copied into
    oneDNN's layout; any other is kept as it is, without a copy.
    """
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and can_pack_bf16():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PLANNED_ROWS)  # noqa: SLF001
        return PackedWeight(packed, blocked=True)
    return PackedWeight(weight, blocked=False)


class _Packed(NamedTuple):
    """oneDNN's products, plain and with an addition. Looked up by name and overload, each call would take longer than
    a small product does."""

    product: torch._ops.OpOverload
    product_and_sum: torch._ops.OpOverload


@functools.cache
def _packed() -> _Packed:
    operator = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
    return _Packed(operator.default, operator.binary)


def linear(
    x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """`x` [.., K] times the transpose of `weight` [N, K], plus `bias` [N] and `residual` [.., N]: like `residual`.

    All share one dtype; products are summed in float32. The result is rounded once, but for a residual of a weight that
    isn't packed on a CPU, or beside a bias. `residual` may be overwritten, and may share memory with what is returned.
    """
    if isinstance(weight, PackedWeight):
        if weight.blocked:
            if residual is None:
                return _packed().product(x, weight.data, bias, "none", [], "")
            return _packed().product_and_sum(x, residual, weight.data, bias, "add")
        weight = weight.data
    if residual is None:
        return functional.linear(x, weight, bias)
    if bias is None and x.is_cuda:
        return residual.addmm_(x, weight.t())
    return functional.linear(x, weight, bias).add_(residual)


def logits(x: Tensor, weight: PackedWeight, table: Tensor) -> Tensor:
    """`x` [n, K] times the transpose of `weight` [N, K], a vocabulary's: float32 [n, N].

    bf16 keeps 8 bits, of logits near 25 multiples of 1/8, so that the two likeliest tokens often tie and the lower id
    would win. CUDA gives the products as they were summed, in float32. The matrix units of a CPU give only bf16: there
    the REFINED_LOGITS largest of each row are computed again, and the others keep their rounding.

    table: the plain weight [N, K] that `weight` was packed from.
    """
    if x.dtype == torch.float32:
        return linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, table.t(), out_dtype=torch.float32)
    rough = linear(x, weight)
    leaders = _leaders(rough, REFINED_LOGITS)
    rough = rough.float()
    rows = functional.embedding(leaders, table).float()
    return rough.scatter_(1, leaders, torch.bmm(rows, x.float().unsqueeze(-1)).squeeze(-1))


def _leaders(values: Tensor, count: int) -> Tensor:
    """Where the `count` largest of each row of `values` [n, N] are, or all of them if there are fewer: int64 [n, c].

    Each of them lies in one of the `count` runs of RUN values with the largest maxima. A search of all of
    49,152 logits takes ten times as long.
    """
    num_rows, size = values.shape
    whole = size // RUN * RUN
    if whole <= count * RUN:
        return values.topk(min(count, size), -1, sorted=False).indices
    maxima = values[:, :whole].view(num_rows, -1, RUN).amax(-1)
    runs = maxima.topk(count, -1, sorted=False).indices
    candidates = (runs.unsqueeze(-1) * RUN + torch.arange(RUN)).flatten(1)
    if whole < size:
        rest = torch.arange(whole, size).expand(num_rows, -1)
        candidates = torch.cat((candidates, rest), -1)
    best = values.gather(1, candidates).topk(count, -1, sorted=False).indices
    return candidates.gather(1, best)
