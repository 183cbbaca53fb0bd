"""Computes decodes of Gated DeltaNet in plain torch, for caches with drafts.

A decode applies its pending tokens (accepted drafts of the previous step), then one new token, then drafts.
"""

import torch
from torch import Tensor

from nanovllm_kernels.linear_attention.layer_inputs import (
    DeltaWeights,
    DraftPlan,
    LayerSizes,
    TokensAtOffset,
    TorchPlan,
)
from nanovllm_kernels.linear_attention.token_reference import apply_tokens, compute_gates, convolve_windows, split_heads


def plan_draft_decodes(query_lens: list[int], num_pending: Tensor) -> DraftPlan:
    """Plan the decodes of a step. query_lens: tokens of each decode, at least 1. num_pending: int [n]."""
    lens = num_pending.new_tensor(query_lens, dtype=torch.long)
    decodes = torch.arange(len(lens), device=lens.device)
    first_rows = lens.cumsum(0) - lens
    token_decodes = decodes.repeat_interleave(lens)
    num_pending = num_pending.long()
    rounds: list[TokensAtOffset] = []
    for offset in range(-max(num_pending.tolist(), default=0), max(query_lens, default=0)):
        round_decodes = decodes[(-num_pending <= offset) & (offset < lens)]
        rounds.append(TokensAtOffset(offset, round_decodes, first_rows[round_decodes] + offset))
    token_offsets = torch.arange(len(token_decodes), device=lens.device) - first_rows[token_decodes]
    return DraftPlan(token_decodes, token_offsets, num_pending, tuple(rounds))


def decode(
    inputs: Tensor,
    weights: DeltaWeights,
    sizes: LayerSizes,
    states: Tensor,
    conv_states: Tensor,
    plan: TorchPlan,
    drafts: DraftPlan,
) -> Tensor:
    """Compute the outputs of all decodes before norm and gate, float32 [t, Hv, Dv], and update the decodes' caches.
    inputs: [t, C + 2 Hv], the rows to store in `conv_states` for the t tokens of all decodes.
    """
    window_inputs = _store_inputs(inputs, sizes, conv_states, plan, drafts)
    first_new_position = window_inputs.shape[1] - drafts.max_query_len
    has_state = (plan.positions > drafts.num_pending).view(-1, 1, 1, 1)
    rounded_states = torch.where(has_state, states[plan.slots], 0.0)
    outs = torch.empty((len(inputs), sizes.num_v_heads, sizes.v_dim), device=inputs.device)
    for offset, decodes, rows in drafts.rounds:
        position = first_new_position + offset
        windows = window_inputs[decodes, position - sizes.num_taps + 1 : position + 1]
        heads = split_heads(convolve_windows(windows[..., : sizes.num_channels], weights.conv), sizes)
        gates = compute_gates(windows[:, -1, sizes.num_channels :], weights, sizes)
        rounded_states[decodes], out = apply_tokens(rounded_states[decodes].float(), *heads, gates, states.dtype)
        if offset >= 0:
            outs[rows] = out
        if offset == 0:
            # Do not store later states, which include drafts. The next step applies the accepted drafts again.
            states[plan.slots] = rounded_states
            states[plan.checkpoint_slots] = rounded_states[plan.checkpoint_decodes]
    return outs


def _store_inputs(inputs: Tensor, sizes: LayerSizes, conv_states: Tensor, plan: TorchPlan, drafts: DraftPlan) -> Tensor:
    """Store `inputs` in `conv_states`. Returns each decode's earlier and new inputs, [n, positions, C + 2 Hv].

    The last `drafts.max_query_len` positions are for new inputs. Inputs before a request's first token are 0.
    """
    offsets = torch.arange(1 - sizes.num_taps - sizes.max_drafts, 0, device=inputs.device)
    old_positions = plan.positions.unsqueeze(1) + offsets
    old_inputs = conv_states[plan.slots.unsqueeze(1), old_positions % sizes.ring_rows]
    # Rows for negative positions may hold inputs of another request.
    old_inputs = torch.where((old_positions >= 0).unsqueeze(-1), old_inputs, 0.0)
    new_inputs = old_inputs.new_zeros((len(plan.slots), drafts.max_query_len, sizes.ring_width))
    new_inputs[drafts.token_decodes, drafts.token_offsets] = inputs
    positions = plan.positions[drafts.token_decodes] + drafts.token_offsets
    conv_states[plan.slots[drafts.token_decodes], positions % sizes.ring_rows] = inputs
    conv_states[plan.checkpoint_slots] = conv_states[plan.slots[plan.checkpoint_decodes]]
    return torch.cat((old_inputs, new_inputs), 1)
