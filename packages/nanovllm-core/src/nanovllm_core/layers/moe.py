"""Mixtures of experts (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538).

A router chooses a few routed experts for each token. Every token also uses the shared expert, if there is one.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.quantization import BlockFP8, find_quantization, randomize_block_fp8
from nanovllm_core.layers.residual import ResidualStream
from nanovllm_core.layers.weights import WeightedModule, WeightSlot, fill_normal
from nanovllm_core.model import BuildContext
from nanovllm_core.parallel import ParallelContext, own_slice
from nanovllm_kernels.fp8 import DTYPE
from nanovllm_kernels.gemm import PackedWeight, linear, logits, split_float32
from nanovllm_kernels.gemm.block_fp8 import GROUP, BlockFP8Weight
from nanovllm_kernels.moe import ChosenExperts, Routing, fused_experts, pack_experts, route

# Maximum width per rank of a shared expert that is fused with the routed experts. Fusing only saves a kernel
# launch, which hardly matters for wider experts.
MAX_FUSED_SHARED_WIDTH = 1024
# The number of logits is padded to a multiple of this number: cuBLAS's fastest kernels need rows aligned to 16 bytes.
LOGITS_ALIGNMENT = 8
# How error messages name the width of an expert: families use different fields of config.json.
WIDTH_NAME = "the width of an expert (moe_intermediate_size or intermediate_size)"


class ExpertNames(NamedTuple):
    """The checkpoint's names for the three linear layers of an expert."""

    gate: str
    up: str
    down: str

    def find_quantization(self, quantization: BlockFP8 | None, prefix: str) -> BlockFP8 | None:
        """Find the format of the experts in module `prefix` from the first expert; None for the model's dtype.

        Raises ValueError if only some linear layers of the expert are quantised.
        """
        return find_quantization(quantization, f"{prefix}.0", *self)


MLP_LINEAR_NAMES = ExpertNames("gate_proj", "up_proj", "down_proj")


class SharedExpertNames(NamedTuple):
    """The checkpoint's names for the modules of a shared expert, without the parent's path.

    gate: name of the gate that computes the expert's weight; None if the weight is always 1.
    """

    expert: str
    gate: str | None = None


def can_fuse_shared(width: int, shared_width: int, build: BuildContext, *, same_format: bool) -> bool:
    """Whether the shared expert may be stored and computed as if it were an additional routed expert.

    width, shared_width: width of a routed expert and of the shared expert.
    same_format: whether routed and shared experts have the same quantisation.
    """
    if build.parallel.has_whole_experts:
        # A fused shared expert would be on one rank. The ranks can split a separate shared expert.
        return False
    return same_format and shared_width == width and width // build.parallel.size <= MAX_FUSED_SHARED_WIDTH


