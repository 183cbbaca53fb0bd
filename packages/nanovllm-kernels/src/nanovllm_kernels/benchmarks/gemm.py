"""Benchmark cases of linear layers with fused norms, activations and residual sums, in bf16 and in block FP8.

The cost is the bytes of a layer's weight. For block FP8 weights and many rows, the cost is operations instead.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from nanovllm_kernels.benchmarks.inputs import random
from nanovllm_kernels.benchmarks.timing import BenchmarkCase
from nanovllm_kernels.elementwise import rms_norm, silu_and_mul
from nanovllm_kernels.gemm import PackedWeight, block_fp8, linear, logits, norm_gate_up, norm_linear, pack_linear, tiles

# A linear layer as a function of (weight, x, residual).
LinearCall = Callable[[PackedWeight, torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True)
class ModelWidths:
    """A model's widths.

    qkv: total size of a token's queries, keys and values.
    queries: total size of a token's queries.
    intermediate: size of an MLP's gate, which equals the size of the up projection.
    """

    name: str
    hidden: int
    qkv: int
    queries: int
    intermediate: int
    vocab: int


# Qwen3-0.6B and Llama 3 8B.
MODEL_WIDTHS = (
    ModelWidths("0.6B", 1024, 4096, 2048, 3072, 151_936),
    ModelWidths("8B", 4096, 6144, 4096, 14336, 128_256),
)


def linear_cases(widths: ModelWidths, num_rows: int) -> Iterator[BenchmarkCase]:
    """Yield cases of the linear layers of a decoder layer, and of the output head, for `num_rows` rows of input.

    If the engine uses a kernel that fuses a norm, gate or residual, a second case ("in pieces") measures separate
    operators.
    """
    norm_weight, eps = random(widths.hidden), 1e-5

    def apply_norm_and_linear(weight: PackedWeight, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(rms_norm(x, norm_weight, eps), weight.data)

    residual_calls: tuple[LinearCall, LinearCall] = (
        lambda weight, x, residual: linear(x, weight, None, residual),
        lambda weight, x, residual: residual.addmm_(x, weight.data.t()),
    )
    # Maps a name to: columns of the output, width of the input, the engine's call, and a call of separate operators.
    cases: dict[str, tuple[int, int, LinearCall, LinearCall]] = {
        "norm + qkv": (
            widths.qkv,
            widths.hidden,
            lambda weight, x, _: norm_linear(x, norm_weight, eps, weight),
            lambda weight, x, _: apply_norm_and_linear(weight, x),
        ),
        "o + residual": (widths.hidden, widths.queries, *residual_calls),
        "norm + gate + up": (
            2 * widths.intermediate,
            widths.hidden,
            lambda weight, x, _: norm_gate_up(x, norm_weight, eps, weight),
            lambda weight, x, _: silu_and_mul(apply_norm_and_linear(weight, x)),
        ),
        "down + residual": (widths.hidden, widths.intermediate, *residual_calls),
        "head": (
            widths.vocab,
            widths.hidden,
            lambda weight, x, _: logits(x, weight, weight.data),
            lambda weight, x, _: torch.mm(x, weight.data.t(), out_dtype=torch.float32),
        ),
    }
    for name, (columns, width, engine_call, separate_call) in cases.items():
        is_split = tiles.is_split_faster(columns, width) and num_rows <= tiles.MAX_SPLIT_ROWS
        is_fused = is_split or tiles.is_few_rows_faster(num_rows, columns, width)
        calls = {"": engine_call, " in pieces": separate_call} if is_fused else {"": engine_call}
        cost = columns * width * 2
        for suffix, call in calls.items():

            def make_call(call: LinearCall = call, columns: int = columns, width: int = width) -> Callable[[], object]:
                weight = pack_linear(random(columns, width))
                x, residual = random(num_rows, width), random(num_rows, columns)
                return lambda: call(weight, x, residual)

            yield BenchmarkCase(f"{widths.name} {name}, {num_rows} rows{suffix}", make_call, cost, "TB/s", cost)


def block_fp8_cases(num_rows: int) -> Iterator[BenchmarkCase]:
    """Yield cases of block FP8 linear layers of an 8B model and of DeepSeek-R1, and of the input's quantisation."""
    for columns, width in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2112, 7168), (7168, 2048)):
        has_few_rows = num_rows <= tiles.MAX_FP8_ROWS
        cost, unit = (columns * width, "TB/s") if has_few_rows else (2 * num_rows * columns * width, "TFLOP/s")

        def make_call(columns: int = columns, width: int = width) -> Callable[[], object]:
            weight = block_fp8.empty_weight(columns, width, block_fp8.GROUP, torch.device("cuda"))
            fp8_weight, scales = block_fp8.quantize_blocks(random(columns, width))
            weight.data.copy_(fp8_weight)
            weight.scales.copy_(scales)
            x = random(num_rows, width)
            return lambda: block_fp8.linear(x, weight)

        yield BenchmarkCase(f"block FP8 {columns} x {width}, {num_rows} rows", make_call, cost, unit, columns * width)

    def make_quantize_call() -> Callable[[], object]:
        x = random(num_rows, 4096)
        return lambda: block_fp8.quantize_groups(x)

    cost = num_rows * 4096 * 3
    yield BenchmarkCase(f"quantize_groups {num_rows} x 4096", make_quantize_call, cost, "GB/s", cost)
