"""Computes attention over a paged cache, for steps with decodes, prefill chunks or both.

This package exports grouped-query attention. It also exports `AttentionRounds`, which estimates attention time: a round
is the tiles (blocks of queries) that a device computes at once. `mla` exports latent attention.
"""

from nanovllm_kernels.attention.gqa import (
    best_page_size,
    describe_attention_rounds,
    min_graph_tokens_for_step_keys,
    paged_attention,
    plan_batch,
)
from nanovllm_kernels.attention.plan.attention_batch import AttentionBatch, Backend
from nanovllm_kernels.attention.plan.rounds import ONE_TOKEN_ROUNDS, AttentionRounds, attention_pairs

__all__ = [
    "ONE_TOKEN_ROUNDS",
    "AttentionBatch",
    "AttentionRounds",
    "Backend",
    "attention_pairs",
    "best_page_size",
    "describe_attention_rounds",
    "min_graph_tokens_for_step_keys",
    "paged_attention",
    "plan_batch",
]
