"""Multi-head latent attention (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434), as DeepSeek-V3 has it.

Heads are split over ranks; what makes latents is the same on every rank, and so is the cache. This room must not know
how cache blocks are given out.
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
    """The sizes of one layer: its heads; of each the numbers of a key that aren't rotated, of those that are, and of a
    value; the ranks of queries, None where they are projected at once, and of keys and values, that is the latent.

    scale: what products are multiplied by before the softmax. interleaved: checkpoints hold the two numbers that are
    rotated together side by side. eps: of the norms within.
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
    """What makes of a latent every head's key and value: [H, key_dim + value_dim, latent_dim].

    Queries and results are multiplied by it in place of the latents, and by columns where linears have rows: so it is
    never packed, and if it is quantised it is brought back to the model's dtype once it is there.
    """

    def __init__(self, shape: LatentShape, build: BuildContext, quantization: BlockFP8 | None):
        super().__init__(build)
        self._share = build.parallel.share(shape.num_heads, "num_attention_heads")
        self._rows = shape.key_dim + shape.value_dim
        self._shape = (shape.num_heads * self._rows, shape.latent_dim)
        size = self._share * self._rows
        self._mine = slice(build.parallel.rank * size, (build.parallel.rank + 1) * size)
        self._blocks = None
        if quantization is not None:
            self._blocks = joint_weight([self._mine.start], [size], shape.latent_dim, build.device)
        self.weight = self.allocate(self._share if quantization is None else 0, self._rows, shape.latent_dim)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """One weight, head after head, with its scales if it is quantised."""
        if self._blocks is not None:
            rows, columns = slice(0, self._blocks.data.shape[0]), slice(0, self._shape[1])
            yield from block_slots(name, self._shape, self._blocks, rows, self._mine, columns)
        else:
            yield f"{name}.weight", Slot(self._shape, copy_share(self.weight.flatten(0, 1), self._mine))

    def randomize(self, generator: torch.Generator) -> None:
        """Normal weights."""
        if self._blocks is not None:
            randomize_blocks(self._blocks, generator)
        else:
            fill_normal(self.weight, generator)

    def finish(self) -> None:
        """Dequantise the weight."""
        if self._blocks is not None:
            self.weight = dequantize(self._blocks).to(self.dtype).view(self._share, self._rows, -1)
            self._blocks = None


class LatentAttention(WeightedModule):
    """Attention to latents, with its projections: named as checkpoints do.

    `finish` brings the rows that are rotated from the checkpoint's order into the one that kernels rotate in, before
    the projections that have them are packed: a module is finished before the modules within it.

    quantization: how the model's weights are stored, if not in its dtype; name: this module's in the checkpoint, by
    which that is looked up. Raises ValueError when blocks of FP8 cut the rows that are to change places.
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
        # What makes queries of what `before` has left: heads of their own rank, or nothing.
        self.q_b_proj: ColumnParallelLinear | None = None
        self.q_a_layernorm: RMSNorm | None = None
        how = partial(quantization_of, quantization, name)
        if shape.query_rank is None:
            self.q_proj = ColumnParallelLinear(hidden_size, (Part("q_proj", heads),), build, quantization=how("q_proj"))
            self.kv_a_proj = ColumnParallelLinear(hidden_size, (latent,), whole, quantization=how(latent.name))
        else:
            parts = (Part("q_a_proj", shape.query_rank, shape.bias), latent)
            self.kv_a_proj = ColumnParallelLinear(hidden_size, parts, whole, quantization=how("q_a_proj", latent.name))
            self.q_a_layernorm = RMSNorm(shape.query_rank, shape.eps, build)
            self.q_b_proj = ColumnParallelLinear(
                shape.query_rank, (Part("q_b_proj", heads),), build, quantization=how("q_b_proj")
            )
        self.kv_a_layernorm = RMSNorm(shape.latent_dim, shape.eps, build)
        self.kv_b_proj = LatentExpansion(shape, build, how("kv_b_proj"))
        self.o_proj = RowParallelLinear(
            shape.num_heads * shape.value_dim, hidden_size, build, bias=shape.bias, quantization=how("o_proj")
        )
        if quantization is not None and shape.interleaved:
            _require_whole_blocks(shape)

    @property
    def cache_spec(self) -> MLASpec:
        """What this layer wants cached."""
        return MLASpec(self._shape.latent_dim, self._shape.rope_dim, self._num_heads)

    def before(self, x: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Queries [T, heads * head_dim], and latents with their key parts [T, latent_dim + rope_dim], of what `norm`
        makes of x [T, hidden].
        """
        latents = self.kv_a_proj.forward(x, norm)
        if self.q_b_proj is None:
            return self.q_proj.forward(x, norm), latents
        width = self._shape.latent_dim + self._shape.rope_dim
        compressed, latents = latents.split((latents.shape[1] - width, width), 1)
        return self.q_b_proj.forward(compressed, self.q_a_layernorm), latents

    def forward(self, q: Tensor, latents: Tensor, rotation: Rotation, ctx: ForwardContext) -> Tensor:
        """Of what `before` made, overwritten: rotate, cache, attend to everything there; [T, heads * value_dim]."""
        kv_cache = ctx.kv_caches[self._index]
        kv_scales = ctx.kv_scales[self._index] if ctx.kv_scales else None
        q = q.view(-1, self._num_heads, self._head_dim)
        norm = self.kv_a_layernorm
        latent_rope_and_cache(q, latents, norm.packed, norm.eps, rotation, ctx.slot_mapping, kv_cache, kv_scales)
        attention = partial(_attention, self.kv_b_proj.weight, kv_cache, kv_scales, self._shape.scale)
        if ctx.launch is None:
            return attention(q, ctx.attention).flatten(1)
        return ctx.launch(attention, q, self._shape.value_dim).flatten(1)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """None of its own."""
        del name
        yield from ()

    def randomize(self, generator: torch.Generator) -> None:
        """Nothing of its own."""
        del generator

    def finish(self) -> None:
        """Put the rotated rows into the order of GPT-NeoX: first those of the pairs' first numbers."""
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
    """A weight whose rows torch moves everywhere: of float8 it moves none on a CPU, but of bytes."""
    return weight.view(torch.uint8) if weight.dtype == DTYPE else weight


def _require_whole_blocks(shape: LatentShape) -> None:
    """Raises ValueError when rows that are to change places lie in blocks with different scales."""
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
