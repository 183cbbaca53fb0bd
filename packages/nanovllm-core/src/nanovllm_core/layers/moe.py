"""Mixtures of experts (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538): a router, all experts in two tensors.

Experts are split over ranks by their width. An expert that every token goes to lies behind the others where
`runs_among` says so; any other is a family's business. This room must not know how experts are chosen, only what is
asked of each.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.quantization import BlockFP8, quantization_of, randomize_blocks
from nanovllm_core.layers.weights import Slot, WeightedModule, fill_normal
from nanovllm_core.model import BuildContext
from nanovllm_kernels.fp8 import DTYPE
from nanovllm_kernels.gemm import PackedWeight, linear, logits, split_float32
from nanovllm_kernels.gemm.block_fp8 import GROUP, BlockFP8Weight
from nanovllm_kernels.moe import Routing, fused_experts, pack_experts, route

__all__ = [
    "STANDARD_NAMES",
    "ExpertNames",
    "Experts",
    "Router",
    "Routing",
    "SharedExpert",
    "SparseMLP",
    "TokenGate",
    "runs_among",
]

# Of wider ones weights take so long that launches don't matter, and one more doesn't come for free: for one token an
# H200 takes 102 us for eight experts of DeepSeek-R1, 2048 wide, and 151 for nine. With one of 512 among the others a
# step of Qwen3-Next takes 3.0 ms rather than 4.0.
NARROW = 1024
# So that each token's logits begin at a multiple of 16 bytes, which cuBLAS's fastest kernels ask for.
COLUMN_STEP = 8


class ExpertNames(NamedTuple):
    """What a checkpoint calls the three linears of an expert."""

    gate: str
    up: str
    down: str

    def quantization_of(self, quantization: BlockFP8 | None, prefix: str) -> BlockFP8 | None:
        """How the experts of the module `prefix` are quantised, if at all: as the first of them is.

        Raises ValueError when some of its linears are and others aren't.
        """
        return quantization_of(quantization, f"{prefix}.0", *self)


STANDARD_NAMES = ExpertNames("gate_proj", "up_proj", "down_proj")


class SharedExpert(NamedTuple):
    """An expert that every token goes to: what checkpoints call it, and its gate, beside the router and the experts.

    gate: None where it has the weight 1.
    """

    name: str
    gate: str | None = None


def runs_among(width: int, shared_width: int, build: BuildContext, *, alike: bool) -> bool:
    """Whether a shared expert is run as one of the others: as wide as they are, stored `alike`, and narrow."""
    return alike and shared_width == width and width // build.parallel.size <= NARROW


class Router(WeightedModule):
    """Says which experts a token goes to: [T, hidden_size] -> weights float32 [T, k], ids int32 [T, k].

    The same on every rank. routing: of those that are chosen. shared: one that every token goes to besides; then it is
    k + 1 experts, and its gate a row more of the one product. correction_bias: where the checkpoint has one, its name
    beside this module, that is, "gate.name" for a tensor within a module "gate" and "name" for one next to it.
    in_float32: the checkpoint keeps the weight in float32 whatever the model's dtype.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        routing: Routing,
        build: BuildContext,
        *,
        shared: SharedExpert | None = None,
        correction_bias: str | None = None,
        in_float32: bool = False,
    ):
        super().__init__(build)
        self._gate_name = None if shared is None else shared.gate
        if shared is not None:
            routing = replace(routing, shared="always" if shared.gate is None else "gated")
        self._routing = routing
        self._bias_name = correction_bias
        # So few numbers decide so much that a CPU, whose bf16 products are rounded, keeps them in float32 anyway.
        dtype = torch.float32 if in_float32 or build.device.type == "cpu" else build.dtype
        self._num_logits = num_experts + (self._gate_name is not None)
        num_rows = num_experts if self._gate_name is None else -(-self._num_logits // COLUMN_STEP) * COLUMN_STEP
        self._rows = torch.zeros((num_rows, hidden_size), dtype=dtype, device=build.device)
        self.weight, self.shared_gate = self._rows[:num_experts], self._rows[num_experts : self._num_logits]
        self.bias = None if correction_bias is None else torch.zeros(num_experts, device=build.device)
        self._packed = PackedWeight(self._rows, blocked=False)
        self._thirds: Tensor | None = None

    def finish(self) -> None:
        """Split a float32 weight where rows are bfloat16 and tensor cores want both so."""
        if self._rows.dtype == torch.float32 and self._rows.is_cuda and self.dtype == torch.bfloat16:
            self._thirds = split_float32(self._rows)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden_size] -> weights and ids, each [T, k], or [T, k + 1] with a shared expert."""
        scores = logits(x, self._packed, self._rows, self._thirds)[:, : self._num_logits]
        return route(scores, self._routing, self.bias)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """The weight, and the shared expert's gate and the bias if there are any, whole on every rank."""
        prefix = name[: name.rfind(".") + 1]
        yield f"{name}.weight", Slot(tuple(self.weight.shape), self.weight.copy_)
        if self._gate_name is not None:
            yield f"{prefix}{self._gate_name}.weight", Slot(tuple(self.shared_gate.shape), self.shared_gate.copy_)
        if self.bias is not None:
            yield f"{prefix}{self._bias_name}", Slot(tuple(self.bias.shape), self.bias.copy_)

    def randomize(self, generator: torch.Generator) -> None:
        """Normal weights; the bias is 0."""
        fill_normal(self._rows, generator)


