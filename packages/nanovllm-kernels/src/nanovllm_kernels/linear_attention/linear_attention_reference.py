"""Computes Gated DeltaNet in plain torch: the reference for the kernels' tests, and the CPU path.

Requests with one token (decodes) run together. Prompts run one at a time, in chunks. In a chunk, a triangular system
replaces the recurrence over tokens (WY form, Yang et al. 2024, https://arxiv.org/abs/2406.06484).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.linear_attention.layer_inputs import (
    CHECKPOINT_INTERVAL,
    L2_NORM_EPS,
    DeltaWeights,
    Prefill,
    TorchPlan,
    layer_sizes,
)


class _Gates(NamedTuple):
    """Holds the gates, float32 [tokens, Hv]. log_decay: log of the state's decay. beta: step size of the delta rule."""

    log_decay: Tensor
    beta: Tensor


def plan_states(
    slots: Tensor, checkpoints: Tensor, seq_lens: Tensor, query_start_loc: Tensor, num_decodes: int
) -> TorchPlan:
    """Plan a step for plain torch. The package's `plan_states` describes the arguments."""
    row_starts, request_lens, request_slots = query_start_loc.tolist(), seq_lens.tolist(), slots.tolist()
    pairs: list[list[list[int]]] = checkpoints.tolist()  # (position, slot) pairs of each request
    decode_checkpoints = [
        (row, slot) for row in range(num_decodes) for position, slot in pairs[row] if position == request_lens[row]
    ]
    prefills: list[Prefill] = []
    for request in range(num_decodes, len(request_slots)):
        first_row, end_row, length = row_starts[request], row_starts[request + 1], request_lens[request]
        first_position = length - (end_row - first_row)
        step_pairs = tuple((position, slot) for position, slot in pairs[request] if first_position < position <= length)
        if end_row > first_row:
            prefills.append(Prefill(first_row, end_row, request_slots[request], first_position, step_pairs))
    return TorchPlan(
        slots[:num_decodes].long(),
        seq_lens[:num_decodes].long() - 1,
        slots.new_tensor([row for row, _ in decode_checkpoints], dtype=torch.long),
        slots.new_tensor([slot for _, slot in decode_checkpoints], dtype=torch.long),
        tuple(prefills),
    )


def gated_delta_net(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, states: Tensor, conv_states: Tensor, plan: TorchPlan
) -> Tensor:
    """Compute the package's `gated_delta_net` for the requests of `plan`."""
    sizes = layer_sizes(states, conv_states)
    num_v_heads, v_dim, group_v_dim = sizes.num_v_heads, sizes.v_dim, sizes.group_size * sizes.v_dim
    qkv, z = qkvz.unflatten(1, (sizes.num_k_heads, -1)).split((2 * sizes.k_dim + group_v_dim, group_v_dim), -1)
    inputs = qkv.flatten(1).to(conv_states.dtype)
    gates = _compute_gates(ba.unflatten(1, (sizes.num_k_heads, 2, sizes.group_size)).float(), weights)
    num_decodes = len(plan.slots)
    outs: list[Tensor] = []
    if num_decodes:
        convolved = _convolve_decodes(inputs[:num_decodes], weights.conv, conv_states, plan)
        heads = _split_heads(convolved, states.shape)
        outs.append(_update_decodes(*heads, _slice_gates(gates, 0, num_decodes), states, plan))
    for prefill in plan.prefills:
        convolved = _convolve_prefill(inputs[prefill.first_row : prefill.end_row], weights.conv, conv_states, prefill)
        heads = _split_heads(convolved, states.shape)
        request_gates = _slice_gates(gates, prefill.first_row, prefill.end_row)
        outs.append(_scan_chunks(*heads, request_gates, states, prefill))
    end_row = plan.prefills[-1].end_row if plan.prefills else num_decodes
    out = torch.zeros((len(qkvz), num_v_heads * v_dim), dtype=qkvz.dtype, device=qkvz.device)
    if outs:
        gate = functional.silu(z[:end_row].float()).reshape(end_row, num_v_heads, v_dim)
        normed = functional.rms_norm(torch.cat(outs), (v_dim,), weights.norm, weights.eps)
        out[:end_row] = (normed * gate).flatten(1)
    return out


