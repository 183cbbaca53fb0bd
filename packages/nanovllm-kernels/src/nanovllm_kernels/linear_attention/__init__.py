"""Gated DeltaNet (Yang et al. 2025, https://arxiv.org/abs/2412.06464): linear attention whose memory is one matrix.

A request's state lies in a slot: per layer the recurrent matrices of the heads, and the convolution's last inputs. On
CUDA a layer is one Triton kernel for decodes, and a few kernels chunk by chunk for prompts; `reference` is plain torch.
"""

from typing import Literal

import torch
from torch import Tensor

from nanovllm_kernels.linear_attention import reference
from nanovllm_kernels.linear_attention.layer_inputs import CHECKPOINT_INTERVAL, DeltaWeights, StateBatch

__all__ = [
    "CHECKPOINT_INTERVAL",
    "Backend",
    "DeltaWeights",
    "StateBatch",
    "copy_states",
    "gated_delta_net",
    "plan_states",
]

Backend = Literal["torch", "triton"]


def plan_states(
    slots: Tensor,
    saves: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    num_decodes: int | None,
    max_query_len: int,
    num_tokens: int,
    backend: Backend,
) -> StateBatch:
    """Prepare a step for its recurrent layers, once for all of them.

    slots: int32 [B], each request's state slot, unique except slot 0, which is for padding and holds undefined values.
        A request without computed tokens starts from a state of zeros, whatever its slot holds.
    saves: int32 [B, S, 2], pairs (position, slot): when a request has processed exactly `position` tokens, within this
        step, its state is also written to `slot`. Positions are multiples of CHECKPOINT_INTERVAL; 0 for an unused pair.
    seq_lens: int32 [B], tokens of each request, including this step's.
    query_start_loc: int32 [B + 1], each request's first token in the step.
    num_decodes: leading requests with exactly one token. None: unknown to the host (not for "torch"); launches then
        cover every case, so that a captured graph can be replayed for any lengths within the bounds.
    max_query_len: bound on the tokens per request. num_tokens: bound on the tokens of the step.
    backend: "torch" runs everywhere, but waits for the device on CUDA. "triton" needs CUDA or Triton's interpreter,
        never waits, and allows requests without tokens.
    """
    torch_plan = None
    if backend == "torch":
        if num_decodes is None:
            raise ValueError('num_decodes is None, but the backend "torch" needs it')
        torch_plan = reference.plan_states(slots, saves, seq_lens, query_start_loc, num_decodes)
    return StateBatch(slots, saves, seq_lens, query_start_loc, num_decodes, max_query_len, num_tokens, torch_plan)


def gated_delta_net(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, recurrent: Tensor, conv: Tensor, batch: StateBatch
) -> Tensor:
    """Compute a layer from its projections to its gated norm: causal convolution, SiLU, gated delta rule, norm, gate.

    For a value head with its key head's query and key, both normed to length 1 and the query scaled by Dk^-0.5:
    S = exp(-decay * softplus(a + dt_bias)) * S;  S += sigmoid(b) * (v - S k) k^T;  o = S q;
    the result is the RMSNorm of o times silu(z).

    qkvz: [T, Hk * (2 Dk + 2 Hv / Hk * Dv)], per key head its query, key, value heads, and the value heads' gates z;
        rows contiguous.
    ba: [T, 2 Hv], per key head the b of its value heads, then their a; qkvz's dtype.
    recurrent: [num_slots, Hv, Dv, Dk], the matrices S, of 2 or 4 bytes per element, contiguous; computed in float32.
    conv: [num_slots, W, C], contiguous; row p % W holds the convolution's input at position p, rounded to conv's dtype.
    Both states are overwritten in the slots of `batch`. Returns [T, Hv * Dv] in qkvz's dtype.
    """
    if batch.torch_plan is not None:
        return reference.gated_delta_net(qkvz, ba, weights, recurrent, conv, batch.torch_plan)
    return _gated_delta_net_op(
        qkvz,
        ba,
        weights.conv,
        weights.decay,
        weights.dt_bias,
        weights.norm,
        weights.eps,
        recurrent,
        conv,
        batch.slots,
        batch.saves,
        batch.seq_lens,
        batch.query_start_loc,
        batch.num_decodes,
        batch.max_query_len,
    )


def copy_states(states: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the states of whole slots, in order and in place: each copy sees the results of the copies before it.

    states: [layers, num_slots, ...], contiguous. sources, targets: int64 [n], the slots to read and to overwrite.
    """
    if states.is_cuda:
        _copy_states_op(states, sources, targets)
    else:
        reference.copy_states(states, sources, targets)


@torch.library.custom_op("nanovllm::copy_states", mutates_args=("states",))
def _copy_states_op(states: Tensor, sources: Tensor, targets: Tensor) -> None:
    from nanovllm_kernels.linear_attention import triton_copy_states

    triton_copy_states.copy_states(states, sources, targets)


@torch.library.custom_op("nanovllm::gated_delta_net", mutates_args=("recurrent", "conv"))
def _gated_delta_net_op(
    qkvz: Tensor,
    ba: Tensor,
    conv_weight: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    recurrent: Tensor,
    conv: Tensor,
    slots: Tensor,
    saves: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    num_decodes: int | None,
    max_query_len: int,
) -> Tensor:
    from nanovllm_kernels.linear_attention import triton_decode, triton_prefill

    out = qkvz.new_empty((qkvz.shape[0], recurrent.shape[1] * recurrent.shape[2]))
    weights = DeltaWeights(conv_weight, decay, dt_bias, norm_weight, eps)
    batch = StateBatch(slots, saves, seq_lens, query_start_loc, num_decodes, max_query_len, qkvz.shape[0], None)
    if num_decodes != 0:
        triton_decode.decode(qkvz, ba, weights, recurrent, conv, batch, out)
    if max_query_len > 1:
        triton_prefill.prefill(qkvz, ba, weights, recurrent, conv, batch, out)
    return out


@_gated_delta_net_op.register_fake
def _(
    qkvz: Tensor,
    _ba: Tensor,
    _conv_weight: Tensor,
    _decay: Tensor,
    _dt_bias: Tensor,
    _norm_weight: Tensor,
    _eps: float,
    recurrent: Tensor,
    *_: object,
) -> Tensor:
    return qkvz.new_empty((qkvz.shape[0], recurrent.shape[1] * recurrent.shape[2]))
