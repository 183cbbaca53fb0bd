"""Computes Gated DeltaNet for decodes in plain torch. One call computes one token of each decode.

A token's result has the same bits in any batch. Therefore this file avoids torch's silu, sigmoid and softplus, which
use a different formula for the last elements of a tensor than for the rest.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.linear_attention.layer_inputs import L2_NORM_EPS, DeltaWeights, LayerSizes

# For x above this limit, log(1 + exp(x)) is x in float32.
LINEAR_SOFTPLUS = 20.0


class Gates(NamedTuple):
    """Holds the gates, float32 [tokens, Hv]. log_decay: log of the state's decay. beta: step size of the delta rule."""

    log_decay: Tensor
    beta: Tensor


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x)."""
    return x / (1 + (-x).exp())


def compute_gates(ba: Tensor, weights: DeltaWeights, sizes: LayerSizes) -> Gates:
    """Compute the gates of all value heads. ba: [T, 2 Hv], see `gated_delta_net`."""
    b, a = ba.unflatten(1, (sizes.num_k_heads, 2, sizes.group_size)).float().unbind(2)
    x = a.flatten(1) + weights.dt_bias
    softplus = torch.where(x > LINEAR_SOFTPLUS, x, x.exp().log1p())
    return Gates(-weights.decay_rate * softplus, 1 / (1 + (-b.flatten(1)).exp()))


def slice_gates(gates: Gates, first_row: int, end_row: int) -> Gates:
    """Return the gates of the tokens first_row..end_row - 1."""
    return Gates(gates.log_decay[first_row:end_row], gates.beta[first_row:end_row])


def split_heads(convolved: Tensor, sizes: LayerSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Split `convolved` [n, C] into normed queries and keys [n, Hv, Dk], one per value head, and values [n, Hv, Dv]."""
    k_dim, group_size = sizes.k_dim, sizes.group_size
    heads = convolved.unflatten(1, (sizes.num_k_heads, -1))
    q, k, v = heads.split((k_dim, k_dim, group_size * sizes.v_dim), -1)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(group_size, 1) for x in (q, k))
    return q * k_dim**-0.5, k, v.reshape(-1, sizes.num_v_heads, sizes.v_dim)


def convolve_windows(windows: Tensor, weight: Tensor) -> Tensor:
    """Apply convolution and SiLU to each token's last inputs, [n, W, C]. Returns float32 [n, C]."""
    return silu((windows.float() * weight).sum(1))


def apply_tokens(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Apply the delta rule to one token per request. states: float32 [n, Hv, Dv, Dk].

    Returns: the new states [n, Hv, Dv, Dk], rounded to `state_dtype`, and the results, float32 [n, Hv, Dv].
    """
    states = states * gates.log_decay.exp()[..., None, None]
    predicted_v = torch.matmul(states, k.unsqueeze(-1)).squeeze(-1)
    delta = (v - predicted_v) * gates.beta.unsqueeze(-1)
    states.addcmul_(delta.unsqueeze(-1), k.unsqueeze(-2))
    return states.to(state_dtype), torch.matmul(states, q.unsqueeze(-1)).squeeze(-1)
