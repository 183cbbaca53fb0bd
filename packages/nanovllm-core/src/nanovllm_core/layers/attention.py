"""Causal self-attention over the paged cache, grouped query heads or not.

This room must not know how queries, keys and values were made, nor how cache blocks are given out.
"""

from dataclasses import dataclass

from torch import Tensor

from nanovllm_core.layers.linear import Part
from nanovllm_core.model import ForwardContext, PagedSpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.attention import AttentionBatch, paged_attention
from nanovllm_kernels.elementwise import QKNorm, Rotation, rope_and_cache


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
        return PagedSpec(self.num_kv_heads, self.head_dim, self.num_heads)

    def split(self, qkv: Tensor) -> Tensor:
        """The heads [T, query, key and value heads, head_dim] of `qkv` [T, all heads * head_dim], as a view."""
        return qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)


def qkv_parts(num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool) -> tuple[Part, ...]:
    """The parts of the joint projection of a whole layer, named as checkpoints do."""
    sizes = {"q_proj": num_heads, "k_proj": num_kv_heads, "v_proj": num_kv_heads}
    return tuple(Part(name, heads * head_dim, bias) for name, heads in sizes.items())


def attend(
    qkv: Tensor, rotation: Rotation, ctx: ForwardContext, cache_index: int, qk_norm: QKNorm | None = None
) -> Tensor:
    """Rotate queries and keys, write keys and values to the cache, attend to everything there: [T, heads * head_dim].

    qkv: [T, num_heads + 2 * num_kv_heads, head_dim], overwritten. rotation: this step's. cache_index: which of
    `ctx.kv_caches` is this layer's. qk_norm: what query and key heads go through before their rotation.
    """
    kv_cache = ctx.kv_caches[cache_index]
    kv_scales = ctx.kv_scales[cache_index] if ctx.kv_scales else None
    # Attention that is launched between captured pieces reads the cache.
    keep_keys = ctx.launch is None and ctx.attention.reads_own_keys
    q = rope_and_cache(qkv, rotation, ctx.slot_mapping, kv_cache, qk_norm, kv_scales, keep_keys=keep_keys)
    own = qkv[:, q.shape[1] :] if keep_keys else None
    scale = q.shape[-1] ** -0.5

    def attention(q: Tensor, batch: AttentionBatch) -> Tensor:
        return paged_attention(q, kv_cache, batch, scale=scale, kv_scales=kv_scales, own_keys_values=own)

    found = attention(q, ctx.attention) if ctx.launch is None else ctx.launch(attention, q)
    return found.flatten(1)
