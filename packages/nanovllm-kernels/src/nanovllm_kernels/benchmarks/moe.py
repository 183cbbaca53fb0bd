"""Benchmark cases of mixtures of experts in bf16 and in block FP8. Tokens choose experts uniformly at random."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from nanovllm_kernels import fp8
from nanovllm_kernels.benchmarks.inputs import random
from nanovllm_kernels.benchmarks.timing import BenchmarkCase
from nanovllm_kernels.moe import PackedExperts, Routing, fused_experts, pack_experts, route


@dataclass(frozen=True)
class Mixture:
    """A model's experts.

    hidden: width of the residual stream.
    width: width of an expert.
    has_shared: whether the model has a gated shared expert.
    """

    name: str
    num_experts: int
    top_k: int
    hidden: int
    width: int
    has_shared: bool = False

    @property
    def num_experts_with_shared(self) -> int:
        """Number of experts including the shared expert. Equals the number of logits."""
        return self.num_experts + self.has_shared

    @property
    def routing(self) -> Routing:
        """The model's routing options."""
        return Routing(self.top_k, shared="gated" if self.has_shared else "none")


MIXTURES = (  # The experts of Qwen3-30B-A3B, MiniMax-M2 and Qwen3-Next.
    Mixture("30B-A3B", 128, 8, 2048, 768),
    Mixture("M2", 256, 8, 3072, 1536),
    Mixture("Next", 512, 10, 2048, 512, has_shared=True),
)


def random_experts(mixture: Mixture, *, is_fp8: bool, num_ranks: int) -> PackedExperts:
    """Return the first rank's experts, with normally distributed bf16 weights or random FP8 weights without NaN."""
    num_own_experts, num_experts_with_shared = (
        mixture.num_experts_with_shared // num_ranks,
        mixture.num_experts_with_shared,
    )
    shapes = ((num_own_experts, 2 * mixture.width, mixture.hidden), (num_own_experts, mixture.hidden, mixture.width))
    if not is_fp8:
        return pack_experts(*(random(*shape) for shape in shapes), num_all_experts=num_experts_with_shared)
    weights = (torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8).bitwise_and_(0xBF) for shape in shapes)
    width_blocks, hidden_blocks = -(-mixture.width // 128), -(-mixture.hidden // 128)
    gate_up_scales = torch.rand(num_own_experts, 2, width_blocks, hidden_blocks, device="cuda")
    down_scales = torch.rand(num_own_experts, hidden_blocks, width_blocks, device="cuda")
    fp8_weights = (weight.view(fp8.DTYPE) for weight in weights)
    return pack_experts(*fp8_weights, gate_up_scales, down_scales, num_all_experts=num_experts_with_shared)


def experts_case(mixture: Mixture, num_tokens: int, *, is_fp8: bool, num_ranks: int = 1) -> BenchmarkCase:
    """Make a case of experts. The cost is the bytes of the chosen experts, or operations for more than 1024 tokens.

    num_ranks: number of ranks that share the experts evenly. The case runs the first rank.
    """
    matrix_elements = mixture.hidden * mixture.width

    def make_call() -> Callable[[], object]:
        packed = random_experts(mixture, is_fp8=is_fp8, num_ranks=num_ranks)
        x, residual = random(num_tokens, mixture.hidden), random(num_tokens, mixture.hidden)
        logits = torch.randn(num_tokens, mixture.num_experts_with_shared, device="cuda")
        routed = route(logits, mixture.routing)
        return lambda: fused_experts(x, packed, routed, residual)

    # Expected number of experts that at least one token chooses.
    num_used = mixture.num_experts * (1 - (1 - mixture.top_k / mixture.num_experts) ** num_tokens) + mixture.has_shared
    used_bytes = 3 * num_used * matrix_elements * (1 if is_fp8 else 2) / num_ranks
    weight_bytes = 3 * (mixture.num_experts_with_shared // num_ranks) * matrix_elements * (1 if is_fp8 else 2)
    operations = 6 * num_tokens * (mixture.top_k + mixture.has_shared) * matrix_elements / num_ranks
    cost, unit = (operations, "TFLOP/s") if num_tokens > 1024 else (used_bytes, "TB/s")
    name = f"{'FP8 ' if is_fp8 else ''}experts {mixture.name}, {num_tokens} tokens"
    if num_ranks > 1:
        name += f", 1 of {num_ranks} ranks"
    return BenchmarkCase(name, make_call, cost, unit, weight_bytes)


def routing_case(mixture: Mixture, num_tokens: int) -> BenchmarkCase:
    """Make a case of the kernel that chooses experts. The cost is the bytes of the logits."""

    def make_call() -> Callable[[], object]:
        logits = torch.randn(num_tokens, mixture.num_experts_with_shared, device="cuda")
        bias = torch.randn(mixture.num_experts, device="cuda")
        return lambda: route(logits, replace(mixture.routing, scoring="sigmoid"), bias)

    cost = 4 * num_tokens * mixture.num_experts_with_shared
    return BenchmarkCase(f"route {mixture.name}, {num_tokens} tokens", make_call, cost, "GB/s", cost)


def mixture_cases() -> Iterator[BenchmarkCase]:
    """Yield cases of mixtures of experts, from one token to many."""
    for mixture in MIXTURES:
        for num_tokens in (1, 4, 16, 64, 256, 1024, 8192):
            yield routing_case(mixture, num_tokens)
            yield experts_case(mixture, num_tokens, is_fp8=False)
            yield experts_case(mixture, num_tokens, is_fp8=True)
    for num_ranks in (2, 8):
        for num_tokens in (1, 4, 64, 1024, 8192):
            yield experts_case(MIXTURES[1], num_tokens, is_fp8=True, num_ranks=num_ranks)
    # The widths of DeepSeek-V3's experts, with about 32 tokens per expert.
    yield experts_case(Mixture("of 16", 16, 1, 7168, 2048), 512, is_fp8=True)
