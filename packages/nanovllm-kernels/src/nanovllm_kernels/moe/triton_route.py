"""Chooses experts on CUDA, with one program per token."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.moe.experts import ChosenExperts, Routing
from nanovllm_kernels.moe.moe_reference import SCORE_SUM_EPS
from nanovllm_kernels.platform import can_overlap_launches


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> ChosenExperts:
    """See the package's `route`."""
    num_tokens, num_experts = logits.shape
    if routing.shared == "gated":
        num_experts -= 1
    num_slots = routing.top_k + (routing.shared != "none")  # experts per token
    weights = torch.empty((num_tokens, num_slots), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_tokens, num_slots), dtype=torch.int32, device=logits.device)
    # If tokens choose from all groups, a single group of all experts gives the same result.
    num_groups = routing.num_groups if routing.top_groups < routing.num_groups else 1
    group_size = num_experts // num_groups
    overlap = can_overlap_launches(logits.device)  # programmatic dependent launch
    _route[(num_tokens,)](
        logits,
        logits if bias is None else bias,
        weights,
        ids,
        logits.stride(0),
        routing.scale,
        NUM_GROUPS=num_groups,
        GROUP_SIZE=group_size,
        PADDED_GROUPS=triton.next_power_of_2(num_groups),
        PADDED_SIZE=triton.next_power_of_2(group_size),  # padded size of a group
        TOP_GROUPS=routing.top_groups if num_groups > 1 else 1,
        TOP_K=routing.top_k,
        SLOTS=num_slots,
        PADDED_SLOTS=triton.next_power_of_2(num_slots),
        SCORE_SUM_EPS=SCORE_SUM_EPS,
        SIGMOID=routing.scoring == "sigmoid",
        BIAS=bias is not None,
        RENORMALIZE=routing.renormalize,
        GATED=routing.shared == "gated",  # the last logit is the gate of the shared expert
        OVERLAP=overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
    return ChosenExperts(weights, ids)


@triton.jit
def _route(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    logits_stride,
    scale,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    SCORE_SUM_EPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Choose one token's experts. SLOTS: number of chosen experts, including the shared expert."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    minus_inf: tl.constexpr = float("-inf")
    num_experts: tl.constexpr = NUM_GROUPS * GROUP_SIZE
    groups = tl.arange(0, PADDED_GROUPS)
    members = tl.arange(0, PADDED_SIZE)  # indices of experts within a group
    experts = groups[:, None] * GROUP_SIZE + members[None, :]
    is_expert = (groups < NUM_GROUPS)[:, None] & (members < GROUP_SIZE)[None, :]
    logits = tl.load(logits_ptr + token * logits_stride + experts, mask=is_expert, other=minus_inf).to(tl.float32)
    shared_weight = 1.0
    if GATED:
        shared_weight = tl.sigmoid(tl.load(logits_ptr + token * logits_stride + num_experts).to(tl.float32))
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        exponentials = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = exponentials / tl.sum(tl.sum(exponentials, 1), 0)
    choice_scores = scores
    if BIAS:
        choice_scores += tl.load(bias_ptr + experts, mask=is_expert, other=0.0)
    choice_scores = tl.where(is_expert, choice_scores, minus_inf)
    if TOP_GROUPS < NUM_GROUPS:
        group_scores = tl.max(choice_scores, 1)
        best_members = tl.min(tl.where(choice_scores == group_scores[:, None], members[None, :], PADDED_SIZE), 1)
        if GROUP_SIZE > 1:
            group_scores += tl.max(tl.where(members[None, :] == best_members[:, None], minus_inf, choice_scores), 1)
        is_kept = groups < 0  # no group yet
        for _ in tl.static_range(TOP_GROUPS):
            remaining = tl.where(is_kept, minus_inf, group_scores)
            group = tl.min(tl.where(remaining == tl.max(remaining, 0), groups, PADDED_GROUPS), 0)
            is_kept = is_kept | (groups == group)
        choice_scores = tl.where(is_kept[:, None], choice_scores, minus_inf)

    slots = tl.arange(0, PADDED_SLOTS)
    weights = tl.zeros((PADDED_SLOTS,), tl.float32)
    ids = tl.zeros((PADDED_SLOTS,), tl.int32)
    for slot in tl.static_range(TOP_K):
        best = tl.max(tl.max(choice_scores, 1), 0)
        chosen = tl.min(tl.min(tl.where((choice_scores == best) & is_expert, experts, num_experts), 1), 0)
        is_chosen = experts == chosen
        weights = tl.where(slots == slot, tl.sum(tl.sum(tl.where(is_chosen, scores, 0.0), 1), 0), weights)
        # NaN scores do not equal the maximum, so `chosen` may be `num_experts`: use the last expert's id instead.
        ids = tl.where(slots == slot, tl.minimum(chosen, num_experts - 1), ids)
        choice_scores = tl.where(is_chosen, minus_inf, choice_scores)
    if RENORMALIZE:
        weights /= tl.sum(weights, 0) + SCORE_SUM_EPS
    weights *= scale
    if SLOTS > TOP_K:
        weights = tl.where(slots == TOP_K, shared_weight, weights)
        ids = tl.where(slots == TOP_K, num_experts, ids)
    tl.store(weights_ptr + token * SLOTS + slots, weights, mask=slots < SLOTS)
    tl.store(ids_ptr + token * SLOTS + slots, ids, mask=slots < SLOTS)
