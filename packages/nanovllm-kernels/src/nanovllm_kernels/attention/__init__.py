"""Attention over a paged cache, for steps with decodes, prefill chunks or both.

This package exports grouped-query attention. `mla` exports latent attention.
"""

from nanovllm_kernels.attention.gqa import (
    best_page_size,
    make_attention_estimator,
    min_tokens_of_whole_prompt_graphs,
    paged_attention,
    plan_batch,
)
from nanovllm_kernels.attention.plan.attention_batch import AttentionBatch, Backend
from nanovllm_kernels.attention.plan.attention_estimator import (
    PROPORTIONAL_ESTIMATOR,
    AttentionEstimator,
    attention_pairs,
)

__all__ = [
    "PROPORTIONAL_ESTIMATOR",
    "AttentionBatch",
    "AttentionEstimator",
    "Backend",
    "attention_pairs",
    "best_page_size",
    "make_attention_estimator",
    "min_tokens_of_whole_prompt_graphs",
    "paged_attention",
    "plan_batch",
]
