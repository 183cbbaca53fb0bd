"""Gated DeltaNet (Yang et al. 2025, https://arxiv.org/abs/2412.06464). The ranks share the key heads evenly."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_core.layers.linear import ColumnParallelLinear, LinearPart, RowParallelLinear
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.quantization import BlockFP8
from nanovllm_core.layers.weights import WeightedModule, WeightSlot, make_share_copier
from nanovllm_core.model import BuildContext, ForwardContext, StateSpec
from nanovllm_core.parallel import own_slice
from nanovllm_kernels.linear_attention import DeltaWeights, gated_delta_net

# Range of the decay rates in random weights.
MIN_DECAY_RATE, MAX_DECAY_RATE = 0.01, 16.0


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The sizes of a whole layer, before the ranks share its heads.

    num_v_heads: number of value heads, a multiple of num_k_heads.
    k_dim, v_dim: size of a key head and of a value head.
    num_taps: length of the convolution's kernel.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    num_taps: int
    eps: float

    @property
    def v_heads_per_k_head(self) -> int:
        """Number of value heads per key head."""
        return self.num_v_heads // self.num_k_heads


class GatedDeltaNet(WeightedModule):
    """A recurrent layer. Callers run `project`, `forward` and `out_proj` in this order.

    The methods are separate, so that one compiled function can contain `out_proj` and the next layer's `project`.
    Raises ValueError if the ranks can't share the heads evenly.

    cache_index: index of the layer in `ForwardContext.state_caches`.
    in_quantization, out_quantization: formats of `in_proj_qkvz` and `out_proj`; None for the model's dtype.
    """

    def __init__(
        self,
        hidden_size: int,
        shape: DeltaShape,
        cache_index: int,
        build: BuildContext,
        *,
        in_quantization: BlockFP8 | None = None,
        out_quantization: BlockFP8 | None = None,
    ):
        build = build.for_attention()
        super().__init__(build)
        self._shape = shape
        self._cache_index = cache_index
        self._parallel = build.parallel
        self._num_k_heads = build.parallel.split_evenly(shape.num_k_heads, "linear_num_key_heads")
        num_v_heads = self._num_k_heads * shape.v_heads_per_k_head
        num_channels = self._num_k_heads * (2 * shape.k_dim + shape.v_heads_per_k_head * shape.v_dim)
        # qkvz: queries, keys, values and output gates. ba: inputs of the update strength and of the decay.
        qkvz = LinearPart("in_proj_qkvz", 2 * shape.num_k_heads * shape.k_dim + 2 * shape.num_v_heads * shape.v_dim)
        ba = LinearPart("in_proj_ba", 2 * shape.num_v_heads)
        self._projected_widths = (num_channels + num_v_heads * shape.v_dim, 2 * num_v_heads)
        # `in_proj_ba` is never quantised, so it can't be in one matmul with a quantised `in_proj_qkvz`.
        is_fused = in_quantization is None
        self.in_proj = ColumnParallelLinear(
            hidden_size, (qkvz, ba) if is_fused else (qkvz,), build, quantization=in_quantization
        )
        self.in_proj_ba = None if is_fused else ColumnParallelLinear(hidden_size, (ba,), build)
        self.out_proj = RowParallelLinear(
            shape.num_v_heads * shape.v_dim, hidden_size, build, name="out_proj", quantization=out_quantization
        )
        self.weights = DeltaWeights(
            conv=torch.empty((shape.num_taps, num_channels), device=build.device),
            decay_rate=torch.empty(num_v_heads, device=build.device),
            dt_bias=torch.empty(num_v_heads, device=build.device),
            norm=torch.empty(shape.v_dim, device=build.device),
            eps=shape.eps,
        )

    @property
    def cache_spec(self) -> StateSpec:
        """The shapes of the layer's state."""
        num_taps, num_channels = self.weights.conv.shape
        return StateSpec((len(self.weights.decay_rate), self._shape.v_dim, self._shape.k_dim), (num_taps, num_channels))

    def project(self, x: Tensor, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
        """Project norm(x) to the pair (`qkvz`, `ba`) for `forward`. x: [T, hidden_size]. norm: None for no norm."""
        if self.in_proj_ba is None:
            qkvz, ba = self.in_proj.forward(x, norm).split(self._projected_widths, -1)
            return qkvz, ba
        if norm is not None:
            x = norm.forward(x)
        return self.in_proj.forward(x), self.in_proj_ba.forward(x)

    def forward(self, qkvz: Tensor, ba: Tensor, ctx: ForwardContext) -> Tensor:
        """Update the states and compute the input of `out_proj`, [T, num_v_heads * v_dim]."""
        if ctx.state_batch is None:
            raise ValueError("ctx.state_batch is None: a model with recurrent layers needs its requests' states")
        cache = ctx.state_caches[self._cache_index]
        return gated_delta_net(qkvz, ba, self.weights, cache.recurrent, cache.conv_inputs, ctx.state_batch)

    def weight_slots(self, layer_name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Yield the slots that load all weights except the projections, which are submodules."""
        shape, weights = self._shape, self.weights
        num_channels = 2 * shape.num_k_heads * shape.k_dim + shape.num_v_heads * shape.v_dim
        yield f"{layer_name}.conv1d.weight", WeightSlot((num_channels, 1, shape.num_taps), self._copy_conv)
        yield f"{layer_name}.A_log", WeightSlot((shape.num_v_heads,), self._copy_decay_rates)
        own_heads = own_slice(self._parallel, len(weights.dt_bias))
        yield f"{layer_name}.dt_bias", WeightSlot((shape.num_v_heads,), make_share_copier(weights.dt_bias, own_heads))
        yield f"{layer_name}.norm.weight", WeightSlot((shape.v_dim,), weights.norm.copy_)

    def _copy_decay_rates(self, log_rates: Tensor) -> object:
        rates = self.weights.decay_rate
        return rates.copy_(log_rates[own_slice(self._parallel, len(rates))].float().exp())

    def _copy_conv(self, weight: Tensor) -> object:
        # A checkpoint orders channels by kind: queries, keys, values. Kernels need the channels ordered by key head.
        shape, num_taps = self._shape, self._shape.num_taps
        key_channels = shape.num_k_heads * shape.k_dim
        qkv = weight.split((key_channels, key_channels, shape.num_v_heads * shape.v_dim))
        channels_by_head = torch.cat([part.reshape(shape.num_k_heads, -1, num_taps) for part in qkv], 1)
        own_channels = channels_by_head[own_slice(self._parallel, self._num_k_heads)]
        return self.weights.conv.copy_(own_channels.reshape(-1, num_taps).t())

    def randomize(self, generator: torch.Generator) -> None:
        """Draw decay rates and convolution taps."""
        weights = self.weights
        weights.conv.uniform_(-1.0, 1.0, generator=generator).mul_(self._shape.num_taps**-0.5)
        weights.decay_rate.uniform_(MIN_DECAY_RATE, MAX_DECAY_RATE, generator=generator)
        weights.dt_bias.fill_(1.0)
        weights.norm.fill_(1.0)
