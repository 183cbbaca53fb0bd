"""Runs one layer of Gated DeltaNet over requests whose drafts are accepted and rejected at random."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_kernels.linear_attention import (
    CHECKPOINT_INTERVAL,
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


@dataclass(frozen=True)
class TraceSettings:
    """A trace is a request with random drafts.

    prompt_lens: numbers of tokens before the traces. The last number must not be 0.
    plain_has_ring: whether the cache of the run without drafts also has rows for drafts.
    """

    num_traces: int
    num_steps: int
    prompt_lens: Sequence[int]
    shape: LayerShape = LayerShape()
    max_drafts: int = 3
    backend: str = "torch"
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    plain_has_ring: bool = False


def make_weights(shape: LayerShape, generator: torch.Generator) -> DeltaWeights:
    return DeltaWeights(
        torch.randn((NUM_TAPS, shape.num_channels), generator=generator) * 0.5,
        torch.rand(shape.num_v_heads, generator=generator) * 2 + 0.01,
        torch.randn(shape.num_v_heads, generator=generator),
        torch.rand(shape.v_dim, generator=generator) + 0.1,
        EPS,
    )


def make_tokens(shape: LayerShape, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return random rows of projections [*size, width]: `qkvz`, then `ba`."""
    width = shape.num_channels + shape.num_v_heads * (shape.v_dim + 2)
    return torch.randn((*size, width), generator=generator)


class LayerCache:
    """Caches of one layer, filled with NaN. Request i has slot 1 + i. max_drafts: 0 for caches without drafts."""

    def __init__(
        self, settings: TraceSettings, weights: DeltaWeights, num_requests: int, num_slots: int, max_drafts: int
    ):
        shape, device = settings.shape, settings.device
        self.settings, self.has_ring = settings, max_drafts > 0
        self.weights = DeltaWeights(*(weight.to(device) for weight in weights[:4]), weights.eps)
        state_shape = num_slots, shape.num_v_heads, shape.v_dim, shape.k_dim
        ring_shape = conv_state_shape(NUM_TAPS, shape.num_channels, shape.num_v_heads, max_drafts)
        self.states = torch.full(state_shape, torch.nan, dtype=settings.state_dtype, device=device)
        self.conv_states = torch.full((num_slots, *ring_shape), torch.nan, dtype=settings.dtype, device=device)
        self.num_computed = torch.zeros(num_requests, dtype=torch.int32)
        self.num_pending = torch.zeros(num_requests, dtype=torch.int32)

    def copy(self, source: Tensor, target: Tensor) -> None:
        for cache in (self.states, self.conv_states):
            copy_states(cache.unsqueeze(0), source.to(cache.device), target.to(cache.device))

    def read_states(self, slots: Tensor) -> Tensor:
        return self.states[slots.to(self.states.device)].cpu()

    def read_conv_inputs(self, slots: Tensor, position: int) -> Tensor:
        """Return the convolution inputs before `position`: [n, NUM_TAPS - 1, C]."""
        rows = torch.arange(position - NUM_TAPS + 1, position) % self.conv_states.shape[1]
        return self.conv_states.cpu()[slots.unsqueeze(1), rows, : self.settings.shape.num_channels]

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
        """requests, query_lens: int64 [n]. tokens: [sum(query_lens), width], see `make_tokens`."""
        device, gates_width = self.settings.device, 2 * self.settings.shape.num_v_heads
        self.num_computed[requests] += query_lens.int()
        pairs = torch.zeros((len(requests), 1, 2), dtype=torch.int32) if checkpoints is None else checkpoints
        tokens = tokens.to(device, self.settings.dtype)
        qkvz, ba = tokens.split((tokens.shape[1] - gates_width, gates_width), 1)
        batch = plan_states(
            (requests + 1).int().to(device),
            pairs.to(device),
            self.num_computed[requests].to(device),
            torch.cat((query_lens.new_zeros(1), query_lens.cumsum(0))).int().to(device),
            num_decodes=num_decodes,
            max_query_len=int(query_lens.max()),
            num_tokens=len(tokens),
            backend=self.settings.backend,
            num_pending=self.num_pending[requests].to(device) if self.has_ring else None,
            has_drafts=has_drafts,
        )
        out = gated_delta_net(qkvz, ba, self.weights, self.states, self.conv_states, batch)
        self.num_pending[requests] = 0
        return out.cpu()

    def reject(self, requests: Tensor, query_lens: Tensor, num_accepted: Tensor) -> None:
        self.num_computed[requests] -= (query_lens - 1 - num_accepted).int()
        self.num_pending[requests] = num_accepted.int()


