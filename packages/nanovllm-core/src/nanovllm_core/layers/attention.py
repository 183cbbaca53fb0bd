"""Causal self-attention over the paged KV cache."""

from dataclasses import dataclass

from torch import Tensor

from nanovllm_core.layers.linear import LinearPart
from nanovllm_core.model import ForwardContext, PagedSpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.attention import AttentionBatch, paged_attention
from nanovllm_kernels.elementwise import QKNorm, Rotation, rope_and_cache


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """This rank's heads. A fused projection contains the query heads, the key heads, then the value heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @staticmethod
    def for_rank(num_heads: int, num_kv_heads: int, head_dim: int, parallel: ParallelContext) -> "HeadLayout":
        """Split a layer's heads over the ranks. Query heads are on the same rank as their key-value head.

        If the ranks can't split the key-value heads evenly, the last ranks have additional heads with zero weights.
        If there are more ranks than key-value heads, several ranks have the same key-value head.
        Raises ValueError in two cases, both with more ranks than key-value heads: the number of ranks is not a multiple
        of `num_kv_heads`, or `num_heads` is not a multiple of the number of ranks.
        """
        kv_heads = parallel.own_groups(num_kv_heads, "num_key_value_heads")
        num_own_kv_heads = kv_heads.stop - kv_heads.start
        if parallel.size <= num_kv_heads:
            return HeadLayout(num_own_kv_heads * (num_heads // num_kv_heads), num_own_kv_heads, head_dim)
        return HeadLayout(parallel.split_evenly(num_heads, "num_attention_heads"), num_own_kv_heads, head_dim)

    @property
    def cache_spec(self) -> PagedSpec:
        """The spec of the KV cache for these heads."""
        return PagedSpec(self.num_kv_heads, self.head_dim, self.num_heads)

    def view_heads(self, qkv: Tensor) -> Tensor:
        """View `qkv` [T, all heads * head_dim] as [T, all heads, head_dim]."""
        return qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)


def qkv_parts(num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool) -> tuple[LinearPart, ...]:
    """Describe the fused projection to queries, keys and values, with the usual names in checkpoints."""
    keys, values = (LinearPart(name, num_kv_heads * head_dim, bias, num_kv_heads) for name in ("k_proj", "v_proj"))
    return query_part("q_proj", num_heads, num_kv_heads, head_dim, bias=bias), keys, values


def query_part(name: str, num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool) -> LinearPart:
    """Describe a projection to one vector per query head."""
    return LinearPart(name, num_heads * head_dim, bias, num_kv_heads, splits_groups=True)


def attend(
    qkv: Tensor, rotation: Rotation, ctx: ForwardContext, cache_index: int, qk_norm: QKNorm | None = None
) -> Tensor:
    """Rotate queries and keys, write keys and values to the cache, and compute attention.

    Returns [T, num_heads * head_dim].
    qkv: [T, num_heads + 2 * num_kv_heads, head_dim], overwritten.
    cache_index: index of this layer in `ctx.kv_caches`.
    qk_norm: norm of query and key heads before the rotation; None for no norm.
    """
    kv_cache = ctx.kv_caches[cache_index]
    kv_scales = ctx.kv_scales[cache_index] if ctx.kv_scales else None
    # Attention that runs between two CUDA graphs (`launch_attention`) reads keys and values only from the cache.
    reads_step_keys = ctx.launch_attention is None and ctx.attention_batch.reads_step_keys
    q = rope_and_cache(
        qkv, rotation, ctx.slot_mapping, kv_cache, qk_norm, kv_scales, writes_back_keys_values=reads_step_keys
    )
    step_keys_values = qkv[:, q.shape[1] :] if reads_step_keys else None
    scale = q.shape[-1] ** -0.5

    def attention(q: Tensor, batch: AttentionBatch) -> Tensor:
        return paged_attention(q, kv_cache, batch, scale=scale, kv_scales=kv_scales, step_keys_values=step_keys_values)

    result = attention(q, ctx.attention_batch) if ctx.launch_attention is None else ctx.launch_attention(attention, q)
    return result.flatten(1)
