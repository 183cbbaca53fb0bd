"""Gated DeltaNet (Yang et al. 2025, https://arxiv.org/abs/2412.06464): attention whose memory of tokens is one matrix.

This room must not know models, nor who owns a slot. A request's state lies in a slot: of each layer the recurrent
matrices of its heads and the last inputs of its convolution. From a layer's projections to its gated norm a token of a
decode is one Triton kernel on CUDA, and prompts go chunk by chunk through a few; elsewhere it is the plain torch of
`reference`.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.linear_attention import reference
from nanovllm_kernels.linear_attention.reference import CHECKPOINT

__all__ = ["CHECKPOINT", "Backend", "DeltaWeights", "StateBatch", "copy_states", "gated_delta_net", "plan_states"]

Backend = Literal["torch", "triton"]


@dataclass(frozen=True, slots=True)
class StateBatch:
    """What recurrent layers must know of a step's batch, the same for each of them. Made by `plan_states`.

    plan: what plain torch works out once a step, else None. The rest: as given to `plan_states`.
    """

    slots: Tensor
    saves: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    num_decodes: int | None
    max_query_len: int
    num_tokens: int
    plan: reference.Plan | None


class DeltaWeights(NamedTuple):
    """A layer's weights besides its projections, for Hk key heads of Dk, each with Hv / Hk value heads of Dv.

    conv: float32 [W, C], the oldest tap first; its C channels are each key head's query, its key, and its value heads.
    decay: float32 [Hv], the exponential of what checkpoints call A_log. dt_bias: float32 [Hv]. norm: float32 [Dv].
    eps: the norm's.
    """

    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


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

    slots: int32 [B], where each request's state lies. No two requests share one, but for slot 0, which is for padding
        and whose content means nothing. A request that has no token yet begins with a state of zeros, whatever its slot
        holds.
    saves: int32 [B, S, 2], pairs of a position and a slot: once a request's state has taken in exactly so many of its
        tokens, within this step, it is written to that slot too. Positions are multiples of CHECKPOINT; 0 is for none.
    seq_lens: int32 [B], tokens of each request, this step's included. query_start_loc: int32 [B + 1], where each
        request's tokens of this step begin.
    num_decodes: how many leading requests have exactly one token; None where the host doesn't know (not for "torch"):
        then the launches cover every case, so that a captured graph may be replayed for any lengths within the bounds.
    max_query_len: the most tokens that a request may have, num_tokens: that the step may have; known to the host.
    backend: "torch" runs everywhere, but waits for the device on CUDA. "triton" needs a CUDA device, or its
        interpreter, and never waits for it; a request may then have no token.
    """
    plan = None
    if backend == "torch":
        if num_decodes is None:
            raise ValueError('num_decodes is None, but the backend "torch" needs it')
        plan = reference.plan(slots, saves, seq_lens, query_start_loc, num_decodes)
    return StateBatch(slots, saves, seq_lens, query_start_loc, num_decodes, max_query_len, num_tokens, plan)


def gated_delta_net(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, recurrent: Tensor, conv: Tensor, batch: StateBatch
) -> Tensor:
    """A layer from its projections to its gated norm: causal convolution, SiLU, gated delta rule, norm, gate.

    Of a value head with its key head's query and key, both of length 1 and the query by Dk^-0.5:
    S = exp(-decay * softplus(a + dt_bias)) * S;  S += sigmoid(b) * (v - S k) k^T;  o = S q;
    and the result is the RMSNorm of o times silu(z).

    qkvz: [T, Hk * (2 Dk + 2 Hv / Hk * Dv)], of each key head its query, its key, its value heads, and their gates z;
        rows contiguous. ba: [T, 2 Hv], of each key head the b of its value heads, then their a. Both of one dtype.
    recurrent: [num_slots, Hv, Dv, Dk], the matrices S, floating-point numbers of 2 or 4 bytes; computed in float32.
    conv: [num_slots, W, C]: the convolution's input at position p lies in row p % W of a slot. Its inputs are rounded
        to its dtype first.
    Both are contiguous, and overwritten in the slots of `batch`. Returns [T, Hv * Dv] in the dtype of `qkvz`.
    """
    if batch.plan is not None:
        return reference.gated_delta_net(qkvz, ba, weights, recurrent, conv, batch.plan)
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
    """Copy the states of whole slots, in order: a copy reads what the copies before it wrote. Takes no other memory.

    states: [layers, num_slots, ...], contiguous. sources, targets: int64 [n], the slots to read and to overwrite.
    """
    if states.is_cuda:
        _copy_states_op(states, sources, targets)
    else:
        reference.copy_states(states, sources, targets)


@torch.library.custom_op("nanovllm::copy_states", mutates_args=("states",))
def _copy_states_op(states: Tensor, sources: Tensor, targets: Tensor) -> None:
    from nanovllm_kernels.linear_attention import triton_copy

    triton_copy.copy_states(states, sources, targets)


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
    from nanovllm_kernels.linear_attention import triton_chunk, triton_step

    out = qkvz.new_empty((qkvz.shape[0], recurrent.shape[1] * recurrent.shape[2]))
    weights = DeltaWeights(conv_weight, decay, dt_bias, norm_weight, eps)
    batch = StateBatch(slots, saves, seq_lens, query_start_loc, num_decodes, max_query_len, qkvz.shape[0], None)
    if num_decodes != 0:
        triton_step.step(qkvz, ba, weights, recurrent, conv, batch, out)
    if max_query_len > 1:
        triton_chunk.prefill(qkvz, ba, weights, recurrent, conv, batch, out)
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
