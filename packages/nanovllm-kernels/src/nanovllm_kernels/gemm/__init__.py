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

For up to 8 rows, and for any number on a CPU without matrix units for bf16, products run in float32 from bf16 weights
in panels (`numba_panels`), with the norm before them and the gate or the residual after them in one kernel.

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
from nanovllm_kernels.platform import can_pack_bf16, has_numba, runs_in_float32

# For more rows on CUDA every product is a library's.
OWN_ROWS = tiles.SPLIT_ROWS
PLANNED_ROWS = 8
# Only small weights (N or K up to this) are packed in panels, for few rows, beside oneDNN's copy.
FEW_ROWS_MAX_SIZE = 2048
# Of the logits of one row, how many a CPU computes again in float32.
REFINED_LOGITS = 16
# Logits searched as one for the largest.
RUN = 64


class Panels(NamedTuple):
    """A bf16 weight [N, K] as `numba_panels` reads it."""

    data: Tensor
    num_columns: int


class PackedWeight(NamedTuple):
    """A linear layer's weight, made ready for `linear`.

    data: plain [N, K]; or in oneDNN's own blocked layout when `blocked`; or panels, when there are panels and it isn't
    blocked. Only this module understands the latter two.
    panels: for products in float32: of few rows beside a blocked weight, else of any number of rows.
    counters: int32 zeros, where a kernel may split the weight; every launch leaves them so, and only one at a time may
    use them.
    """

    data: Tensor
    blocked: bool
    panels: Panels | None = None
    counters: Tensor | None = None


def pack_linear(weight: Tensor) -> PackedWeight:
    """Make `weight` [N, K] ready for `linear`.

    On a CPU a bf16 weight is copied: where bf16 is multiplied natively into oneDNN's layout, and a small one (N or K up
    to FEW_ROWS_MAX_SIZE) into panels as well; elsewhere into panels alone. Any other weight is kept, without a copy.
    """
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu":
        is_blocked = can_pack_bf16()
        panels = None
        if has_numba() and (not is_blocked or min(weight.shape) <= FEW_ROWS_MAX_SIZE):
            from nanovllm_kernels.gemm import numba_panels

            panels = Panels(numba_panels.pack_panels(weight), weight.shape[0])
        if is_blocked:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PLANNED_ROWS)  # noqa: SLF001
            return PackedWeight(packed, blocked=True, panels=panels)
        if panels is not None:
            return PackedWeight(panels.data, blocked=False, panels=panels)
    counters = None
    if weight.is_cuda and weight.is_contiguous() and weight.element_size() == 2 and tiles.can_split(*weight.shape):
        counters = torch.zeros(tiles.num_counters(weight.shape[0]), dtype=torch.int32, device=weight.device)
    return PackedWeight(weight, blocked=False, counters=counters)


@functools.cache
def _packed_product() -> torch._ops.OpOverload:
    """oneDNN's. Looked up by name and overload, each call would take longer than a small product does."""
    return torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001


def _panels_for(x: Tensor, weight: Tensor | PackedWeight) -> Panels | None:
    """The panels that rows `x` [M, K] are to be multiplied by, None where another product takes them."""
    if not isinstance(weight, PackedWeight) or weight.panels is None:
        return None
    if weight.blocked and (x.dim() != 2 or not runs_in_float32(x.shape[0])):
        return None
    return weight.panels


def _project_panels(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    panels: Panels,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    gated: bool = False,
) -> Tensor:
    """Rows `x` [.., K] on a CPU, normed if there is a weight for it, times the transpose of a weight [N, K] plus
    `bias`, gated (then N is 2 I and the result [.., I]) or not, plus `residual`.

    The result is float32, or of the dtype of `residual`.
    """
    from nanovllm_kernels.gemm import numba_panels

    if gated and not numba_panels.can_gate(panels.num_columns):
        return silu_and_mul(_project_panels(x, norm_weight, eps, panels, bias, None))
    adds = residual is not None and residual.dtype == torch.float32 and residual.is_contiguous()
    columns = panels.num_columns // 2 if gated else panels.num_columns
    out = residual if adds else torch.empty((*x.shape[:-1], columns))
    norm = None if norm_weight is None else norm_weight.float()
    rows, results = x.float().contiguous().view(-1, x.shape[-1]), out.view(-1, columns)
    if len(rows):
        numba_panels.project_rows(rows, norm, eps, panels.data, bias, results, gated=gated, add=adds)
    return out if adds or residual is None else residual.add_(out)


def _linear_on_cpu(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, PackedWeight) and weight.blocked:
        return _packed_product()(x.to(torch.bfloat16), weight.data, bias, "none", [], "")
    plain = weight.data if isinstance(weight, PackedWeight) else weight
    if plain.dtype == torch.bfloat16 and not can_pack_bf16():
        # torch would emulate bf16 number by number.
        return functional.linear(x.float(), plain.float(), None if bias is None else bias.float()).to(x.dtype)
    return functional.linear(x.to(plain.dtype), plain, bias)


def linear(
    x: Tensor,
    weight: Tensor | PackedWeight | BlockFP8Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`x` [.., K] times the transpose of `weight` [N, K], plus `bias` [N] and `residual` [.., N].

    All share one dtype, but `residual` may be float32 beside any, and the result has its dtype; products are summed in
    float32 and rounded once, but beside both a residual and a bias. On a CPU `x` may be float32 beside bf16 weights as
    well, and without a residual the result is float32 where products run in float32, else bf16. `residual`
    may be overwritten, and may share memory with what is returned. By block FP8 weights: see `block_fp8.linear`.
    """
    if isinstance(weight, BlockFP8Weight):
        return block_fp8.linear(x, weight, bias, residual)
    counters = weight.counters if isinstance(weight, PackedWeight) else None
    plain = weight.data if isinstance(weight, PackedWeight) else weight
    if torch.compiler.is_compiling():
        return _linear_formula(x, plain, bias, residual)
    if not x.is_cuda:
        if (panels := _panels_for(x, weight)) is not None:
            return _project_panels(x, None, 0.0, panels, bias, residual)
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
    if (panels := _panels_for(x, weight)) is not None:
        return _project_panels(x, norm_weight, eps, panels, bias, None)
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
    if (panels := _panels_for(x, weight)) is not None:
        return _project_panels(x, norm_weight, eps, panels, bias, None, gated=True)
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
    would win. CUDA gives the products as they were summed, in float32, and so do a CPU's products in float32. Its
    matrix units give only bf16: there the REFINED_LOGITS largest of each row are computed again, and the others keep
    their rounding.

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
    if (panels := _panels_for(x, weight)) is not None:
        return _project_panels(x, None, 0.0, panels, None, None)
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