def copy_states(states: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the state in slot sources[i] to slot targets[i] in all layers, for each i in order."""
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        states[:, target].copy_(states[:, source])


def _compute_gates(ba: Tensor, weights: DeltaWeights) -> _Gates:
    """Compute the gates of all value heads. ba: float32 [T, Hk, 2, Hv / Hk], first b, then a."""
    b, a = (gate_input.flatten(1) for gate_input in ba.unbind(2))
    return _Gates(-weights.decay_rate * functional.softplus(a + weights.dt_bias), b.sigmoid())


def _slice_gates(gates: _Gates, first_row: int, end_row: int) -> _Gates:
    return _Gates(gates.log_decay[first_row:end_row], gates.beta[first_row:end_row])


def _split_heads(convolved: Tensor, state_shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """Split `convolved` [n, C] into normed queries and keys [n, Hv, Dk], one per value head, and values [n, Hv, Dv]."""
    _, num_v_heads, v_dim, k_dim = state_shape
    num_k_heads = (convolved.shape[1] - num_v_heads * v_dim) // (2 * k_dim)
    group_size = num_v_heads // num_k_heads
    q, k, v = convolved.unflatten(1, (num_k_heads, -1)).split((k_dim, k_dim, group_size * v_dim), -1)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(group_size, 1) for x in (q, k))
    return q * k_dim**-0.5, k, v.reshape(-1, num_v_heads, v_dim)


def _convolve_decodes(inputs: Tensor, weight: Tensor, conv_states: Tensor, plan: TorchPlan) -> Tensor:
    """Apply convolution and SiLU to one token per request, and store `inputs` [n, C]. Returns float32 [n, C]."""
    num_taps = len(weight)
    conv_states[plan.slots, plan.positions % num_taps] = inputs
    positions = plan.positions.unsqueeze(1) + torch.arange(1 - num_taps, 1, device=inputs.device)
    window = conv_states[plan.slots.unsqueeze(1), positions % num_taps].float()
    # Rows for negative positions may hold inputs of another request.
    window = torch.where((positions >= 0).unsqueeze(-1), window, 0.0)
    conv_states[plan.checkpoint_slots] = conv_states[plan.slots[plan.checkpoint_rows]]
    return functional.silu((window * weight).sum(1))


def _update_decodes(q: Tensor, k: Tensor, v: Tensor, gates: _Gates, states: Tensor, plan: TorchPlan) -> Tensor:
    """Apply the delta rule to one token per request, and store the new states. Returns float32 [n, Hv, Dv]."""
    has_state = (plan.positions > 0).view(-1, 1, 1, 1)
    state = torch.where(has_state, states[plan.slots].float(), 0.0) * gates.log_decay.exp()[..., None, None]
    predicted_v = torch.matmul(state, k.unsqueeze(-1)).squeeze(-1)
    delta = (v - predicted_v) * gates.beta.unsqueeze(-1)
    state.addcmul_(delta.unsqueeze(-1), k.unsqueeze(-2))
    rounded = state.to(states.dtype)
    states[plan.slots] = rounded
    states[plan.checkpoint_slots] = rounded[plan.checkpoint_rows]
    return torch.matmul(state, q.unsqueeze(-1)).squeeze(-1)


def _convolve_prefill(inputs: Tensor, weight: Tensor, conv_states: Tensor, prefill: Prefill) -> Tensor:
    """Apply convolution and SiLU to one request, and store the last inputs. inputs: [n, C]. Returns float32 [n, C]."""
    num_taps, first_position, device = len(weight), prefill.first_position, inputs.device
    history_positions = torch.arange(first_position - num_taps + 1, first_position, device=device)
    history = conv_states[prefill.slot, history_positions % num_taps]
    extended = torch.cat((torch.where((history_positions >= 0).unsqueeze(-1), history, 0.0), inputs))
    for position, slot in (*prefill.checkpoints, (first_position + len(inputs), prefill.slot)):
        first_extended_row = position - first_position
        rows = torch.arange(position - num_taps + 1, position, device=device) % num_taps
        conv_states[slot, rows] = extended[first_extended_row : first_extended_row + num_taps - 1]
    extended = extended.float()
    out = extended[: len(inputs)] * weight[0]
    for tap in range(1, num_taps):
        out.addcmul_(extended[tap : tap + len(inputs)], weight[tap])
    return functional.silu(out)


def _scan_chunks(q: Tensor, k: Tensor, v: Tensor, gates: _Gates, states: Tensor, prefill: Prefill) -> Tensor:
    """Apply the delta rule to one request's tokens, chunk by chunk, and store the new state. Returns [n, Hv, Dv].

    G_i is the logarithm of the decay from the chunk's beginning to token i. A_ij is beta_i (k_i k_j) exp(G_i - G_j) for
    j < i, and 0 for other j. T = (1 + A)^-1;  wy_values = T (beta v);  wy_keys = T (beta exp(G) k).
    S is the chunk's initial state. delta_i is row i of wy_values - wy_keys S^T. Token i adds delta_i k_i^T to S.
    """
    num_tokens, front_padding = len(q), prefill.first_position % CHECKPOINT_INTERVAL
    back_padding = -(front_padding + num_tokens) % CHECKPOINT_INTERVAL
    # Padding completes the first and the last chunk. Its zeros leave the state unchanged.
    q, k, v = (_split_chunks(functional.pad(x, (0, 0, 0, 0, front_padding, back_padding))) for x in (q, k, v))
    log_decay, beta = (_split_chunks(functional.pad(x, (0, 0, front_padding, back_padding))) for x in gates)
    cumulative = log_decay.cumsum(-1)  # G in the formulas
    causal = torch.ones(CHECKPOINT_INTERVAL, CHECKPOINT_INTERVAL, dtype=torch.bool, device=q.device).tril()
    pair_decay = (cumulative.unsqueeze(-1) - cumulative.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
    k_beta = k * beta.unsqueeze(-1)
    system = torch.matmul(k_beta, k.mT) * pair_decay
    right_sides = torch.cat((v * beta.unsqueeze(-1), k_beta * cumulative.exp().unsqueeze(-1)), -1)
    solutions = torch.linalg.solve_triangular(system, right_sides, upper=False, unitriangular=True)
    wy_values, wy_keys = solutions.split((v.shape[-1], k.shape[-1]), -1)
    scores = torch.matmul(q, k.mT) * pair_decay
    q = q * cumulative.exp().unsqueeze(-1)
    k = k * (cumulative[..., -1:] - cumulative).exp().unsqueeze(-1)
    chunk_decay = cumulative[..., -1].exp()[..., None, None]
    slot_state = states[prefill.slot]
    state = slot_state.float() if prefill.first_position else torch.zeros_like(slot_state, dtype=torch.float32)
    outs: list[Tensor] = []
    for chunk in range(q.shape[1]):
        deltas = wy_values[:, chunk] - torch.matmul(wy_keys[:, chunk], state.mT)
        outs.append(torch.matmul(q[:, chunk], state.mT) + torch.matmul(scores[:, chunk], deltas))
        state = torch.baddbmm(state * chunk_decay[:, chunk], deltas.mT, k[:, chunk])
        end_position = prefill.first_position - front_padding + (chunk + 1) * CHECKPOINT_INTERVAL
        for position, slot in prefill.checkpoints:
            if position == end_position:
                states[slot] = state
    states[prefill.slot] = state
    return torch.cat(outs, 1)[:, front_padding : front_padding + num_tokens].transpose(0, 1)


def _split_chunks(x: Tensor) -> Tensor:
    """Split [n, Hv, ..] into [Hv, chunks, CHECKPOINT_INTERVAL, ..]."""
    return x.unflatten(0, (-1, CHECKPOINT_INTERVAL)).movedim(2, 0)
