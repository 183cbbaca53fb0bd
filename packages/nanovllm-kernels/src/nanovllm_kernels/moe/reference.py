"""Mixtures of experts in plain torch: the reference for the kernels' tests, and the CPU path.

It loops over the chosen experts and reads each in place once. A batched product would first copy their weights.
"""

from typing import Protocol

import torch
from torch import Tensor

from nanovllm_kernels.elementwise import silu_and_mul
from nanovllm_kernels.gemm import block_fp8, linear

# Smaller than any sum of a token's scores; prevents 0 / 0.
LEAST_SUM = 1e-20


class _Routing(Protocol):
    @property
    def top_k(self) -> int: ...
    @property
    def scoring(self) -> str: ...
    @property
    def renormalize(self) -> bool: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def shared(self) -> str: ...


class _Experts(Protocol):
    @property
    def w13(self) -> Tensor: ...
    @property
    def w2(self) -> Tensor: ...
    @property
    def scales13(self) -> Tensor | None: ...
    @property
    def scales2(self) -> Tensor | None: ...


def route(logits: Tensor, routing: _Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """See the package's `route`."""
    logits = logits.float()
    shared = logits.new_ones((len(logits), 1))
    if routing.shared == "gated":
        logits, shared = logits[:, :-1], logits[:, -1:].sigmoid()
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if routing.top_groups < routing.num_groups:
        choice = _mask_groups(choice, routing.num_groups, routing.top_groups)
    ids = choice.topk(routing.top_k, -1).indices
    weights = scores.gather(-1, ids)
    if routing.renormalize:
        weights /= weights.sum(-1, keepdim=True) + LEAST_SUM
    if routing.scale != 1.0:
        weights *= routing.scale
    if routing.shared == "none":
        return weights, ids.int()
    last = torch.full_like(shared, logits.shape[1], dtype=torch.int32)
    return torch.cat((weights, shared), 1), torch.cat((ids.int(), last), 1)


def _mask_groups(choice: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """Return `choice` [T, E] with -inf outside each token's best groups, ranked by the sum of their two best scores."""
    grouped = choice.reshape(len(choice), num_groups, -1)
    group_scores = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    kept = group_scores.topk(top_groups, -1).indices
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)


def fused_experts(x: Tensor, experts: _Experts, weights: Tensor, ids: Tensor, residual: Tensor | None) -> Tensor:
    """See the package's `fused_experts`."""
    num_tokens, top_k = ids.shape
    hidden_size = experts.w2.shape[1]
    chosen, order = ids.flatten().sort(stable=True)
    tokens = order // top_k
    rows = x.index_select(0, tokens)
    hit, counts = chosen.unique_consecutive(return_counts=True)
    parts = [
        _run_expert(own, experts, expert) for expert, own in zip(hit.tolist(), rows.split(counts.tolist()), strict=True)
    ]
    weighted = torch.cat(parts).float().mul_(weights.flatten().index_select(0, order).unsqueeze(1))
    if residual is not None and residual.dtype == torch.float32:
        return residual.index_add_(0, tokens, weighted)
    total = weighted.new_zeros((num_tokens, hidden_size)).index_add_(0, tokens, weighted)
    return total.to(x.dtype) if residual is None else residual.add_(total)


def _run_expert(x: Tensor, experts: _Experts, expert: int) -> Tensor:
    """Run one expert on its rows: [n, H] -> [n, H]."""
    w13, w2 = experts.w13[expert], experts.w2[expert]
    if experts.scales13 is None or experts.scales2 is None:
        return linear(silu_and_mul(linear(x, w13)), w2)
    # Scale blocks of the gate and of the up projection start at their own first row.
    gate, up = (block_fp8.BlockFP8Weight(*half) for half in zip(w13.chunk(2), experts.scales13[expert], strict=True))
    hidden = silu_and_mul(torch.cat((block_fp8.linear(x, gate), block_fp8.linear(x, up)), -1))
    return block_fp8.linear(hidden, block_fp8.BlockFP8Weight(w2, experts.scales2[expert]))
