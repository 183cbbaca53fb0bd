"""Linear layers: the weight prepacked where the CPU gains by it; on CUDA what stands before and after it in one kernel.

This room must not know which layer a weight belongs to. For a few rows on CUDA, where a launch and the way of a small
tensor through memory cost as much as the product, norm, product, gate and residual are one Triton kernel behind a
custom operator; `tiles` says when, and has the figures. For more rows the pieces run one after another. torch.compile
sees the pieces whatever the rows, so that one compiled function takes any number; it is for more rows than OWN_ROWS.

Measured on two cores with AMX, bf16, microseconds, plain `F.linear` against the packed product (rows = tokens):

    K -> N           M=1        M=8        M=64       M=512      M=1024
    576 -> 3072      121 / 59   149 / 60   279 / 171  1022 / 863 2021 / 1467
    1536 -> 576      64 / 28    66 / 29    115 / 87   560 / 610  1101 / 1322
    576 -> 49152     2159/1217  2196/1173  3945/2419

For up to 8 rows a kernel of ours (`numba_rows`), with the norm before it and the gate or the residual after it, is
faster still, and its results are float32 sums. One token through all 120 linear layers of SmolLM2-135M with their
norms, gates and residuals, two cores of an AMD EPYC (Zen 5), milliseconds, the least of 48, both in turn: at one row
6.9 by FBGEMM's fp16 product (which was here before it) and 4.9, at four 8.0 by the packed one and 5.6, at eight 8.0 and
7.7; at sixteen it would take twice as long as the packed one.

The packing is told a number of rows to plan for. 8 is within noise of the best of {1, 8, 64, 512} up to 64 rows; at 512
rows and more only 1536 -> 576 preferred another (1: 462 us), and decode at 8 rows would pay for it elsewhere (96 us
against 60).
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.elementwise import rms_norm, silu_and_mul
from nanovllm_kernels.gemm import block_fp8, tiles
from nanovllm_kernels.gemm.block_fp8 import BlockFP8Weight
from nanovllm_kernels.platform import can_pack_bf16, has_few_rows, has_numba

# For more rows on CUDA every product is a library's.
OWN_ROWS = tiles.SPLIT_ROWS
PLANNED_ROWS = 8
# Only small weights (N or K up to this) are kept for few rows beside oneDNN's copy.
FEW_ROWS_MAX_SIZE = 2048
# Of the logits of one row, how many a CPU computes again in float32.
REFINED_LOGITS = 16
# Logits searched as one for the largest.
RUN = 64


class PackedWeight(NamedTuple):
    """A linear layer's weight, made ready for `linear`; of shape [N, K] as the plain one.

    data: in oneDNN's own blocked layout when `blocked`, which no torch operator but `linear`'s understands; else plain.
    few: beside a blocked weight the plain one, for few rows, where that pays. counters: int32 zeros, where a
    kernel may split the weight; every launch leaves them so, and only one at a time may use them.
    """

    data: Tensor
    blocked: bool
    few: Tensor | None = None
    counters: Tensor | None = None


def pack_linear(weight: Tensor) -> PackedWeight:
    """Make `weight` [N, K] ready for `linear`. A bf16 weight on a CPU that multiplies bf16 natively is copied into
    oneDNN's layout, and a small one (N or K up to FEW_ROWS_MAX_SIZE) kept as well. Any other is kept as it is, without
    a copy.
    """
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and can_pack_bf16():
        plain = weight.contiguous()
        packed = torch.ops.mkldnn._reorder_linear_weight(plain, PLANNED_ROWS)  # noqa: SLF001
        keeps = min(weight.shape) <= FEW_ROWS_MAX_SIZE and has_numba()
        return PackedWeight(packed, blocked=True, few=plain if keeps else None)
    counters = None
    if weight.is_cuda and weight.is_contiguous() and weight.element_size() == 2 and tiles.can_split(*weight.shape):
        counters = torch.zeros(tiles.num_counters(weight.shape[0]), dtype=torch.int32, device=weight.device)
    return PackedWeight(weight, blocked=False, counters=counters)


@functools.cache
def _packed_product() -> torch._ops.OpOverload:
    """oneDNN's. Looked up by name and overload, each call would take longer than a small product does."""
    return torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001


def _few_rows_weight(x: Tensor, weight: Tensor | PackedWeight) -> Tensor | None:
    """The plain bf16 weight of a product that a CPU's kernel for few rows takes, None where it doesn't."""
    if x.is_cuda or x.dim() != 2 or torch.compiler.is_compiling() or not has_few_rows(x.shape[0]):
        return None
    if isinstance(weight, PackedWeight):
        weight = weight.data if not weight.blocked else weight.few
    return weight if weight is not None and weight.dtype == torch.bfloat16 and weight.is_contiguous() else None


