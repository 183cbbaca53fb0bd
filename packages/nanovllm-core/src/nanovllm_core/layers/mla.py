"""Multi-head latent attention (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434), as in DeepSeek-V3.

A latent is a compressed vector from which every head's key and value can be computed. Heads are split over ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from nanovllm_core.layers.linear import ColumnParallelLinear, LinearPart, RowParallelLinear
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.quantization import BlockFP8, find_quantization
from nanovllm_core.layers.weights import WeightedModule, WeightSlot
from nanovllm_core.model import BuildContext, ForwardContext, MLASpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.attention import AttentionBatch
from nanovllm_kernels.attention.mla import latent_attention
from nanovllm_kernels.elementwise import Rotation, latent_rope_and_cache
from nanovllm_kernels.fp8 import DTYPE
from nanovllm_kernels.gemm.block_fp8 import GROUP, BlockFP8Weight, dequantize


@dataclass(frozen=True, slots=True)
class LatentAttentionConfig:
    """Options of a whole layer of latent attention, before the ranks share its heads.

    key_dim: size of the part of a head's key without rotation.
    rope_dim: size of the part with rotation.
    query_rank: size of compressed queries; None for queries without compression.
    scale: factor that multiplies the attention scores before the softmax.
    interleaved: whether checkpoints store the two dimensions of a rotated pair in adjacent rows.
    """

    num_heads: int
    key_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None
    latent_dim: int
    scale: float
    interleaved: bool = True
    bias: bool = False
    eps: float = 1e-6


class LatentExpansion(ColumnParallelLinear):
    """The layer that expands a latent to every head's key and value. Only its weight is used.

    Attention multiplies along other dimensions than a linear layer. Therefore the weight is never packed, and a
    quantised weight is dequantised after loading.
    by_head: the weight, [heads, key_dim + value_dim, latent_dim]; valid after `finish_loading`.
    """

    by_head: Tensor

    def __init__(self, config: LatentAttentionConfig, build: BuildContext, quantization: BlockFP8 | None):
        self._rows_per_head = config.key_dim + config.value_dim
        part = LinearPart("kv_b_proj", config.num_heads * self._rows_per_head)
        super().__init__(config.latent_dim, (part,), build, quantization=quantization)

    def finish_loading(self) -> None:
        """Split the weight by head."""
        weight = self.weight
        rows = dequantize(weight).to(self.dtype) if isinstance(weight, BlockFP8Weight) else weight.data
        self.by_head = rows.view(-1, self._rows_per_head, rows.shape[1])
        # Free the quantised weight.
        del self.weight


class LatentAttention(WeightedModule):
    """Latent attention with its projections. Every rank computes all latents, because all heads share the latents.

    Raises ValueError if rows that `finish_loading` reorders lie in different FP8 blocks, which have different scales.

    cache_index: index of this layer in `ForwardContext.kv_caches`.
    quantization: format of the weights; None for the model's dtype.
    name: this module's name in the checkpoint.
    """

    def __init__(
        self,
        hidden_size: int,
        config: LatentAttentionConfig,
        cache_index: int,
        build: BuildContext,
        *,
        quantization: BlockFP8 | None = None,
        name: str = "self_attn",
    ):
        build = build.for_attention()
        super().__init__(build)
        self._config = config
        self._cache_index = cache_index
        self._num_heads = build.parallel.split_evenly(config.num_heads, "num_attention_heads")
        self._head_dim = config.key_dim + config.rope_dim
        unsplit_build = replace(build, parallel=ParallelContext())
        find_format = partial(find_quantization, quantization, name)
        # One matmul computes the latents and the compressed queries.
        latent_parts = [LinearPart("kv_a_proj_with_mqa", config.latent_dim + config.rope_dim, config.bias)]
        query_part, query_rank = LinearPart("q_proj", config.num_heads * self._head_dim), config.query_rank
        if query_rank is not None:
            latent_parts.insert(0, LinearPart("q_a_proj", query_rank, config.bias))
            query_part = query_part._replace(name="q_b_proj")
        latent_format = find_format(*(part.name for part in latent_parts))
        self.kv_a_proj = ColumnParallelLinear(
            hidden_size, tuple(latent_parts), unsplit_build, quantization=latent_format
        )
        self.q_a_layernorm = None if query_rank is None else RMSNorm(query_rank, config.eps, build)
        self.q_proj = ColumnParallelLinear(
            query_rank or hidden_size, (query_part,), build, quantization=find_format(query_part.name)
        )
        self.kv_a_layernorm = RMSNorm(config.latent_dim, config.eps, build)
        self.kv_b_proj = LatentExpansion(config, build, find_format("kv_b_proj"))
        self.o_proj = RowParallelLinear(
            config.num_heads * config.value_dim,
            hidden_size,
            build,
            name="o_proj",
            bias=config.bias,
            quantization=find_format("o_proj"),
        )
        if quantization is not None and config.interleaved:
            _check_fp8_blocks(config)

    @property
    def cache_spec(self) -> MLASpec:
        """The shape of this layer's cache."""
        return MLASpec(self._config.latent_dim, self._config.rope_dim, self._num_heads)

    def project(self, x: Tensor, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
        """Returns queries [T, heads * head_dim] and latents [T, latent_dim + rope_dim] of norm(x). x: [T, hidden].

        norm: None for no norm.
        """
        latents = self.kv_a_proj.forward(x, norm)
        if self.q_a_layernorm is None:
            return self.q_proj.forward(x, norm), latents
        latents_width = self._config.latent_dim + self._config.rope_dim
        compressed, latents = latents.split((latents.shape[1] - latents_width, latents_width), 1)
        return self.q_proj.forward(compressed, self.q_a_layernorm), latents

    def forward(self, q: Tensor, latents: Tensor, rotation: Rotation, ctx: ForwardContext) -> Tensor:
        """Rotate queries and keys, write latents to the cache, and compute attention. Returns [T, heads * value_dim].

        q, latents: results of `project`, overwritten.
        """
        kv_cache = ctx.kv_caches[self._cache_index]
        kv_scales = ctx.kv_scales[self._cache_index] if ctx.kv_scales else None
        q = q.view(-1, self._num_heads, self._head_dim)
        norm = self.kv_a_layernorm
        latent_rope_and_cache(q, latents, norm.packed_weight, norm.eps, rotation, ctx.slot_mapping, kv_cache, kv_scales)
        attention = partial(_attend_latents, self.kv_b_proj.by_head, kv_cache, kv_scales, self._config.scale)
        if ctx.launch_attention is None:
            return attention(q, ctx.attention_batch).flatten(1)
        return ctx.launch_attention(attention, q, self._config.value_dim).flatten(1)

    def weight_slots(self, layer_name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Yield no slots: submodules own all weights."""
        del layer_name
        yield from ()

    def randomize(self, generator: torch.Generator) -> None:
        """Do nothing: submodules own all weights."""
        del generator

    def finish_loading(self) -> None:
        """Reorder the rotated rows: kernels need the first rows of all pairs, followed by the second rows.

        `load_weights` finishes a module before its submodules, so the projections are not packed yet.
        """
        config = self._config
        if not config.interleaved:
            return
        order = torch.arange(config.rope_dim, device=self.device).view(-1, 2).t().flatten()
        rotated_rows = _view_bytes(self.q_proj.weight.data).view(self._num_heads, self._head_dim, -1)[
            :, config.key_dim :
        ]
        rotated_rows.copy_(rotated_rows[:, order])
        for rows in (_view_bytes(self.kv_a_proj.weight.data), self.kv_a_proj.bias):
            if rows is not None:
                rotated_rows = rows[-config.rope_dim :]
                rotated_rows.copy_(rotated_rows[order])


def _view_bytes(weight: Tensor) -> Tensor:
    """View a float8 weight as bytes, because torch can't index float8 on a CPU; returns other weights unchanged."""
    return weight.view(torch.uint8) if weight.dtype == DTYPE else weight


def _check_fp8_blocks(config: LatentAttentionConfig) -> None:
    """Raise ValueError if the rotated rows of a head, or of the latents, span several FP8 blocks (of GROUP rows)."""
    head_dim = config.key_dim + config.rope_dim
    starts = [config.latent_dim, *(head * head_dim + config.key_dim for head in range(config.num_heads))]
    for start in starts:
        last = start + config.rope_dim - 1
        if start // GROUP != last // GROUP:
            raise ValueError(f"rows {start} to {last} are rotated together, but lie in different FP8 blocks of {GROUP}")


def _attend_latents(
    expansion: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, scale: float, q: Tensor, batch: AttentionBatch
) -> Tensor:
    return latent_attention(q, expansion, kv_cache, batch, scale=scale, kv_scales=kv_scales)
