"""Paged attention of requests with several queries each, by FlashAttention's CuTe build (Shah et al. 2024), on Hopper.

This room must not know requests with one query: the Triton kernels have them.
"""

import torch
from torch import Tensor

HEAD_DIMS = (64, 96, 128, 256)
# Of what a whole batch fits into one tile FlashAttention makes a kernel of its own, compiled when such a batch first
# comes. The bound it is given need not be tight: with one above a tile's rows, there is one kernel for all batches.
LEAST_BOUND = 256


def supports(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether FlashAttention has a kernel for such heads."""
    return head_dim in HEAD_DIMS and dtype in (torch.bfloat16, torch.float16)


def paged_prefill(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    scale: float,
    max_query_len: int,
) -> Tensor:
    """Attend for requests whose queries begin at `starts` int32 [B + 1] of q [T, Hq, D]; returns [T, Hq, D]."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    k_cache, v_cache = kv_cache.chunk(2, 2)
    out, *_ = flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=starts,
        seqused_k=seq_lens,
        page_table=block_tables,
        max_seqlen_q=max(max_query_len, LEAST_BOUND),
        softmax_scale=scale,
        causal=True,
    )
    return out