def _few_rows(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    gated: bool = False,
) -> Tensor:
    """Rows `x` [M, K] on a CPU, normed if there is a weight for it, times the transpose of `weight` [N, K] plus `bias`,
    gated (then N is 2 I and the result [M, I]) or not, plus `residual`; float32, or of the dtype of `residual`.
    """
    from nanovllm_kernels.gemm import numba_rows

    adds = residual is not None and residual.dtype == torch.float32 and residual.is_contiguous()
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    out = residual if adds else torch.empty((x.shape[0], columns))
    norm = None if norm_weight is None else norm_weight.float()
    numba_rows.project_rows(x.float().contiguous(), norm, eps, weight, bias, out, gated=gated, add=adds)
    return out if adds or residual is None else residual.add_(out)


def _linear_on_cpu(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
    if not isinstance(weight, PackedWeight) or not weight.blocked:
        plain = weight.data if isinstance(weight, PackedWeight) else weight
        return functional.linear(x.to(plain.dtype), plain, bias)
    return _packed_product()(x.to(torch.bfloat16), weight.data, bias, "none", [], "")


def linear(
    x: Tensor,
    weight: Tensor | PackedWeight | BlockFP8Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`x` [.., K] times the transpose of `weight` [N, K], plus `bias` [N] and `residual` [.., N].

    All share one dtype, but `residual` may be float32 beside any, and the result has its dtype; products are summed in
    float32 and rounded once, but beside both a residual and a bias. On a CPU `x` may be float32 beside bf16 weights as
    well, and without a residual the result is float32 for few rows and else bf16, as the products give it. `residual`
    may be overwritten, and may share memory with what is returned. By block FP8 weights: see `block_fp8.linear`.
    """
    if isinstance(weight, BlockFP8Weight):
        return block_fp8.linear(x, weight, bias, residual)
    counters = weight.counters if isinstance(weight, PackedWeight) else None
    plain = weight.data if isinstance(weight, PackedWeight) else weight
    if torch.compiler.is_compiling():
        return _linear_formula(x, plain, bias, residual)
    if not x.is_cuda:
        if (few := _few_rows_weight(x, weight)) is not None:
            return _few_rows(x, None, 0.0, few, bias, residual)
        out = _linear_on_cpu(x, weight, bias)
        return out if residual is None else residual.add_(out)
    weight = plain
    if _runs_as_rows(x, weight):
        return _project_rows_op(x, None, 0.0, weight, bias, residual, False, False)
    if counters is not None and x.dim() == 2 and 0 < x.shape[0] <= tiles.SPLIT_ROWS:
        return _project_split_op(x, weight, bias, residual, counters)
    if residual is None:
        return functional.linear(x, weight, bias)
    if bias is None and residual.dtype == x.dtype:
        return residual.addmm_(x, weight.t())
    if bias is None:
        return torch.addmm(residual, x, weight.t(), out_dtype=residual.dtype)
    return functional.linear(x, weight, bias).add_(residual)


def _linear_formula(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """See `linear`: what a compiler is to see of it."""
    out = functional.linear(x, weight, bias)
    if residual is None:
        return out
    # A sum in float32 joins the norm that follows. Any other would be moved into the product, which would then have to
    # begin with a copy of the residual.
    return (out.float() + residual.float()).to(residual.dtype)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | PackedWeight | BlockFP8Weight,
    bias: Tensor | None = None,
) -> Tensor:
    """`linear` of `x` [T, K] after `rms_norm` with `norm_weight` [K], as made by `pack_norm`: [T, N].

    `x` may be float32 beside any weight. In the one kernel the normed rows aren't rounded; as two operators they are.
    """
    if isinstance(weight, BlockFP8Weight):
        return block_fp8.norm_linear(x, norm_weight, eps, weight, bias)
    plain = weight.data if isinstance(weight, PackedWeight) else weight
    if _runs_as_rows(x, plain):
        return _project_rows_op(x, norm_weight, eps, plain, bias, None, False, False)
    if (few := _few_rows_weight(x, weight)) is not None:
        return _few_rows(x, norm_weight, eps, few, bias, None)
    return linear(rms_norm(x, norm_weight, eps, plain.dtype), weight, bias)


def norm_gate_up(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | PackedWeight | BlockFP8Weight,
    bias: Tensor | None = None,
) -> Tensor:
    """The first half of a gated feed-forward layer (SwiGLU, Shazeer 2020) after its norm: [T, K] -> [T, I].

    `silu_and_mul` of `norm_linear`, with a weight [2 I, K] and a bias [2 I]: the gate's rows, then the others. In the
    one kernel only what is returned is rounded.
    """
    if isinstance(weight, BlockFP8Weight):
        return block_fp8.norm_gate_up(x, norm_weight, eps, weight, bias)
    plain = weight.data if isinstance(weight, PackedWeight) else weight
    if _runs_as_rows(x, plain):
        return _project_rows_op(x, norm_weight, eps, plain, bias, None, True, False)
    if (few := _few_rows_weight(x, weight)) is not None:
        return _few_rows(x, norm_weight, eps, few, bias, None, gated=True)
    return silu_and_mul(linear(rms_norm(x, norm_weight, eps, plain.dtype), weight, bias))


def split_float32(weight: Tensor) -> Tensor:
    """bfloat16 [3 N, K], whose thirds add up to `weight`, float32 [N, K]: each has 8 of its 24 bits."""
    thirds: list[Tensor] = []
    for _ in range(3):
        thirds.append(weight.to(torch.bfloat16))
        weight = weight - thirds[-1].float()
    return torch.cat(thirds)


def logits(x: Tensor, weight: PackedWeight, table: Tensor, thirds: Tensor | None = None) -> Tensor:
    """`x` [n, K] times the transpose of `weight` [N, K], a vocabulary's or a router's: float32 [n, N].

    bf16 keeps 8 bits, of logits near 25 multiples of 1/8, so that the two likeliest tokens often tie and the lower id
    would win. CUDA gives the products as they were summed, in float32, and so does a CPU for few rows. Its matrix units
    give only bf16: there the REFINED_LOGITS largest of each row are computed again, and the others keep their rounding.

    table: the plain weight [N, K] that `weight` was packed from. Where it is float32, `x` is taken as float32.
    thirds: of such a table on CUDA `split_float32`, where `x` is bfloat16. Tensor cores take these, not float32; the
        products are as exact, and of the sums some 3e-6 is cut off where float32 rounds.
    """
    if table.dtype == torch.float32:
        if thirds is not None and not _runs_as_rows(x, table):
            return torch.mm(x, thirds.t(), out_dtype=torch.float32).unflatten(1, (3, -1)).sum(1)
        return linear(x.float(), weight)
    if _runs_as_rows(x, table):
        return _project_rows_op(x, None, 0.0, table, None, None, False, True)
    if x.is_cuda:
        return torch.mm(x, table.t(), out_dtype=torch.float32)
    if (few := _few_rows_weight(x, table)) is not None:
        return _few_rows(x, None, 0.0, few, None, None)
    # The search for the largest takes a quarter of the time in float32.
    rough = linear(x, weight).float()
    leaders = _leaders(rough, REFINED_LOGITS)
    rows = functional.embedding(leaders, table).float()
    return rough.scatter_(1, leaders, torch.bmm(rows, x.float().unsqueeze(-1)).squeeze(-1))


def _runs_as_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether the few-row kernel takes this product, and is the faster way."""
    if torch.compiler.is_compiling() or not x.is_cuda or x.dim() != 2:
        return False
    return weight.is_contiguous() and tiles.pays(x.shape[0], *weight.shape)


@torch.library.custom_op("nanovllm::project_rows", mutates_args=())
def _project_rows_op(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    float32_out: bool,
) -> Tensor:
    """Up to 8 rows `x` [M, K], normed if there is a weight for it, times the transpose of a contiguous `weight`
    [N, K] plus `bias`, gated (then N is 2 I and the result [M, I]) or not, plus `residual`; rounded once, to the dtype
    of `residual`, without one to that of `weight`. `x` and `residual` may be float32 beside any weight.
    """
    from nanovllm_kernels.gemm import triton_rows

    out = _empty_rows(x, weight, residual, gated, float32_out)
    rows = x if x.stride(1) == 1 else x.contiguous()
    triton_rows.project_rows(rows, norm_weight, eps, weight, bias, residual, out, gated=gated)
    return out


def _empty_rows(x: Tensor, weight: Tensor, residual: Tensor | None, gated: bool, float32_out: bool) -> Tensor:
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    dtype = torch.float32 if float32_out else weight.dtype if residual is None else residual.dtype
    return x.new_empty((x.shape[0], columns), dtype=dtype)


_project_rows_op.register_fake(
    lambda x, _norm_weight, _eps, weight, _bias, residual, gated, float32_out: _empty_rows(
        x, weight, residual, gated, float32_out
    )
)


@torch.library.custom_op("nanovllm::project_split", mutates_args=())
def _project_split_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, counters: Tensor
) -> Tensor:
    """Up to 256 rows `x` [M, K] times the transpose of a contiguous `weight` [N, K] plus `bias` and `residual`; rounded
    once, to the dtype of `residual`, which may be float32 beside any `x`, without one to that of `x`. For which N and
    K: `tiles.can_split`. `counters` are zeros before and after.
    """
    from nanovllm_kernels.gemm import triton_split

    out = _empty_split(x, weight, residual)
    rows = x if x.stride(1) == 1 else x.contiguous()
    triton_split.project_split(rows, weight, bias, residual, counters, out)
    return out


def _empty_split(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=x.dtype if residual is None else residual.dtype)


_project_split_op.register_fake(lambda x, weight, _bias, residual, _counters: _empty_split(x, weight, residual))


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