class DraftTraces:
    """Compares random traces with a run of the same tokens without drafts.

    Slots from 1 on: traces, prompts, checkpoints of traces, checkpoints of prompts.
    """

    def __init__(self, settings: TraceSettings, seed: int):
        self.settings = settings
        num_traces, num_prompts = settings.num_traces, len(settings.prompt_lens)
        self.generator = torch.Generator().manual_seed(seed)
        self.traces = torch.arange(num_traces)
        self.trace_checkpoint_slots = num_traces + num_prompts + 1 + self.traces
        self.prompt_checkpoint_slots = 2 * num_traces + num_prompts + 1 + torch.arange(num_prompts)
        weights = make_weights(settings.shape, self.generator)
        num_requests, num_slots = num_traces + num_prompts, 2 * (num_traces + num_prompts) + 1
        self.plain, self.drafted = (
            LayerCache(settings, weights, num_requests, num_slots, max_drafts)
            for max_drafts in (settings.max_drafts if settings.plain_has_ring else 0, settings.max_drafts)
        )
        prompt_indices = torch.randint(0, num_prompts, (num_traces,), generator=self.generator)
        self.first_positions = torch.tensor(settings.prompt_lens)[prompt_indices]
        prompt = self.make_tokens(max(settings.prompt_lens))
        for cache in (self.plain, self.drafted):
            self.start(cache, prompt, prompt_indices)
        has_checkpoint = torch.tensor(settings.prompt_lens) >= CHECKPOINT_INTERVAL
        self.check_checkpoints(self.prompt_checkpoint_slots[has_checkpoint])
        self.tokens = self.make_tokens(num_traces, settings.num_steps * (1 + settings.max_drafts))
        self.compute_expected()

    def make_tokens(self, *size: int) -> Tensor:
        return make_tokens(self.settings.shape, size, self.generator)

    def draw_traces(self, probability: float) -> Tensor:
        return self.traces[torch.rand(len(self.traces), generator=self.generator) < probability]

    def draw_counts(self, largest: Tensor) -> Tensor:
        return (torch.rand(len(largest), generator=self.generator) * (largest + 1)).long()

    def start(self, cache: LayerCache, prompt: Tensor, prompt_indices: Tensor) -> None:
        for index, length in enumerate(self.settings.prompt_lens):
            request = torch.tensor([len(self.traces) + index])
            pairs = torch.tensor([[[CHECKPOINT_INTERVAL, self.prompt_checkpoint_slots[index]]]], dtype=torch.int32)
            for chunk in prompt[:length].split(50):
                cache.run(request, chunk, torch.tensor([len(chunk)]), num_decodes=0, checkpoints=pairs)
        cache.copy(len(self.traces) + 1 + prompt_indices, 1 + self.traces)
        cache.num_computed[self.traces] = self.first_positions.int()

    def compute_expected(self) -> None:
        outs, states = [], []
        ones = torch.ones(len(self.traces), dtype=torch.long)
        for index in range(self.tokens.shape[1]):
            pairs = self.checkpoints(self.traces)
            tokens = self.tokens[:, index]
            out = self.plain.run(self.traces, tokens, ones, num_decodes=len(self.traces), checkpoints=pairs)
            outs.append(out)
            states.append(self.plain.read_states(1 + self.traces))
        self.expected_outs, self.expected_states = torch.stack(outs), torch.stack(states)

    def checkpoints(self, traces: Tensor) -> Tensor:
        position = torch.full_like(traces, CHECKPOINT_INTERVAL)
        return torch.stack((position, self.trace_checkpoint_slots[traces]), 1).int().unsqueeze(1)

    def run(self) -> tuple[int, int, int]:
        # The first step has no drafts, so that decodes save checkpoints.
        num_drafts, num_accepted = self.step(has_drafts=False)
        num_restarts = 0
        for step in range(1, self.settings.num_steps):
            counts = self.step(has_drafts=step % 4 != 3)
            num_drafts, num_accepted = num_drafts + counts[0], num_accepted + counts[1]
            num_restarts += self.restart_some()
        return num_drafts, num_accepted, num_restarts

    def step(self, *, has_drafts: bool) -> tuple[int, int]:
        traces = self.draw_traces(0.9)
        query_lens = torch.ones_like(traces)
        if has_drafts:
            query_lens += self.draw_counts(torch.full_like(traces, self.settings.max_drafts))
        num_accepted = self.draw_counts(query_lens - 1)
        num_done = (self.drafted.num_computed[traces] - self.first_positions[traces]).long()
        token_traces = traces.repeat_interleave(query_lens)
        offsets = torch.arange(len(token_traces)) - (query_lens.cumsum(0) - query_lens).repeat_interleave(query_lens)
        is_correct = offsets <= num_accepted.repeat_interleave(query_lens)
        indices = num_done.repeat_interleave(query_lens) + offsets
        wrong_tokens = self.make_tokens(len(token_traces))
        tokens = torch.where(is_correct.unsqueeze(1), self.tokens[token_traces, indices], wrong_tokens)
        if has_drafts:
            out = self.drafted.run(traces, tokens, query_lens, has_drafts=True)
            self.drafted.reject(traces, query_lens, num_accepted)
        else:
            out = self.run_with_prompt(traces, tokens)[: len(tokens)]
        assert torch.equal(out[is_correct], self.expected_outs[indices[is_correct], token_traces[is_correct]])
        assert torch.equal(self.drafted.read_states(1 + traces), self.expected_states[num_done, traces])
        return int(query_lens.sum() - len(traces)), int(num_accepted.sum())

    def run_with_prompt(self, traces: Tensor, tokens: Tensor) -> Tensor:
        prompt = torch.tensor([len(self.traces) + len(self.settings.prompt_lens) - 1])
        chunk = self.make_tokens(self.settings.max_drafts)
        chunk_len = torch.tensor([len(chunk)])
        self.plain.run(prompt, chunk, chunk_len, num_decodes=0)
        out = self.drafted.run(
            torch.cat((traces, prompt)),
            torch.cat((tokens, chunk)),
            torch.cat((torch.ones_like(traces), chunk_len)),
            num_decodes=len(traces),
            checkpoints=torch.cat((self.checkpoints(traces), torch.zeros(1, 1, 2, dtype=torch.int32))),
        )
        assert torch.equal(self.drafted.read_states(1 + prompt), self.plain.read_states(1 + prompt))
        return out

    def restart_some(self) -> int:
        traces = self.draw_traces(0.2)
        slots = self.trace_checkpoint_slots[traces]
        has_checkpoint = ~self.drafted.read_states(slots).isnan().flatten(1).any(1)
        traces, slots = traces[has_checkpoint], slots[has_checkpoint]
        self.check_checkpoints(slots)
        self.drafted.copy(slots, 1 + traces)
        self.drafted.num_computed[traces] = CHECKPOINT_INTERVAL
        self.drafted.num_pending[traces] = 0
        return len(traces)

    def check_checkpoints(self, slots: Tensor) -> None:
        assert torch.equal(self.drafted.read_states(slots), self.plain.read_states(slots))
        inputs = (cache.read_conv_inputs(slots, CHECKPOINT_INTERVAL) for cache in (self.drafted, self.plain))
        assert torch.equal(*inputs)
