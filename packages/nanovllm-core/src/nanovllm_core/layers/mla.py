"""Multi-head latent attention (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434), as in DeepSeek-V3.

Heads are split over ranks. The projection to latents and the cache are the same on every rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from nanovllm_core.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.quantization import (
    BlockFP8,
    block_slots,
    joint_weight,
    quantization_of,
    randomize_blocks,
)
from nanovllm_core.layers.weights import Slot, WeightedModule, copy_share, fill_normal
from nanovllm_core.model import BuildContext, ForwardContext, MLASpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.attention import AttentionBatch
from nanovllm_kernels.attention.mla import latent_attention
from nanovllm_kernels.elementwise import Rotation, latent_rope_and_cache
from nanovllm_kernels.fp8 import DTYPE
from nanovllm_kernels.gemm.block_fp8 import GROUP, dequantize


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of one layer over all ranks.

    key_dim, rope_dim, value_dim: numbers per head of a key's unrotated and rotated parts, and of a value.
    query_rank: size of compressed queries; None if queries are projected directly.
    scale: multiplies the attention scores before the softmax.
    interleaved: in checkpoints the two numbers that are rotated together are adjacent.
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


class LatentExpansion(WeightedModule):
    """The weight that expands a latent to every head's key and value: [H, key_dim + value_dim, latent_dim].

    Absorbed attention multiplies queries and results by it, along other dimensions than a linear layer does. So it is
    never packed, and a quantised weight is dequantised after loading.
    """

    def __init__(self, shape: LatentShape, build: BuildContext, quantization: BlockFP8 | None):
        super().__init__(build)
        self._share = build.parallel.share(shape.num_heads, "num_attention_heads")
        self._rows = shape.key_dim + shape.value_dim
        self._shape = (shape.num_heads * self._rows, shape.latent_dim)
        size = self._share * self._rows
        self._own_rows = slice(build.parallel.rank * size, (build.parallel.rank + 1) * size)
        self._blocks = None
        if quantization is not None:
            self._blocks = joint_weight([self._own_rows.start], [size], shape.latent_dim, build.device)
        self.weight = self.allocate(self._share if quantization is None else 0, self._rows, shape.latent_dim)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """The weight, head after head, and its scales if it is quantised."""
        if self._blocks is not None:
            rows, columns = slice(0, self._blocks.data.shape[0]), slice(0, self._shape[1])
            yield from block_slots(name, self._shape, self._blocks, rows, self._own_rows, columns)
        else:
            yield f"{name}.weight", Slot(self._shape, copy_share(self.weight.flatten(0, 1), self._own_rows))

    def randomize(self, generator: torch.Generator) -> None:
        """Draw normal weights."""
        if self._blocks is not None:
            randomize_blocks(self._blocks, generator)
        else:
            fill_normal(self.weight, generator)

    def finish(self) -> None:
        """Dequantise the weight if it is quantised."""
        if self._blocks is not None:
            self.weight = dequantize(self._blocks).to(self.dtype).view(self._share, self._rows, -1)
            self._blocks = None


class LatentAttention(WeightedModule):
    """Latent attention with its projections. Attributes have the usual checkpoint names.

    `finish` reorders the rotated rows for the kernels. It runs before the projections are packed, because a module is
    finished before the modules within it.

    quantization: how the model's weights are stored; None for the model's dtype.
    name: this module's name in the checkpoint, to look up its quantisation.
    Raises ValueError if FP8 blocks cut the rows that are reordered.
    """

    def __init__(
        self,
        hidden_size: int,
        shape: LatentShape,
        cache_index: int,
        build: BuildContext,
        *,
        quantization: BlockFP8 | None = None,
        name: str = "self_attn",
    ):
        super().__init__(build)
        self._shape = shape
        self._index = cache_index
        self._num_heads = build.parallel.share(shape.num_heads, "num_attention_heads")
        self._head_dim = shape.key_dim + shape.rope_dim
        whole = replace(build, parallel=ParallelContext())
        latent = Part("kv_a_proj_with_mqa", shape.latent_dim + shape.rope_dim, shape.bias)
        heads = shape.num_heads * self._head_dim
        # The expansion of compressed queries; None if queries are projected directly.
        self.q_b_proj: ColumnParallelLinear | None = None
        self.q_a_layernorm: RMSNorm | None = None
        scheme = partial(quantization_of, quantization, name)
        if shape.query_rank is None:
            self.q_proj = ColumnParallelLinear(
                hidden_size, (Part("q_proj", heads),), build, quantization=scheme("q_proj")
            )
            self.kv_a_proj = ColumnParallelLinear(hidden_size, (latent,), whole, quantization=scheme(latent.name))
        else:
            parts = (Part("q_a_proj", shape.query_rank, shape.bias), latent)
            self.kv_a_proj = ColumnParallelLinear(
                hidden_size, parts, whole, quantization=scheme("q_a_proj", latent.name)
            )
            self.q_a_layernorm = RMSNorm(shape.query_rank, shape.eps, build)
            self.q_b_proj = ColumnParallelLinear(
                shape.query_rank, (Part("q_b_proj", heads),), build, quantization=scheme("q_b_proj")
            )
        self.kv_a_layernorm = RMSNorm(shape.latent_dim, shape.eps, build)
        self.kv_b_proj = LatentExpansion(shape, build, scheme("kv_b_proj"))
        self.o_proj = RowParallelLinear(
            shape.num_heads * shape.value_dim, hidden_size, build, bias=shape.bias, quantization=scheme("o_proj")
        )
        if quantization is not None and shape.interleaved:
            _require_whole_blocks(shape)

    @property
    def cache_spec(self) -> MLASpec:
        """The cache spec of this layer."""
        return MLASpec(self._shape.latent_dim, self._shape.rope_dim, self._num_heads)

    def before(self, x: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Queries [T, heads * head_dim] and latents [T, latent_dim + rope_dim] of norm(x), with x [T, hidden]."""
        latents = self.kv_a_proj.forward(x, norm)
        if self.q_b_proj is None:
            return self.q_proj.forward(x, norm), latents
        width = self._shape.latent_dim + self._shape.rope_dim
        compressed, latents = latents.split((latents.shape[1] - width, width), 1)
        return self.q_b_proj.forward(compressed, self.q_a_layernorm), latents

    def forward(self, q: Tensor, latents: Tensor, rotation: Rotation, ctx: ForwardContext) -> Tensor:
        """Rotate, write to the cache and attend to the cached context: [T, heads * value_dim]. Overwrites inputs."""
        kv_cache = ctx.kv_caches[self._index]
        kv_scales = ctx.kv_scales[self._index] if ctx.kv_scales else None
        q = q.view(-1, self._num_heads, self._head_dim)
        norm = self.kv_a_layernorm
        latent_rope_and_cache(q, latents, norm.packed, norm.eps, rotation, ctx.slot_mapping, kv_cache, kv_scales)
        attention = partial(_attention, self.kv_b_proj.weight, kv_cache, kv_scales, self._shape.scale)
        if ctx.launch_attention is None:
            return attention(q, ctx.attention).flatten(1)
        return ctx.launch_attention(attention, q, self._shape.value_dim).flatten(1)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """This module has no weights of its own."""
        del name
        yield from ()

    def randomize(self, generator: torch.Generator) -> None:
        """This module has no weights of its own."""
        del generator

    def finish(self) -> None:
        """Reorder the rotated rows as in GPT-NeoX: the first numbers of all pairs, then the second numbers."""
        shape = self._shape
        if not shape.interleaved:
            return
        order = torch.arange(shape.rope_dim, device=self.device).view(-1, 2).t().flatten()
        queries = self.q_b_proj or self.q_proj
        heads = _bytes(queries.weight.data).view(self._num_heads, self._head_dim, -1)[:, shape.key_dim :]
        heads.copy_(heads[:, order])
        for rows in (_bytes(self.kv_a_proj.weight.data), self.kv_a_proj.bias):
            if rows is not None:
                last = rows[-shape.rope_dim :]
                last.copy_(last[order])


def _bytes(weight: Tensor) -> Tensor:
    """A view of a float8 weight as bytes, because torch can't index float8 on a CPU; other weights unchanged."""
    return weight.view(torch.uint8) if weight.dtype == DTYPE else weight


def _require_whole_blocks(shape: LatentShape) -> None:
    """Raise ValueError if rows that are reordered lie in FP8 blocks with different scales."""
    head_dim = shape.key_dim + shape.rope_dim
    begins = [shape.latent_dim, *(head * head_dim + shape.key_dim for head in range(shape.num_heads))]
    for begin in begins:
        last = begin + shape.rope_dim - 1
        if begin // GROUP != last // GROUP:
            raise ValueError(f"rows {begin} to {last} are rotated together, but FP8 blocks of {GROUP} cut them")


def _attention(
    expansion: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, scale: float, q: Tensor, batch: AttentionBatch
) -> Tensor:
    return latent_attention(q, expansion, kv_cache, batch, scale=scale, kv_scales=kv_scales)
