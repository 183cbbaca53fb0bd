"""Gated DeltaNet in plain torch: the reference for the kernels' tests, and the CPU path.

Decodes run together, prompts one by one in chunks. Within a chunk tokens interact through the inverse of a triangular
matrix (WY form, Yang et al. 2024, https://arxiv.org/abs/2406.06484), so that only chunks depend on the previous state.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

# Tokens per chunk. Chunks end at multiples of this position, so that states there can be saved.
CHECKPOINT = 64
NORM_EPS = 1e-6


class Prefill(NamedTuple):
    """One request with several tokens: rows `begin` to `end` of the step, at positions from `position` on.

    saves: pairs (position, slot) of states to save within this step.
    """

    begin: int
    end: int
    slot: int
    position: int
    saves: tuple[tuple[int, int], ...]


class Plan(NamedTuple):
    """A step's requests: the first n have one token each, the others are `prefills`.

    slots, positions: int64 [n], of the requests with one token.
    save_rows, save_slots: int64 [m], the rows of those whose state is also saved, and the slots.
    """

    slots: Tensor
    positions: Tensor
    save_rows: Tensor
    save_slots: Tensor
    prefills: tuple[Prefill, ...]


class _Weights(Protocol):
    @property
    def conv(self) -> Tensor: ...
    @property
    def decay(self) -> Tensor: ...
    @property
    def dt_bias(self) -> Tensor: ...
    @property
    def norm(self) -> Tensor: ...
    @property
    def eps(self) -> float: ...


class _Gates(NamedTuple):
    """Per token and value head, float32 [.., Hv]: the logarithm of the state's decay, and the step size."""

    log_decay: Tensor
    beta: Tensor


def plan(slots: Tensor, saves: Tensor, seq_lens: Tensor, query_start_loc: Tensor, num_decodes: int) -> Plan:
    """Return the plan of the package's `plan_states`."""
    starts, lengths, owned = query_start_loc.tolist(), seq_lens.tolist(), slots.tolist()
    wanted: list[list[list[int]]] = saves.tolist()
    kept = [(row, slot) for row in range(num_decodes) for at, slot in wanted[row] if at == lengths[row]]
    prefills: list[Prefill] = []
    for request in range(num_decodes, len(owned)):
        begin, end = starts[request], starts[request + 1]
        first = lengths[request] - (end - begin)
        within = tuple((at, slot) for at, slot in wanted[request] if first < at <= lengths[request])
        if end > begin:
            prefills.append(Prefill(begin, end, owned[request], first, within))
    device = slots.device
    return Plan(
        slots[:num_decodes].long(),
        seq_lens[:num_decodes].long() - 1,
        torch.tensor([row for row, _ in kept], dtype=torch.long, device=device),
        torch.tensor([slot for _, slot in kept], dtype=torch.long, device=device),
        tuple(prefills),
    )


def gated_delta_net(qkvz: Tensor, ba: Tensor, weights: _Weights, recurrent: Tensor, conv: Tensor, plan: Plan) -> Tensor:
    """See the package's `gated_delta_net`."""
    _, num_v_heads, v_dim, k_dim = recurrent.shape
    num_k_heads = (conv.shape[2] - num_v_heads * v_dim) // (2 * k_dim)
    group = num_v_heads // num_k_heads
    grouped = qkvz.unflatten(1, (num_k_heads, -1))
    mixed, z = grouped.split((2 * k_dim + group * v_dim, group * v_dim), -1)
    inputs = mixed.flatten(1).to(conv.dtype)
    gates = _gates(ba.unflatten(1, (num_k_heads, 2, group)).float(), weights)
    num_decodes = len(plan.slots)
    outs: list[Tensor] = []
    if num_decodes:
        found = _convolve_one(inputs[:num_decodes], weights.conv, conv, plan)
        outs.append(_step(*_heads(found, recurrent.shape), _rows(gates, 0, num_decodes), recurrent, plan))
    for prefill in plan.prefills:
        found = _convolve(inputs[prefill.begin : prefill.end], weights.conv, conv, prefill)
        of_request = _rows(gates, prefill.begin, prefill.end)
        outs.append(_chunks(*_heads(found, recurrent.shape), of_request, recurrent, prefill))
    end = plan.prefills[-1].end if plan.prefills else num_decodes
    out = torch.zeros((len(qkvz), num_v_heads * v_dim), dtype=qkvz.dtype, device=qkvz.device)
    if outs:
        gate = functional.silu(z[:end].float()).reshape(end, num_v_heads, v_dim)
        normed = functional.rms_norm(torch.cat(outs), (v_dim,), weights.norm, weights.eps)
        out[:end] = (normed * gate).flatten(1)
    return out


def copy_states(states: Tensor, sources: Tensor, targets: Tensor) -> None:
    """See the package's `copy_states`."""
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        states[:, target].copy_(states[:, source])


def _gates(ba: Tensor, weights: _Weights) -> _Gates:
    b, a = (part.flatten(1) for part in ba.unbind(2))
    return _Gates(-weights.decay * functional.softplus(a + weights.dt_bias), b.sigmoid())


def _rows(gates: _Gates, begin: int, end: int) -> _Gates:
    return _Gates(gates.log_decay[begin:end], gates.beta[begin:end])


def _heads(mixed: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """Split `mixed` [n, C] into queries and keys [n, Hv, Dk], normed and repeated, and values [n, Hv, Dv]."""
    _, num_v_heads, v_dim, k_dim = shape
    num_k_heads = (mixed.shape[1] - num_v_heads * v_dim) // (2 * k_dim)
    group = num_v_heads // num_k_heads
    q, k, v = mixed.unflatten(1, (num_k_heads, -1)).split((k_dim, k_dim, group * v_dim), -1)
    q, k = ((x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)).repeat_interleave(group, 1) for x in (q, k))
    return q * k_dim**-0.5, k, v.reshape(-1, num_v_heads, v_dim)


