"""Attention over a paged key-value cache.

This room must not know models, nor who owns a page. The kernel serves decodes, prefill chunks and any mix of them.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nanovllm_kernels.attention import reference

__all__ = ["AttentionBatch", "Backend", "paged_attention", "plan_batch"]

Backend = Literal["torch", "triton"]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What attention must know of a step's batch, the same for every layer. Made by `plan_batch`.

    gathers: what the "torch" backend works out once a step, else None. The rest: as given to `plan_batch`.
    """

    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    backend: Backend
    gathers: reference.Gathers | None


def plan_batch(
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
    page_size: int,
    backend: Backend,
) -> AttentionBatch:
    """Prepare a step's attention, once for all its layers.

    block_tables: int32 [B, max_blocks], the pages of each request in order; entries beyond its length are any valid
        page number and are not read from. seq_lens: int32 [B], tokens of each request, this step's included.
    query_start_loc: int32 [B + 1], where each request's queries begin. Query i of n of request b sits at position
        seq_lens[b] - n + i and sees the tokens up to itself.
    num_decodes: how many leading requests have exactly one query. max_query_len, max_seq_len: bounds over the batch,
        known to the host; they shape the launch and need not be tight. page_size: tokens a page holds.
    backend: "triton" needs a CUDA device (or triton's interpreter); "torch" runs everywhere, but waits for the device
        on CUDA.
    """
    gathers = None
    if backend == "torch":
        gathers = reference.plan_gathers(block_tables, seq_lens, query_start_loc, num_decodes, page_size)
    return AttentionBatch(
        block_tables, seq_lens, query_start_loc, num_decodes, max_query_len, max_seq_len, backend, gathers
    )


def paged_attention(q: Tensor, kv_cache: Tensor, batch: AttentionBatch, *, scale: float) -> Tensor:
    """Causal grouped-query attention (Ainslie et al. 2023) of a batch of requests, each over its own pages.

    q: [T, Hq, D], requests one after another; heads contiguous, tokens with any stride; float32, float16 or bfloat16.
    kv_cache: [N, P, 2 Hkv, D] of the same dtype, contiguous, Hq a multiple of Hkv: in each slot the key heads, then the
        value heads; this step's already written.
    scale: what the products are multiplied by before the softmax.
    Returns contiguous [T, Hq, D] in the dtype of q.
    """
    if batch.gathers is not None:
        return reference.paged_attention(q, kv_cache, batch.gathers, scale)
    return _paged_attention_op(
        q,
        kv_cache,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        scale,
        batch.num_decodes,
        batch.max_query_len,
        batch.max_seq_len,
    )


@torch.library.custom_op("nanovllm::paged_attention", mutates_args=())
def _paged_attention_op(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
) -> Tensor:
    from nanovllm_kernels.attention import triton_paged

    return triton_paged.paged_attention(
        q, kv_cache, block_tables, seq_lens, query_start_loc, scale, num_decodes, max_query_len, max_seq_len
    )


_paged_attention_op.register_fake(lambda q, *_: q.new_empty(q.shape))