class Router(WeightedModule):
    """Chooses k routed experts for each token. The router is the same on every rank.

    shared: names of the shared expert that the router adds to each token's choice; None if no shared expert is fused.
    bias_name: the checkpoint's name of the correction bias, without the parent's path; None for no bias.
    uses_float32: whether the weight is float32 on a GPU. On a CPU, the weight is always float32.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        routing: Routing,
        build: BuildContext,
        *,
        shared: SharedExpertNames | None = None,
        bias_name: str | None = None,
        uses_float32: bool = False,
    ):
        super().__init__(build)
        self._gate_name = None if shared is None else shared.gate
        if shared is not None:
            routing = replace(routing, shared="always" if shared.gate is None else "gated")
        self._routing = routing
        self._bias_name = bias_name
        # A CPU rounds the products of a bf16 weight, which could change the choice of experts.
        dtype = torch.float32 if uses_float32 or build.device.type == "cpu" else build.dtype
        self._num_logits = num_experts + (self._gate_name is not None)
        num_rows = (
            num_experts if self._gate_name is None else -(-self._num_logits // LOGITS_ALIGNMENT) * LOGITS_ALIGNMENT
        )
        self._all_rows = torch.zeros((num_rows, hidden_size), dtype=dtype, device=build.device)
        self.weight, self.shared_gate = self._all_rows[:num_experts], self._all_rows[num_experts : self._num_logits]
        self.bias = None if bias_name is None else torch.zeros(num_experts, device=build.device)
        self._packed = PackedWeight(self._all_rows, in_onednn_layout=False)
        self._bf16_parts: Tensor | None = None

    def finish_loading(self) -> None:
        """Split a float32 weight into bfloat16 parts, which tensor cores multiply faster."""
        if self._all_rows.dtype == torch.float32 and self._all_rows.is_cuda and self.dtype == torch.bfloat16:
            self._bf16_parts = split_float32(self._all_rows)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (float32 weights, int32 ids) of the experts chosen for the tokens x, each [T, k].

        If a shared expert is fused, every token chooses this expert too, and each result is [T, k + 1].
        """
        scores = logits(x, self._packed, self._all_rows, self._bf16_parts)[:, : self._num_logits]
        return route(scores, self._routing, self.bias)

    def weight_slots(self, layer_name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Yield the slots that load the weight, the shared expert's gate and the bias."""
        prefix = layer_name[: layer_name.rfind(".") + 1]
        yield f"{layer_name}.weight", WeightSlot(tuple(self.weight.shape), self.weight.copy_)
        if self._gate_name is not None:
            yield f"{prefix}{self._gate_name}.weight", WeightSlot(tuple(self.shared_gate.shape), self.shared_gate.copy_)
        if self.bias is not None:
            yield f"{prefix}{self._bias_name}", WeightSlot(tuple(self.bias.shape), self.bias.copy_)

    def randomize(self, generator: torch.Generator) -> None:
        """Draw normal weights. The bias stays 0."""
        fill_normal(self._all_rows, generator)


class Experts(WeightedModule):
    """Gated feed-forward experts.

    Each rank has an even share of every expert's width. If `ParallelContext.has_whole_experts` is True, each rank has
    an even share of the experts instead.
    Raises ValueError if the ranks can't share the width, the FP8 blocks (GROUP x GROUP) or the experts evenly.

    shared: names of the shared expert, which is stored as the last expert; None if no shared expert is fused.
    quantization: format of the weights; None for the model's dtype.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        build: BuildContext,
        names: ExpertNames = MLP_LINEAR_NAMES,
        *,
        shared: SharedExpertNames | None = None,
        quantization: BlockFP8 | None = None,
    ):
        super().__init__(build)
        self._parallel = build.parallel
        self._names = names
        self._shared_names = shared
        self._num_experts = num_experts + (shared is not None)
        self._shape = (intermediate_size, hidden_size)
        # `_width_split`: how the ranks split each expert. `_own_ids`: experts that this rank has, whole or in part.
        self._width_split = build.parallel
        self._own_ids = range(self._num_experts)
        if build.parallel.has_whole_experts:
            self._width_split = ParallelContext()
            own_ids = own_slice(build.parallel, build.parallel.split_evenly(num_experts, "the number of experts"))
            self._own_ids = range(own_ids.start, own_ids.stop)
        width = self._width_split.split_evenly(intermediate_size, WIDTH_NAME)
        if quantization is not None and self._width_split.size > 1 and width % GROUP:
            raise ValueError(
                f"{WIDTH_NAME} is {intermediate_size}, but {build.parallel.size} ranks can't split its FP8 blocks of "
                f"{GROUP}: set expert_parallel"
            )
        dtype = build.dtype if quantization is None else DTYPE
        num_own_experts = len(self._own_ids)
        # w13: gate and up weights of each expert. w2: down weights.
        w13 = torch.empty((num_own_experts, 2 * width, hidden_size), dtype=dtype, device=build.device)
        w2 = torch.empty((num_own_experts, hidden_size, width), dtype=dtype, device=build.device)
        scales13 = scales2 = None
        if quantization is not None:
            width_blocks, hidden_blocks = _num_fp8_blocks(width), _num_fp8_blocks(hidden_size)
            scales13 = torch.empty(
                (num_own_experts, 2, width_blocks, hidden_blocks), dtype=torch.float32, device=build.device
            )
            scales2 = torch.empty(
                (num_own_experts, hidden_blocks, width_blocks), dtype=torch.float32, device=build.device
            )
        self.weights = pack_experts(
            w13, w2, scales13, scales2, first_id=self._own_ids.start, num_all_experts=self._num_experts
        )

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor, stream: ResidualStream) -> ResidualStream:
        """Apply the chosen experts to x [T, hidden_size], and add the weighted sum of their results to `stream`.

        weights, ids: results of the router.
        """
        chosen = ChosenExperts(weights, ids)
        return stream.add(self._parallel, lambda base: fused_experts(x, self.weights, chosen, base))

    def weight_slots(self, layer_name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Yield the slots that load three weights per expert, and the scales of quantised weights."""
        w13, w2, scales13, scales2, *_ = self.weights
        # Tuples (suffix of a name, shape of gate and up in the checkpoint, target of gate and up, target of down).
        tensors = [("", self._shape, w13.unflatten(1, (2, -1)), w2)]
        if scales13 is not None and scales2 is not None:
            width_blocks, hidden_blocks = map(_num_fp8_blocks, self._shape)
            tensors.append(("_scale_inv", (width_blocks, hidden_blocks), scales13, scales2))
        module_names = [f"{layer_name}.{expert}" for expert in range(self._num_experts)]
        if self._shared_names is not None:
            module_names[-1] = f"{layer_name[: layer_name.rfind('.') + 1]}{self._shared_names.expert}"
        for expert, module_name in enumerate(module_names):
            gate, up, down = (f"{module_name}.{linear_name}.weight" for linear_name in self._names)
            for suffix, (rows, columns), gate_and_up, down_target in tensors:
                yield f"{gate}{suffix}", self._make_slot((rows, columns), gate_and_up, expert, (0,), 0)
                yield f"{up}{suffix}", self._make_slot((rows, columns), gate_and_up, expert, (1,), 0)
                yield f"{down}{suffix}", self._make_slot((columns, rows), down_target, expert, (), 1)

    def _make_slot(
        self, shape: tuple[int, int], target: Tensor, expert: int, part: tuple[int, ...], dim: int
    ) -> WeightSlot:
        """A slot that copies this rank's share of a tensor to the part `part` of an expert in `target`.

        expert: id of the expert. The slot ignores the tensor, without reading it, if another rank has the expert.
        part: index of the part (gate or up) in the expert's slice of `target`; () for the whole slice.
        """
        dtype = DTYPE if target.dtype == DTYPE else None
        if expert not in self._own_ids:
            return WeightSlot(shape, _ignore, dtype)
        index = (expert - self._own_ids.start, *part)
        return WeightSlot(shape, partial(_copy_rank_share, target, index, dim, self._width_split.rank), dtype)

    def randomize(self, generator: torch.Generator) -> None:
        """Draw normal weights."""
        w13, w2, scales13, scales2, *_ = self.weights
        if scales13 is None or scales2 is None:
            fill_normal(w13, generator)
            fill_normal(w2, generator)
            return
        for expert in range(w13.shape[0]):
            for values, scales in zip(w13[expert].chunk(2), scales13[expert], strict=True):
                randomize_block_fp8(BlockFP8Weight(values, scales), generator)
            randomize_block_fp8(BlockFP8Weight(w2[expert], scales2[expert]), generator)


def _ignore(tensor: Tensor) -> None:
    del tensor


def _copy_rank_share(target: Tensor, index: tuple[int, ...], dim: int, rank: int, tensor: Tensor) -> None:
    # The view is created here, because creating the views of thousands of slots before loading takes long.
    view = target[index]
    size = view.shape[dim]
    view.copy_(tensor.narrow(dim, rank * size, size))


def _num_fp8_blocks(size: int) -> int:
    return -(-size // GROUP)


class SparseMLP(nn.Module):
    """A router and its experts, with the same `forward` as GatedMLP."""

    def __init__(self, gate: Router, experts: Experts):
        super().__init__()
        self.gate = gate
        self.experts = experts

    def forward(self, x: Tensor, stream: ResidualStream, norm: RMSNorm | None = None) -> ResidualStream:
        """Apply the experts to norm(x) [T, hidden_size], and add the result to `stream`. norm: None for no norm."""
        if norm is not None:
            x = norm.forward(x)
        return self.experts.forward(x, *self.gate.forward(x), stream)


class TokenGate(WeightedModule):
    """Computes a sigmoid gate per token. Every rank returns the same gates, float32 [T, 1]."""

    def __init__(self, hidden_size: int, build: BuildContext):
        super().__init__(build)
        self.weight = self.allocate(1, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, 1]."""
        return linear(x, self.weight).float().sigmoid()

    def weight_slots(self, layer_name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Yield the slot that loads the weight."""
        yield f"{layer_name}.weight", WeightSlot(tuple(self.weight.shape), self.weight.copy_)

    def randomize(self, generator: torch.Generator) -> None:
        """Draw normal weights."""
        fill_normal(self.weight, generator)
