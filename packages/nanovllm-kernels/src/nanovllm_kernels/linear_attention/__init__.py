"""Computes Gated DeltaNet (Yang et al. 2025, https://arxiv.org/abs/2412.06464), a linear attention.

Each layer stores a request's state in a slot: one matrix per value head, and the last inputs of the convolution.
"""

from typing import Literal

import torch
from torch import Tensor

from nanovllm_kernels.linear_attention import linear_attention_reference
from nanovllm_kernels.linear_attention.layer_inputs import (
    CHECKPOINT_INTERVAL,
    DeltaWeights,
    StateBatch,
    check_drafts,
    conv_state_shape,
    layer_sizes,
)

__all__ = [
    "CHECKPOINT_INTERVAL",
    "Backend",
    "DeltaWeights",
    "StateBatch",
    "conv_state_shape",
    "copy_states",
    "gated_delta_net",
    "plan_states",
]

Backend = Literal["torch", "triton"]


def plan_states(
    slots: Tensor,
    checkpoints: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    num_decodes: int | None,
    max_query_len: int,
    num_tokens: int,
    backend: Backend,
    num_pending: Tensor | None = None,
    has_drafts: bool = False,
) -> StateBatch:
    """Prepare a step of B requests, once for all recurrent layers.

    slots: int32 [B], each request's state slot. Padding requests share slot 0, and all other slots are unique. A
        request whose first token is in this step starts from a state of zeros.
    checkpoints: int32 [B, S, 2], S pairs (position, slot) per request. After `position` tokens, the layer also writes
        the request's state to `slot`. Positions are multiples of CHECKPOINT_INTERVAL. An unused pair has position 0.
    seq_lens: int32 [B], number of each request's tokens, including this step's.
    query_start_loc: int32 [B + 1], index of each request's first token in the step, then the number of tokens. A
        request may have no tokens.
    num_decodes: number of requests with one token in this step. These requests come first. None: unknown. A captured
        graph then supports any query lengths up to `max_query_len`. "torch" does not allow None.
    max_query_len: maximum number of tokens of a request in the step.
    num_tokens: maximum number of tokens in the step.
    backend: "torch" runs everywhere, but waits for the device on CUDA. "triton" needs CUDA or Triton's interpreter,
        and never waits.
    num_pending: int32 [B], for caches with drafts (see `gated_delta_net`): number of accepted drafts of the request's
        previous step, 0 if that step had no drafts. In a step without drafts, the number must be 0 for requests with
        several tokens. None: the caches hold no drafts.
    has_drafts: whether each request is a decode whose tokens after the first are drafts. `num_decodes` is then ignored.

    Raises ValueError if `has_drafts` is set without `num_pending`, or if `num_decodes` is None for
    "torch" without `has_drafts`.
    """
    if has_drafts and num_pending is None:
        raise ValueError("has_drafts is set, but num_pending is None: pass the accepted drafts of the previous step")
    torch_plan = None
    if backend == "torch":
        if num_decodes is None and not has_drafts:
            raise ValueError('num_decodes is None, but the backend "torch" needs it')
        torch_plan = linear_attention_reference.plan_states(
            slots, checkpoints, seq_lens, query_start_loc, None if has_drafts else num_decodes, num_pending
        )
    requests = slots, checkpoints, seq_lens, query_start_loc
    return StateBatch(*requests, num_decodes, max_query_len, num_tokens, num_pending, has_drafts, torch_plan)


