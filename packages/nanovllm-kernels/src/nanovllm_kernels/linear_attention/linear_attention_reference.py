"""Computes Gated DeltaNet in plain torch: the reference for the kernels' tests, and the CPU path.

Requests with one token (decodes) run together. Prompts run one at a time, in chunks. In a chunk, a triangular system
replaces the recurrence over tokens (WY form, Yang et al. 2024, https://arxiv.org/abs/2406.06484).
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.linear_attention import draft_reference
from nanovllm_kernels.linear_attention.layer_inputs import (
    CHECKPOINT_INTERVAL,
    DeltaWeights,
    LayerSizes,
    Prefill,
    TorchPlan,
    layer_sizes,
)
from nanovllm_kernels.linear_attention.token_reference import (
    Gates,
    apply_tokens,
    compute_gates,
    convolve_windows,
    silu,
    slice_gates,
    split_heads,
)


def plan_states(
    slots: Tensor,
    checkpoints: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    num_decodes: int | None,
    num_pending: Tensor | None,
) -> TorchPlan:
    """Plan a step for plain torch. The package's `plan_states` describes the arguments.

    num_decodes: None means that all requests with tokens are decodes, perhaps with drafts.
    """
    row_starts, request_lens, request_slots = query_start_loc.tolist(), seq_lens.tolist(), slots.tolist()
    query_lens = [end - start for start, end in pairwise(row_starts)]
    pairs: list[list[list[int]]] = checkpoints.tolist()  # (position, slot) pairs of each request
    if num_decodes is None:
        decodes = [request for request, query_len in enumerate(query_lens) if query_len]
        first_prefill = len(query_lens)
    else:
        decodes, first_prefill = list(range(num_decodes)), num_decodes
    first_positions = [length - query_len for length, query_len in zip(request_lens, query_lens, strict=True)]
    decode_checkpoints = [
        (index, slot)
        for index, request in enumerate(decodes)
        for position, slot in pairs[request]
        if position == first_positions[request] + 1
    ]
    prefills: list[Prefill] = []
    for request in range(first_prefill, len(request_slots)):
        first_row, end_row, length = row_starts[request], row_starts[request + 1], request_lens[request]
        first_position = first_positions[request]
        step_pairs = tuple((position, slot) for position, slot in pairs[request] if first_position < position <= length)
        if end_row > first_row:
            prefills.append(Prefill(first_row, end_row, request_slots[request], first_position, step_pairs))
    drafts = None
    if num_pending is not None:
        drafts = draft_reference.plan_draft_decodes([query_lens[request] for request in decodes], num_pending[decodes])
    return TorchPlan(
        slots[decodes].long(),
        slots.new_tensor([first_positions[request] for request in decodes], dtype=torch.long),
        slots.new_tensor([index for index, _ in decode_checkpoints], dtype=torch.long),
        slots.new_tensor([slot for _, slot in decode_checkpoints], dtype=torch.long),
        tuple(prefills),
        drafts,
    )


def gated_delta_net(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, states: Tensor, conv_states: Tensor, plan: TorchPlan
) -> Tensor:
    """Compute the package's `gated_delta_net` for the requests of `plan`."""
    sizes = layer_sizes(weights, states, conv_states)
    num_v_heads, v_dim, group_v_dim = sizes.num_v_heads, sizes.v_dim, sizes.group_size * sizes.v_dim
    qkv, z = qkvz.unflatten(1, (sizes.num_k_heads, -1)).split((2 * sizes.k_dim + group_v_dim, group_v_dim), -1)
    inputs = qkv.flatten(1).to(conv_states.dtype)
    outs: list[Tensor] = []
    if len(plan.slots):
        outs.append(_decode(inputs, ba, weights, sizes, states, conv_states, plan))
    if plan.prefills:
        gates = compute_gates(ba, weights, sizes)
        for prefill in plan.prefills:
            request_inputs = inputs[prefill.first_row : prefill.end_row]
            heads = split_heads(_convolve_prefill(request_inputs, weights.conv, conv_states, prefill), sizes)
            request_gates = slice_gates(gates, prefill.first_row, prefill.end_row)
            outs.append(_scan_chunks(*heads, request_gates, states, prefill))
    end_row = sum(map(len, outs))
    out = torch.zeros((len(qkvz), num_v_heads * v_dim), dtype=qkvz.dtype, device=qkvz.device)
    if outs:
        gate = silu(z[:end_row].float()).reshape(end_row, num_v_heads, v_dim)
        normed = functional.rms_norm(torch.cat(outs), (v_dim,), weights.norm, weights.eps)
        out[:end_row] = (normed * gate).flatten(1)
    return out


