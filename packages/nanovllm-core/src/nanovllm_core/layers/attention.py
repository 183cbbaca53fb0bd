"""Causal self-attention over the paged cache, grouped query heads or not.

This room must not know how queries, keys and values were made, nor how cache blocks are given out.
"""

from dataclasses import dataclass

from torch import Tensor

from nanovllm_core.layers.linear import Part
from nanovllm_core.model import ForwardContext, PagedSpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.attention import paged_attention
from nanovllm_kernels.elementwise import rope_and_cache


@dataclass(frozen=True, slots=True)
class Heads:
    """This rank's heads: how one row of a joint query, key and value projection is laid out."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @staticmethod
    def of_rank(num_heads: int, num_kv_heads: int, head_dim: int, parallel: ParallelContext) -> "Heads":
        """The share that `parallel` has of a whole layer's heads. Raises ValueError when it is uneven."""
        return Heads(
            parallel.share(num_heads, "num_attention_heads"),
            parallel.share(num_kv_heads, "num_key_value_heads"),
            head_dim,
        )

    @property
    def cache_spec(self) -> PagedSpec:
        """What these heads want cached."""
        return PagedSpec(self.num_kv_heads, self.head_dim)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, heads, head_dim] as views of `qkv` [T, all heads * head_dim]."""
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        q, k, v = qkv.view(-1, num_heads + 2 * num_kv_heads, self.head_dim).split(
            (num_heads, num_kv_heads, num_kv_heads), dim=1
        )
        return q, k, v


def qkv_parts(num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool) -> tuple[Part, ...]:
    """The parts of the joint projection of a whole layer, named as checkpoints do."""
    sizes = {"q_proj": num_heads, "k_proj": num_kv_heads, "v_proj": num_kv_heads}
    return tuple(Part(name, heads * head_dim, bias) for name, heads in sizes.items())


def attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, ctx: ForwardContext, cache_index: int
) -> Tensor:
    """Rotate queries and keys, write keys and values to the cache, attend to everything there: [T, heads * head_dim].

    q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim]; any may be strided.
    positions: int64 [T]. cos_sin: as `rotary_table` makes it. cache_index: which of `ctx.kv_caches` is this layer's.
    """
    k_cache, v_cache = ctx.kv_caches[cache_index]
    q = rope_and_cache(q, k, v, cos_sin, positions, ctx.slot_mapping, k_cache, v_cache)
    return paged_attention(q, k_cache, v_cache, ctx.attention, scale=q.shape[-1] ** -0.5).flatten(1)