class Experts(WeightedModule):
    """Gated feed-forward layers, of which each token goes through a few: [T, hidden_size] -> [T, hidden_size].

    Each rank has an even share of every expert's width. The checkpoint has three linears an expert, each copied
    straight to its place. shared: one that every token goes to, the last. quantization: how their weights are stored,
    if not in the model's dtype.
    Raises ValueError when the ranks can't share the width evenly, or a quantised weight's blocks.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        build: BuildContext,
        names: ExpertNames = STANDARD_NAMES,
        *,
        shared: SharedExpert | None = None,
        quantization: BlockFP8 | None = None,
    ):
        super().__init__(build)
        self._parallel = build.parallel
        self._names = names
        self._shared = shared
        num_experts += shared is not None
        self._shape = (intermediate_size, hidden_size)
        self._share = build.parallel.share(intermediate_size, "the width of an expert")
        if quantization is not None and build.parallel.size > 1 and self._share % GROUP:
            ranks = build.parallel.size
            raise ValueError(
                f"an expert is {intermediate_size} wide, whose FP8 blocks of {GROUP} {ranks} ranks can't split"
            )
        dtype = build.dtype if quantization is None else DTYPE
        w13 = torch.empty((num_experts, 2 * self._share, hidden_size), dtype=dtype, device=build.device)
        w2 = torch.empty((num_experts, hidden_size, self._share), dtype=dtype, device=build.device)
        scales13 = scales2 = None
        if quantization is not None:
            width, depth = _num_groups(self._share), _num_groups(hidden_size)
            scales13 = torch.empty((num_experts, 2, width, depth), dtype=torch.float32, device=build.device)
            scales2 = torch.empty((num_experts, depth, width), dtype=torch.float32, device=build.device)
        self.weights = pack_experts(w13, w2, scales13, scales2)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None = None) -> Tensor:
        """The experts `ids` of x, weighted and summed, plus `residual` [T, hidden_size], which may be overwritten.

        weights, ids: as the router gives them.
        """
        # A residual that every rank holds is added on one only, since the ranks' results are summed.
        mine = residual if self._parallel.rank == 0 else None
        part = fused_experts(x, self.weights, weights, ids, mine)
        return self._parallel.all_reduce(part if residual is None else part.to(residual.dtype))

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """Three weights an expert, each with its scales if it is quantised."""
        w13, w2, scales13, scales2, _ = self.weights
        halves = w13.unflatten(1, (2, -1))
        width, hidden_size = self._shape
        rows, columns = (width, hidden_size), (hidden_size, width)
        modules = [f"{name}.{expert}" for expert in range(w2.shape[0])]
        if self._shared is not None:
            modules[-1] = f"{name[: name.rfind('.') + 1]}{self._shared.name}"
        for expert, module in enumerate(modules):
            gate, up, down = (f"{module}.{part}.weight" for part in self._names)
            yield gate, self._slot(rows, halves, (expert, 0), 0)
            yield up, self._slot(rows, halves, (expert, 1), 0)
            yield down, self._slot(columns, w2, (expert,), 1)
            if scales13 is not None and scales2 is not None:
                row_blocks, column_blocks = _blocks(rows), _blocks(columns)
                yield f"{gate}_scale_inv", self._slot(row_blocks, scales13, (expert, 0), 0)
                yield f"{up}_scale_inv", self._slot(row_blocks, scales13, (expert, 1), 0)
                yield f"{down}_scale_inv", self._slot(column_blocks, scales2, (expert,), 1)

    def _slot(self, shape: tuple[int, int], target: Tensor, index: tuple[int, ...], dim: int) -> Slot:
        """For a tensor of `shape`, of which this rank's share along `dim` goes to `target[index]`."""
        copy = partial(_copy_share, target, index, dim, self._parallel.rank)
        return Slot(shape, copy, DTYPE if target.dtype == DTYPE else None)

    def randomize(self, generator: torch.Generator) -> None:
        """Normal weights, or what they come to when they are quantised."""
        w13, w2, scales13, scales2, _ = self.weights
        if scales13 is None or scales2 is None:
            fill_normal(w13, generator)
            fill_normal(w2, generator)
            return
        for expert in range(w13.shape[0]):
            for numbers, scales in zip(w13[expert].chunk(2), scales13[expert], strict=True):
                randomize_blocks(BlockFP8Weight(numbers, scales), generator)
            randomize_blocks(BlockFP8Weight(w2[expert], scales2[expert]), generator)


def _copy_share(target: Tensor, index: tuple[int, ...], dim: int, rank: int, tensor: Tensor) -> None:
    # Of many thousands of slots each makes its view when its tensor comes.
    own = target[index]
    size = own.shape[dim]
    own.copy_(tensor.narrow(dim, rank * size, size))


def _num_groups(size: int) -> int:
    return -(-size // GROUP)


def _blocks(shape: tuple[int, int]) -> tuple[int, int]:
    return _num_groups(shape[0]), _num_groups(shape[1])


class SparseMLP(nn.Module):
    """A router and its experts in place of a gated feed-forward layer, named as most checkpoints do."""

    def __init__(self, gate: Router, experts: Experts):
        super().__init__()
        self.gate = gate
        self.experts = experts

    def forward(self, x: Tensor, residual: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        """Of x or of what `norm` makes of it, plus `residual`, which may be overwritten; all [T, hidden_size]."""
        if norm is not None:
            x = norm.forward(x)
        return self.experts.forward(x, *self.gate.forward(x), residual)


class TokenGate(WeightedModule):
    """How much of something each token gets: [T, hidden] -> float32 [T, 1] from 0 to 1, the same on every rank."""

    def __init__(self, hidden_size: int, build: BuildContext):
        super().__init__(build)
        self.weight = self.allocate(1, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, 1]."""
        return linear(x, self.weight).float().sigmoid()

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """The weight, whole on every rank."""
        yield f"{name}.weight", Slot(tuple(self.weight.shape), self.weight.copy_)

    def randomize(self, generator: torch.Generator) -> None:
        """Normal weights."""
        fill_normal(self.weight, generator)