def gated_delta_net(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, states: Tensor, conv_states: Tensor, batch: StateBatch
) -> Tensor:
    """Compute a layer without its projections: causal convolution, SiLU, gated delta rule, norm and gate.

    `DeltaWeights` defines the sizes Hk, Dk, Hv, Dv, W and C. T is the number of tokens.
    The recurrence of a value head uses the query q and key k of its key head, both scaled to length 1:
    S = exp(-decay_rate * softplus(a + dt_bias)) * S;  S += sigmoid(b) * (v - S k) k^T;  o = S q * Dk^-0.5.
    The result is RMSNorm(o) * silu(z).

    qkvz: [T, Hk * (2 Dk + 2 Hv / Hk * Dv)], rows contiguous. For each key head: its query, key and value heads,
        then a gate z per value head.
    ba: [T, 2 Hv], dtype of `qkvz`. For each key head: b of its value heads, then a of its value heads.
    states: [num_state_slots, Hv, Dv, Dk], contiguous, 2 or 4 bytes per element: the matrices S, updated in place.
    conv_states: [num_state_slots, R, D], contiguous, updated in place. `conv_state_shape` gives R and D. Row p % R
        holds the inputs at position p.
    Returns: [T, Hv * Dv] in the dtype of `qkvz`.

    With caches for drafts (R > W), a decode is one accepted token, followed by drafts. The stored state then includes
    this first token, but no drafts. `conv_states` holds the inputs of the drafts. The request's next step first applies
    the accepted drafts, called pending tokens (`StateBatch.num_pending`). Pending tokens are computed and rounded
    exactly as the first token of a decode. Prompts are computed in chunks and leave no pending tokens.
    Raises ValueError if the caches do not fit the step's drafts.
    """
    check_drafts(layer_sizes(weights, states, conv_states), batch)
    if batch.torch_plan is not None:
        return linear_attention_reference.gated_delta_net(qkvz, ba, weights, states, conv_states, batch.torch_plan)
    requests = batch.slots, batch.checkpoints, batch.seq_lens, batch.query_start_loc
    caches = states, conv_states
    bounds = batch.num_decodes, batch.max_query_len, batch.has_drafts
    return _gated_delta_net_op(qkvz, ba, *weights, *caches, *requests, batch.num_pending, *bounds)


def copy_states(states: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the state in slot sources[i] to slot targets[i] (both int64 [n]) in all layers, for each i in order.

    states: [layers, num_state_slots, ...], contiguous.
    """
    if states.is_cuda:
        _copy_states_op(states, sources, targets)
    else:
        linear_attention_reference.copy_states(states, sources, targets)


@torch.library.custom_op("nanovllm::copy_states", mutates_args=("states",))
def _copy_states_op(states: Tensor, sources: Tensor, targets: Tensor) -> None:
    from nanovllm_kernels.linear_attention import triton_copy_states

    triton_copy_states.copy_states(states, sources, targets)


@torch.library.custom_op("nanovllm::gated_delta_net", mutates_args=("states", "conv_states"))
def _gated_delta_net_op(
    qkvz: Tensor,
    ba: Tensor,
    conv_weight: Tensor,
    decay_rate: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    states: Tensor,
    conv_states: Tensor,
    slots: Tensor,
    checkpoints: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    num_pending: Tensor | None,
    num_decodes: int | None,
    max_query_len: int,
    has_drafts: bool,
) -> Tensor:
    from nanovllm_kernels.linear_attention import triton_decode, triton_drafts, triton_prefill

    out = qkvz.new_empty((qkvz.shape[0], states.shape[1] * states.shape[2]))
    weights = DeltaWeights(conv_weight, decay_rate, dt_bias, norm_weight, eps)
    requests, num_tokens = (slots, checkpoints, seq_lens, query_start_loc), qkvz.shape[0]
    batch = StateBatch(*requests, num_decodes, max_query_len, num_tokens, num_pending, has_drafts, None)
    decode = triton_decode.decode if num_pending is None else triton_drafts.decode
    if has_drafts or num_decodes != 0:
        decode(qkvz, ba, weights, states, conv_states, batch, out)
    if max_query_len > 1 and not has_drafts:
        triton_prefill.prefill(qkvz, ba, weights, states, conv_states, batch, out)
    return out


_gated_delta_net_op.register_fake(
    lambda qkvz, _ba, _conv_weight, _decay_rate, _dt_bias, _norm, _eps, states, *_: qkvz.new_empty(
        (qkvz.shape[0], states.shape[1] * states.shape[2])
    )
)
