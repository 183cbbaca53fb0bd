"""Computes linear layers. A norm before the product, and a gate or residual after the product, are optional.

On CUDA, a layer with at most MAX_TRITON_KERNEL_ROWS rows may be one launch of a Triton kernel. Code under torch.compile
never uses this kernel: compile a model only for more rows. On a CPU, `numba_panels` computes few rows in float32, and
oneDNN computes more rows in bf16.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.elementwise import rms_norm, silu_and_mul
from nanovllm_kernels.gemm import block_fp8, tiles
from nanovllm_kernels.gemm.block_fp8_weight import BlockFP8Weight
from nanovllm_kernels.platform import computes_rows_in_float32, has_numba, prefers_packed_bf16

# Maximum number of rows for Triton kernels on CUDA. More rows use cuBLAS, unless the weight is block FP8.
MAX_TRITON_KERNEL_ROWS = tiles.MAX_SPLIT_ROWS
# Number of rows for which oneDNN chooses a weight's layout.
ONEDNN_PLANNED_ROWS = 8
# Maximum number of padding rows that `round_up_rows` adds for oneDNN. One less than a power of two.
MAX_PADDING_ROWS = 31
# A weight [N, K] that oneDNN has packed is also packed in `Panels` if N or K is at most this number.
MAX_SMALLER_DIM_OF_PANELS = 2048
# Number of largest logits per row that a CPU computes again in float32.
NUM_REFINED_LOGITS = 16
# Number of neighbouring logits in a run. The search for the largest logits compares the maxima of runs first.
LOGITS_PER_RUN = 64


class Panels(NamedTuple):
    """A bf16 weight [N, K] in the layout of `numba_panels`. num_columns: N."""

    data: Tensor
    num_columns: int


class PackedWeight(NamedTuple):
    """A linear layer's weight, prepared for `linear`.

    data: the weight [N, K], or `panels.data` if the panels are the only copy.
    in_onednn_layout: whether `data` is in oneDNN's layout. If True, panels are used for few rows only.
    panels: the weight for products by `numba_panels`. None: all products use `data`.
    counters: int32, one counter per output tile of a launch that splits K among CTAs. All are 0 between launches.
        Concurrent launches must not share counters. None: launches do not split K.
    """

    data: Tensor
    in_onednn_layout: bool
    panels: Panels | None = None
    counters: Tensor | None = None


def pack_linear(weight: Tensor) -> PackedWeight:
    """Prepare `weight` [N, K] for `linear`. The weight is copied only if it is bf16 on a CPU."""
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu":
        in_onednn_layout = prefers_packed_bf16()
        panels = None
        if has_numba() and (not in_onednn_layout or min(weight.shape) <= MAX_SMALLER_DIM_OF_PANELS):
            from nanovllm_kernels.gemm import numba_panels

            panels = Panels(numba_panels.pack_panels(weight), weight.shape[0])
        if in_onednn_layout:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ONEDNN_PLANNED_ROWS)  # noqa: SLF001
            return PackedWeight(packed, in_onednn_layout=True, panels=panels)
        if panels is not None:
            return PackedWeight(panels.data, in_onednn_layout=False, panels=panels)
    counters = None
    if (
        weight.is_cuda
        and weight.is_contiguous()
        and weight.element_size() == 2
        and tiles.is_split_faster(*weight.shape)
    ):
        counters = torch.zeros(tiles.num_split_counters(weight.shape[0]), dtype=torch.int32, device=weight.device)
    return PackedWeight(weight, in_onednn_layout=False, counters=counters)


@functools.cache
def _find_onednn_operator() -> torch._ops.OpOverload:
    """Return oneDNN's operator for linear layers. The cache saves a lookup, which is slower than a small product."""
    return torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001