def _convolve_one(inputs: Tensor, weight: Tensor, conv: Tensor, plan: Plan) -> Tensor:
    """Convolution and SiLU of one token per request: `inputs` [n, C] -> float32 [n, C]; stores them in `conv`."""
    width = len(weight)
    conv[plan.slots, plan.positions % width] = inputs
    positions = plan.positions.unsqueeze(1) + torch.arange(1 - width, 1, device=inputs.device)
    window = conv[plan.slots.unsqueeze(1), positions % width].float()
    # Before a sequence's first token the inputs are zero; the slot may hold those of another request.
    window = torch.where((positions >= 0).unsqueeze(-1), window, 0.0)
    conv[plan.save_slots] = conv[plan.slots[plan.save_rows]]
    return functional.silu((window * weight).sum(1))


def _step(q: Tensor, k: Tensor, v: Tensor, gates: _Gates, recurrent: Tensor, plan: Plan) -> Tensor:
    """Apply the delta rule to one token per request: float32 [n, Hv, Dv]; updates the states in `recurrent`."""
    begun = (plan.positions > 0).view(-1, 1, 1, 1)
    state = torch.where(begun, recurrent[plan.slots].float(), 0.0) * gates.log_decay.exp()[..., None, None]
    known = torch.matmul(state, k.unsqueeze(-1)).squeeze(-1)
    change = (v - known) * gates.beta.unsqueeze(-1)
    state.addcmul_(change.unsqueeze(-1), k.unsqueeze(-2))
    kept = state.to(recurrent.dtype)
    recurrent[plan.slots] = kept
    recurrent[plan.save_slots] = kept[plan.save_rows]
    return torch.matmul(state, q.unsqueeze(-1)).squeeze(-1)


def _convolve(inputs: Tensor, weight: Tensor, conv: Tensor, prefill: Prefill) -> Tensor:
    """Convolution and SiLU of one request's tokens: `inputs` [n, C] -> float32 [n, C]; stores the last in `conv`."""
    width = len(weight)
    before = torch.arange(prefill.position - width + 1, prefill.position, device=inputs.device)
    history = torch.where((before >= 0).unsqueeze(-1), conv[prefill.slot, before % width], 0.0)
    padded = torch.cat((history, inputs))
    last = prefill.position + len(inputs)
    for position, slot in (*prefill.saves, (last, prefill.slot)):
        begin = position - prefill.position
        conv[slot, torch.arange(position - width + 1, position, device=inputs.device) % width] = padded[
            begin : begin + width - 1
        ]
    padded = padded.float()
    out = padded[: len(inputs)] * weight[0]
    for tap in range(1, width):
        out.addcmul_(padded[tap : tap + len(inputs)], weight[tap])
    return functional.silu(out)


def _chunks(q: Tensor, k: Tensor, v: Tensor, gates: _Gates, recurrent: Tensor, prefill: Prefill) -> Tensor:
    """Apply the delta rule to one request's tokens, chunk by chunk: float32 [n, Hv, Dv]; updates its state.

    In a chunk with log decays G_i from its beginning to token i, let A be the strictly lower part of
    beta_i k_i k_j exp(G_i - G_j), and T = (1 + A)^-1. The changes to a state S are then
    T (beta v) - T (beta exp(G) k) S^T.
    """
    count, front = len(q), prefill.position % CHECKPOINT
    back = -(front + count) % CHECKPOINT
    # Pad to whole chunks with tokens that change nothing: [Hv, chunks, CHECKPOINT, ..].
    q, k, v = (_split(functional.pad(x, (0, 0, 0, 0, front, back))) for x in (q, k, v))
    log_decay, beta = (_split(functional.pad(x, (0, 0, front, back))) for x in gates)
    total = log_decay.cumsum(-1)
    causal = torch.ones(CHECKPOINT, CHECKPOINT, dtype=torch.bool, device=q.device).tril()
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
    k_beta = k * beta.unsqueeze(-1)
    system = torch.matmul(k_beta, k.mT) * between
    sides = torch.cat((v * beta.unsqueeze(-1), k_beta * total.exp().unsqueeze(-1)), -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    new_values, readers = solved.split((v.shape[-1], k.shape[-1]), -1)
    scores = torch.matmul(q, k.mT) * between
    q = q * total.exp().unsqueeze(-1)
    k = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    left = total[..., -1].exp()[..., None, None]
    slot = recurrent[prefill.slot]
    state = slot.float() if prefill.position else torch.zeros_like(slot, dtype=torch.float32)
    outs: list[Tensor] = []
    for chunk in range(q.shape[1]):
        change = new_values[:, chunk] - torch.matmul(readers[:, chunk], state.mT)
        outs.append(torch.matmul(q[:, chunk], state.mT) + torch.matmul(scores[:, chunk], change))
        state = torch.baddbmm(state * left[:, chunk], change.mT, k[:, chunk])
        reached = prefill.position - front + (chunk + 1) * CHECKPOINT
        for position, save in prefill.saves:
            if position == reached:
                recurrent[save] = state
    recurrent[prefill.slot] = state
    return torch.cat(outs, 1)[:, front : front + count].transpose(0, 1)


def _split(x: Tensor) -> Tensor:
    return x.unflatten(0, (-1, CHECKPOINT)).movedim(2, 0)
