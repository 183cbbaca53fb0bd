"""Runs mixtures of experts in plain torch: the reference for the kernels' tests, and the CPU path."""

import torch
from torch import Tensor

from nanovllm_kernels.elementwise import silu_and_mul
from nanovllm_kernels.gemm import block_fp8, linear
from nanovllm_kernels.moe.experts import ChosenExperts, PackedExperts, Routing

# Added to the sum of a token's scores, to avoid 0 / 0.
SCORE_SUM_EPS = 1e-20


def route(logits: Tensor, routing: Routing, bias: Tensor | None) -> ChosenExperts:
    """See the package's `route`."""
    logits = logits.float()
    shared_weights = logits.new_ones((len(logits), 1))
    if routing.shared == "gated":
        logits, shared_weights = logits[:, :-1], logits[:, -1:].sigmoid()
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    choice_scores = scores if bias is None else scores + bias
    if routing.top_groups < routing.num_groups:
        choice_scores = _mask_groups(choice_scores, routing.num_groups, routing.top_groups)
    ids = choice_scores.topk(routing.top_k, -1).indices
    weights = scores.gather(-1, ids)
    if routing.renormalize:
        weights /= weights.sum(-1, keepdim=True) + SCORE_SUM_EPS
    if routing.scale != 1.0:
        weights *= routing.scale
    if routing.shared == "none":
        return ChosenExperts(weights, ids.int())
    shared_ids = torch.full_like(shared_weights, logits.shape[1], dtype=torch.int32)
    return ChosenExperts(torch.cat((weights, shared_weights), 1), torch.cat((ids.int(), shared_ids), 1))


def _mask_groups(choice_scores: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """Set scores [T, E] outside each token's best groups to -inf. A group's score is the sum of its two best scores."""
    grouped = choice_scores.reshape(len(choice_scores), num_groups, -1)
    group_scores = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    best_groups = group_scores.topk(top_groups, -1).indices
    is_masked = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best_groups, False)
    return grouped.masked_fill(is_masked.unsqueeze(-1), -torch.inf).flatten(-2)


def fused_experts(x: Tensor, experts: PackedExperts, chosen: ChosenExperts, residual: Tensor | None) -> Tensor:
    """See the package's `fused_experts`."""
    num_tokens, top_k = chosen.ids.shape
    hidden_size = experts.w2.shape[1]
    sorted_ids, order = chosen.ids.flatten().sort(stable=True)  # order: indices of (token, expert) pairs
    if experts.is_partial:
        sorted_ids = sorted_ids - experts.first_id
        is_local = (sorted_ids >= 0) & (sorted_ids < experts.w2.shape[0])
        sorted_ids, order = sorted_ids[is_local], order[is_local]
        if not len(order):
            return x.new_zeros((num_tokens, hidden_size)) if residual is None else residual
    tokens = order // top_k
    rows = x.index_select(0, tokens)
    # Run one expert after another: a batched product would copy the experts' weights.
    expert_ids, counts = sorted_ids.unique_consecutive(return_counts=True)
    results = [
        _run_expert(expert_rows, experts, expert)
        for expert, expert_rows in zip(expert_ids.tolist(), rows.split(counts.tolist()), strict=True)
    ]
    weighted = torch.cat(results).float().mul_(chosen.weights.flatten().index_select(0, order).unsqueeze(1))
    if residual is not None and residual.dtype == torch.float32:
        return residual.index_add_(0, tokens, weighted)
    total = weighted.new_zeros((num_tokens, hidden_size)).index_add_(0, tokens, weighted)
    return total.to(x.dtype) if residual is None else residual.add_(total)


def _run_expert(x: Tensor, experts: PackedExperts, expert: int) -> Tensor:
    """Run one expert on its rows: [n, H] -> [n, H]."""
    w13, w2 = experts.w13[expert], experts.w2[expert]
    if experts.scales13 is None or experts.scales2 is None:
        return linear(silu_and_mul(linear(x, w13)), w2)
    gate, up = (block_fp8.BlockFP8Weight(*half) for half in zip(w13.chunk(2), experts.scales13[expert], strict=True))
    hidden = silu_and_mul(torch.cat((block_fp8.linear(x, gate), block_fp8.linear(x, up)), -1))
    return block_fp8.linear(hidden, block_fp8.BlockFP8Weight(w2, experts.scales2[expert]))