def _choose_panels(x: Tensor, weight: Tensor | PackedWeight) -> Panels | None:
    """Return the weight's panels if `_project_panels` should multiply `x` [.., K] by the weight, else None."""
    if not isinstance(weight, PackedWeight) or weight.panels is None:
        return None
    if weight.in_onednn_layout and (x.dim() != 2 or not computes_rows_in_float32(x.shape[0])):
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
    """Multiply `x` [.., K] by a weight [N, K] in panels, with the optional operations of `numba_panels.project_rows`.

    Returns: [.., N], or [.., N / 2] if gated, in the dtype of `residual`, or float32 without a residual.
    """
    from nanovllm_kernels.gemm import numba_panels

    if gated and not numba_panels.can_gate(panels.num_columns):
        return silu_and_mul(_project_panels(x, norm_weight, eps, panels, bias, None))
    adds_in_place = residual is not None and residual.dtype == torch.float32 and residual.is_contiguous()
    num_columns = panels.num_columns // 2 if gated else panels.num_columns
    out = residual if adds_in_place else x.new_empty((*x.shape[:-1], num_columns), dtype=torch.float32)
    norm = None if norm_weight is None else norm_weight.float()
    rows, results = x.float().contiguous().view(-1, x.shape[-1]), out.view(-1, num_columns)
    if len(rows):
        numba_panels.project_rows(rows, norm, eps, panels.data, bias, results, gated=gated, adds_to_out=adds_in_place)
    return out if adds_in_place or residual is None else residual.add_(out)


