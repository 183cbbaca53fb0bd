"""Runs one layer of Gated DeltaNet over requests whose drafts are accepted and rejected at random."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_kernels.linear_attention import (
    DeltaWeights,
    conv_state_shape,
    copy_states,
    gated_delta_net,
    plan_states,
)

NUM_TAPS, EPS = 4, 1e-6


@dataclass(frozen=True)
class LayerShape:
    num_k_heads: int = 1
    num_v_heads: int = 1
    k_dim: int = 16
    v_dim: int = 16

    @property
    def num_channels(self) -> int:
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim


def make_weights(shape: LayerShape, generator: torch.Generator, device: str = "cpu") -> DeltaWeights:
    weights = (
        torch.randn((NUM_TAPS, shape.num_channels), generator=generator) * 0.5,
        torch.rand(shape.num_v_heads, generator=generator) * 2 + 0.01,
        torch.randn(shape.num_v_heads, generator=generator),
        torch.rand(shape.v_dim, generator=generator) + 0.1,
    )
    return DeltaWeights(*(weight.to(device) for weight in weights), EPS)


def make_tokens(shape: LayerShape, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Rows of projections [*size, width]: `qkvz`, then `ba`."""
    width = shape.num_channels + shape.num_v_heads * (shape.v_dim + 2)
    return torch.randn((*size, width), generator=generator)


class LayerCache:
    """Caches of one layer, filled with NaN. Request i has slot 1 + i.

    max_drafts: None for caches without drafts.
    num_computed, num_pending: int32 [requests], what the engine stores.
    """

    def __init__(
        self,
        shape: LayerShape,
        weights: DeltaWeights,
        num_requests: int,
        num_slots: int,
        *,
        max_drafts: int | None,
        state_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        backend: str = "torch",
        device: str = "cpu",
    ):
        self.shape, self.weights, self.backend, self.dtype, self.device = shape, weights, backend, dtype, device
        self.has_ring = max_drafts is not None
        ring = conv_state_shape(NUM_TAPS, shape.num_channels, shape.num_v_heads, max_drafts or 0)
        states = torch.full((num_slots, shape.num_v_heads, shape.v_dim, shape.k_dim), torch.nan, dtype=state_dtype)
        self.states = states.to(device)
        self.conv_states = torch.full((num_slots, *ring), torch.nan, dtype=dtype, device=device)
        self.num_computed = torch.zeros(num_requests, dtype=torch.int32)
        self.num_pending = torch.zeros(num_requests, dtype=torch.int32)

    def copy(self, source: Tensor, target: Tensor) -> None:
        for cache in (self.states, self.conv_states):
            copy_states(cache.unsqueeze(0), source.to(self.device), target.to(self.device))

    def conv_inputs(self, slots: Tensor, positions: Tensor) -> Tensor:
        """The inputs of the convolution before each position that the next token needs: [n, NUM_TAPS - 1, C]."""
        before = positions.unsqueeze(1) + torch.arange(1 - NUM_TAPS, 0)
        rows = self.conv_states[slots.unsqueeze(1), before % self.conv_states.shape[1], : self.shape.num_channels]
        return torch.where((before >= 0).unsqueeze(-1), rows, 0.0)

    def run(
        self,
        requests: Tensor,
        tokens: Tensor,
        query_lens: Tensor,
        *,
        num_decodes: int | None = None,
        has_drafts: bool = False,
        checkpoints: Tensor | None = None,
    ) -> Tensor:
        """Run a step of `requests` (int64 [n]), and count all tokens as computed. Returns the results of all tokens.

        tokens: [sum(query_lens), width], see `make_tokens`. query_lens: int64 [n].
        """
        shape, device = self.shape, self.device
        self.num_computed[requests] += query_lens.int()
        pairs = torch.zeros((len(requests), 1, 2), dtype=torch.int32) if checkpoints is None else checkpoints
        qkvz, ba = tokens.to(device, self.dtype).split(
            (tokens.shape[1] - 2 * shape.num_v_heads, 2 * shape.num_v_heads), 1
        )
        batch = plan_states(
            (requests + 1).int().to(device),
            pairs.to(device),
            self.num_computed[requests].to(device),
            torch.cat((query_lens.new_zeros(1), query_lens.cumsum(0))).int().to(device),
            num_decodes=num_decodes,
            max_query_len=int(query_lens.max()),
            num_tokens=len(tokens),
            backend=self.backend,
            num_pending=self.num_pending[requests].to(device) if self.has_ring else None,
            has_drafts=has_drafts,
        )
        out = gated_delta_net(qkvz, ba, self.weights, self.states, self.conv_states, batch)
        self.num_pending[requests] = 0
        return out.cpu()

    def reject(self, requests: Tensor, query_lens: Tensor, num_accepted: Tensor) -> None:
        """Correct the counts after a step with drafts: each request has accepted `num_accepted` of its drafts."""
        self.num_computed[requests] -= (query_lens - 1 - num_accepted).int()
        self.num_pending[requests] = num_accepted.int()
