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
from nanovllm_core.layers.weights import Slot, WeightedModule, copy_share, fill_normal
from nanovllm_core.model import BuildContext, ForwardContext, MLASpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.attention import AttentionBatch
from nanovllm_kernels.attention.mla import latent_attention
from nanovllm_kernels.elementwise import Rotation, latent_rope_and_cache


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

    Queries and results are multiplied by it in place of the latents, so it is never packed.
    """

    def __init__(self, shape: LatentShape, build: BuildContext):
        super().__init__(build)
        self._rank = build.parallel.rank
        self._share = build.parallel.share(shape.num_heads, "num_attention_heads")
        self._rows = shape.key_dim + shape.value_dim
        self._shape = (shape.num_heads * self._rows, shape.latent_dim)
        self.weight = self.allocate(self._share, self._rows, shape.latent_dim)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """One weight, head after head."""
        size = self._share * self._rows
        mine = slice(self._rank * size, (self._rank + 1) * size)
        yield f"{name}.weight", Slot(self._shape, copy_share(self.weight.view(size, -1), mine))

    def randomize(self, generator: torch.Generator) -> None:
        """Normal weights."""
        fill_normal(self.weight, generator)


class LatentAttention(WeightedModule):
    """Attention to latents, with its projections: named as checkpoints do.

    `finish` brings the rows that are rotated from the checkpoint's order into the one that kernels rotate in, before
    the projections that have them are packed: a module is finished before the modules within it.
    """

    def __init__(self, hidden_size: int, shape: LatentShape, cache_index: int, build: BuildContext):
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
        if shape.query_rank is None:
            self.q_proj = ColumnParallelLinear(hidden_size, (Part("q_proj", heads),), build)
            self.kv_a_proj = ColumnParallelLinear(hidden_size, (latent,), whole)
        else:
            parts = (Part("q_a_proj", shape.query_rank, shape.bias), latent)
            self.kv_a_proj = ColumnParallelLinear(hidden_size, parts, whole)
            self.q_a_layernorm = RMSNorm(shape.query_rank, shape.eps, build)
            self.q_b_proj = ColumnParallelLinear(shape.query_rank, (Part("q_b_proj", heads),), build)
        self.kv_a_layernorm = RMSNorm(shape.latent_dim, shape.eps, build)
        self.kv_b_proj = LatentExpansion(shape, build)
        self.o_proj = RowParallelLinear(shape.num_heads * shape.value_dim, hidden_size, build, bias=shape.bias)

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
        return ctx.launch(attention, q, value_dim=self._shape.value_dim).flatten(1)

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
        heads = queries.weight.data.view(self._num_heads, self._head_dim, -1)[:, shape.key_dim :]
        heads.copy_(heads[:, order])
        for rows in (self.kv_a_proj.weight.data, self.kv_a_proj.bias):
            if rows is not None:
                last = rows[-shape.rope_dim :]
                last.copy_(last[order])


def _attention(
    expansion: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, scale: float, q: Tensor, batch: AttentionBatch
) -> Tensor:
    return latent_attention(q, expansion, kv_cache, batch, scale=scale, kv_scales=kv_scales)