def round_up_rows(num_rows: int) -> int:
    """Round up the number of rows for a product in oneDNN. Adds at most min(num_rows / 8, MAX_PADDING_ROWS) rows.

    oneDNN compiles and caches one kernel per number of rows, which takes 3 to 6 ms and about 1 MB. The cache holds
    1,024 kernels. Rounding limits the number of kernels.
    """
    step = min(1 << max(0, num_rows.bit_length() - 4), MAX_PADDING_ROWS + 1)
    return -(-num_rows // step) * step


def _multiply_in_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x` [.., K] times the transpose of `weight` [N, K] in oneDNN's layout, plus `bias`: bf16 [.., N]."""
    rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    num_rows = len(rows)
    if num_padding_rows := round_up_rows(num_rows) - num_rows:
        rows = functional.pad(rows, (0, 0, 0, num_padding_rows))
    results = _find_onednn_operator()(rows, weight, bias, "none", [], "")[:num_rows]
    return results.view(*x.shape[:-1], results.shape[-1])


def _linear_on_cpu(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, PackedWeight) and weight.in_onednn_layout:
        return _multiply_in_onednn(x, weight.data, bias)
    matrix = weight.data if isinstance(weight, PackedWeight) else weight
    if matrix.dtype == torch.bfloat16 and not prefers_packed_bf16():
        # torch would emulate bf16 element by element.
        return functional.linear(x.float(), matrix.float(), None if bias is None else bias.float()).to(x.dtype)
    return functional.linear(x.to(matrix.dtype), matrix, bias)


def linear(
    x: Tensor,
    weight: Tensor | PackedWeight | BlockFP8Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return `x` [.., K] times the transpose of `weight` [N, K], plus `bias` [N] and `residual` [.., N].

    All tensors have one dtype, but `residual` may be float32, and on a CPU `x` may be float32 with bf16 weights.
    residual: may be overwritten, and may share memory with the result.
    Returns: [.., N] in the dtype of `residual`, or of `x` without a residual. For bf16 weights on a CPU without a
        residual: float32 from `numba_panels`, bf16 from oneDNN. A bias with a residual may cause a second rounding.
    """
    if isinstance(weight, BlockFP8Weight):
        return block_fp8.linear(x, weight, bias, residual)
    counters = weight.counters if isinstance(weight, PackedWeight) else None
    matrix = weight.data if isinstance(weight, PackedWeight) else weight
    if torch.compiler.is_compiling():
        return _compute_fusible_linear(x, matrix, bias, residual)
    if not x.is_cuda:
        if (panels := _choose_panels(x, weight)) is not None:
            return _project_panels(x, None, 0.0, panels, bias, residual)
        out = _linear_on_cpu(x, weight, bias)
        return out if residual is None else residual.add_(out)
    weight = matrix
    if _prefers_few_rows_kernel(x, weight):
        return _project_few_rows_op(x, None, 0.0, weight, bias, residual, False, False)
    if counters is not None and x.dim() == 2 and 0 < x.shape[0] <= tiles.MAX_SPLIT_ROWS:
        return _project_split_k_op(x, weight, bias, residual, counters)
    if residual is None:
        return functional.linear(x, weight, bias)
    if bias is not None or x.dim() != 2:
        return residual.add_(functional.linear(x, weight, bias))
    if residual.dtype == x.dtype:
        return residual.addmm_(x, weight.t())
    return torch.addmm(residual, x, weight.t(), out_dtype=residual.dtype)


def _compute_fusible_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Compute `linear` with operators that torch.compile can fuse."""
    out = functional.linear(x, weight, bias)
    if residual is None:
        return out
    # The compiler fuses a float32 sum with the following norm. A sum in another dtype would copy the residual.
    return (out.float() + residual.float()).to(residual.dtype)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | PackedWeight | BlockFP8Weight,
    bias: Tensor | None = None,
) -> Tensor:
    """Return `linear` of `rms_norm(x)`: [T, K] -> [T, N]. For few rows, the normalized rows are not rounded.

    x: float32, or the weight's dtype. norm_weight: [K], prepared by `elementwise.prepare_norm_weight`.
    """
    if isinstance(weight, BlockFP8Weight):
        return block_fp8.norm_linear(x, norm_weight, eps, weight, bias)
    matrix = weight.data if isinstance(weight, PackedWeight) else weight
    if _prefers_few_rows_kernel(x, matrix):
        return _project_few_rows_op(x, norm_weight, eps, matrix, bias, None, False, False)
    if (panels := _choose_panels(x, weight)) is not None:
        return _project_panels(x, norm_weight, eps, panels, bias, None)
    return linear(rms_norm(x, norm_weight, eps, matrix.dtype), weight, bias)


def norm_gate_up(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | PackedWeight | BlockFP8Weight,
    bias: Tensor | None = None,
) -> Tensor:
    """Return `silu_and_mul` of `norm_linear`, the first half of SwiGLU (Shazeer 2020): [T, K] -> [T, I].

    weight: [2 I, K]. The rows of the gate projection come before the rows of the up projection. bias: [2 I].
    """
    if isinstance(weight, BlockFP8Weight):
        return block_fp8.norm_gate_up(x, norm_weight, eps, weight, bias)
    matrix = weight.data if isinstance(weight, PackedWeight) else weight
    if _prefers_few_rows_kernel(x, matrix):
        return _project_few_rows_op(x, norm_weight, eps, matrix, bias, None, True, False)
    if (panels := _choose_panels(x, weight)) is not None:
        return _project_panels(x, norm_weight, eps, panels, bias, None, gated=True)
    return silu_and_mul(linear(rms_norm(x, norm_weight, eps, matrix.dtype), weight, bias))


def split_float32(weight: Tensor) -> Tensor:
    """Split float32 [N, K] into three bfloat16 matrices whose sum is `weight`: [3 N, K]."""
    bf16_parts: list[Tensor] = []
    for _ in range(3):
        bf16_parts.append(weight.to(torch.bfloat16))
        weight = weight - bf16_parts[-1].float()
    return torch.cat(bf16_parts)


def logits(x: Tensor, weight: PackedWeight, table: Tensor, bf16_parts: Tensor | None = None) -> Tensor:
    """Return the logits of a vocabulary or a router: `x` [n, K] times the transpose of `weight` [N, K], float32 [n, N].

    Logits rounded to bf16 would often be equal: near 25, bf16 numbers are 1/8 apart. oneDNN returns bf16, so each
    row's NUM_REFINED_LOGITS largest logits are computed again in float32.

    table: the unpacked weight [N, K]. If the table is float32, `x` is converted to float32.
    bf16_parts: `split_float32(table)`, for products on tensor cores. The relative error is about 3e-6. None: unused.
    """
    if table.dtype == torch.float32:
        if bf16_parts is not None and not _prefers_few_rows_kernel(x, table):
            return torch.mm(x, bf16_parts.t(), out_dtype=torch.float32).unflatten(1, (3, -1)).sum(1)
        return linear(x.float(), weight)
    if _prefers_few_rows_kernel(x, table):
        return _project_few_rows_op(x, None, 0.0, table, None, None, False, True)
    if x.is_cuda:
        return torch.mm(x, table.t(), out_dtype=torch.float32)
    if (panels := _choose_panels(x, weight)) is not None:
        return _project_panels(x, None, 0.0, panels, None, None)
    # A search for the largest logits is four times as fast in float32 as in bf16.
    bf16_logits = linear(x, weight).float()
    largest_ids = _find_largest(bf16_logits, NUM_REFINED_LOGITS)
    rows = functional.embedding(largest_ids, table).float()
    return bf16_logits.scatter_(1, largest_ids, torch.bmm(rows, x.float().unsqueeze(-1)).squeeze(-1))


def _prefers_few_rows_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel in `triton_few_rows` supports this product, and is faster than cuBLAS."""
    if torch.compiler.is_compiling() or not x.is_cuda or x.dim() != 2:
        return False
    return weight.is_contiguous() and tiles.is_few_rows_faster(x.shape[0], *weight.shape)


@torch.library.custom_op("nanovllm::project_few_rows", mutates_args=())
def _project_few_rows_op(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    float32_out: bool,
) -> Tensor:
    """Multiply at most 8 rows `x` [M, K] by contiguous `weight` [N, K]. Norm, bias, gate and residual are optional.

    Rounds once: to float32 if `float32_out`, else to the dtype of `residual`, or of `weight` without a residual.
    `x` and `residual` may be float32 with any weight.
    """
    from nanovllm_kernels.gemm import triton_few_rows

    out = _empty_few_rows_out(x, weight, residual, gated, float32_out)
    rows = x if x.stride(1) == 1 else x.contiguous()
    triton_few_rows.project_few_rows(rows, norm_weight, eps, weight, bias, residual, out, gated=gated)
    return out


def _empty_few_rows_out(x: Tensor, weight: Tensor, residual: Tensor | None, gated: bool, float32_out: bool) -> Tensor:
    num_columns = weight.shape[0] // 2 if gated else weight.shape[0]
    dtype = torch.float32 if float32_out else weight.dtype if residual is None else residual.dtype
    return x.new_empty((x.shape[0], num_columns), dtype=dtype)


_project_few_rows_op.register_fake(
    lambda x, _norm_weight, _eps, weight, _bias, residual, gated, float32_out: _empty_few_rows_out(
        x, weight, residual, gated, float32_out
    )
)


@torch.library.custom_op("nanovllm::project_split_k", mutates_args=())
def _project_split_k_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, counters: Tensor
) -> Tensor:
    """Multiply up to 256 rows `x` [M, K] by a contiguous `weight` [N, K] that `tiles.is_split_faster` accepts.

    Adds `bias` and `residual`, and rounds once: to the dtype of `residual`, or of `x` without a residual.
    """
    from nanovllm_kernels.gemm import triton_split_k

    out = _empty_split_k_out(x, weight, residual)
    rows = x if x.stride(1) == 1 else x.contiguous()
    triton_split_k.project_split_k(rows, weight, bias, residual, counters, out)
    return out


def _empty_split_k_out(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=x.dtype if residual is None else residual.dtype)


_project_split_k_op.register_fake(lambda x, weight, _bias, residual, _counters: _empty_split_k_out(x, weight, residual))


def _find_largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest values of each row of `values` [n, N]: int64 [n, min(count, N)]."""
    # The `count` runs with the largest maxima hold the largest values of all runs.
    num_rows, size = values.shape
    end_of_whole_runs = size // LOGITS_PER_RUN * LOGITS_PER_RUN
    if end_of_whole_runs <= count * LOGITS_PER_RUN:
        return values.topk(min(count, size), -1, sorted=False).indices
    run_maxima = values[:, :end_of_whole_runs].view(num_rows, -1, LOGITS_PER_RUN).amax(-1)
    runs = run_maxima.topk(count, -1, sorted=False).indices
    columns = torch.arange(size, device=values.device)
    candidates = (runs.unsqueeze(-1) * LOGITS_PER_RUN + columns[:LOGITS_PER_RUN]).flatten(1)
    if end_of_whole_runs < size:
        candidates = torch.cat((candidates, columns[end_of_whole_runs:].expand(num_rows, -1)), -1)
    largest_candidates = values.gather(1, candidates).topk(count, -1, sorted=False).indices
    return candidates.gather(1, largest_candidates)