def copy_states(states: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the state in slot sources[i] to slot targets[i] in all layers, for each i in order."""
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        states[:, target].copy_(states[:, source])


def _decode(
    inputs: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    sizes: LayerSizes,
    states: Tensor,
    conv_states: Tensor,
    plan: TorchPlan,
) -> Tensor:
    """Compute the outputs of all decodes before norm and gate, float32 [t, Hv, Dv], and update the decodes' caches."""
    if plan.drafts is not None:
        num_tokens = len(plan.drafts.token_decodes)
        rows = torch.cat((inputs[:num_tokens], ba[:num_tokens].to(conv_states.dtype)), 1)
        return draft_reference.decode(rows, weights, sizes, states, conv_states, plan, plan.drafts)
    num_decodes = len(plan.slots)
    heads = split_heads(_convolve_decodes(inputs[:num_decodes], weights.conv, conv_states, plan), sizes)
    has_state = (plan.positions > 0).view(-1, 1, 1, 1)
    old_states = torch.where(has_state, states[plan.slots].float(), 0.0)
    gates = compute_gates(ba[:num_decodes], weights, sizes)
    new_states, out = apply_tokens(old_states, *heads, gates, states.dtype)
    states[plan.slots] = new_states
    states[plan.checkpoint_slots] = new_states[plan.checkpoint_decodes]
    return out


def _convolve_decodes(inputs: Tensor, weight: Tensor, conv_states: Tensor, plan: TorchPlan) -> Tensor:
    """Apply convolution and SiLU to one token per request, and store `inputs` [n, C]. Returns float32 [n, C]."""
    num_taps = len(weight)
    conv_states[plan.slots, plan.positions % num_taps] = inputs
    positions = plan.positions.unsqueeze(1) + torch.arange(1 - num_taps, 1, device=inputs.device)
    windows = conv_states[plan.slots.unsqueeze(1), positions % num_taps]
    # Rows for negative positions may hold inputs of another request.
    windows = torch.where((positions >= 0).unsqueeze(-1), windows, 0.0)
    conv_states[plan.checkpoint_slots] = conv_states[plan.slots[plan.checkpoint_decodes]]
    return convolve_windows(windows, weight)


def _convolve_prefill(inputs: Tensor, weight: Tensor, conv_states: Tensor, prefill: Prefill) -> Tensor:
    """Apply convolution and SiLU to one request, and store the last inputs. inputs: [n, C]. Returns float32 [n, C]."""
    num_taps, first_position, device = len(weight), prefill.first_position, inputs.device
    ring_rows, num_channels = conv_states.shape[1], inputs.shape[1]
    history_positions = torch.arange(first_position - num_taps + 1, first_position, device=device)
    history = conv_states[prefill.slot, history_positions % ring_rows, :num_channels]
    extended = torch.cat((torch.where((history_positions >= 0).unsqueeze(-1), history, 0.0), inputs))
    for position, slot in (*prefill.checkpoints, (first_position + len(inputs), prefill.slot)):
        first_extended_row = position - first_position
        rows = torch.arange(position - num_taps + 1, position, device=device) % ring_rows
        conv_states[slot, rows, :num_channels] = extended[first_extended_row : first_extended_row + num_taps - 1]
    extended = extended.float()
    out = extended[: len(inputs)] * weight[0]
    for tap in range(1, num_taps):
        out.addcmul_(extended[tap : tap + len(inputs)], weight[tap])
    return functional.silu(out)


def _scan_chunks(q: Tensor, k: Tensor, v: Tensor, gates: Gates, states: Tensor, prefill: Prefill) -> Tensor:
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
