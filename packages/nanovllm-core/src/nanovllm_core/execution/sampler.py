"""From logits to tokens, and from the device's tensors to the host's answers.

This room must not know which request a row belongs to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_core.execution.request_table import Needs, RequestTable, StepInputs
from nanovllm_core.scheduling.plan import TokenChoice
from nanovllm_kernels.sampling import apply_bias, apply_penalties, logprobs, sample


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens int32 [n] and, when anyone asked, log-probabilities: chosen float32 [n], top int32 and float32 [n, k]."""

    tokens: Tensor
    chosen: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None


def sample_tokens(logits: Tensor, positions: Tensor, table: RequestTable, step: StepInputs) -> Sampled:
    """Choose a token for each row of `logits` [n, vocab]; `positions` int32 [n] are those that the tokens will have."""
    rows, needs = step.sample_rows, step.needs
    # Asked for of the model's own distribution, so before anything below touches it.
    raw = logits
    if needs & Needs.PENALTY:
        logits = apply_penalties(
            logits, rows, table.counts, table.repetition[rows], table.presence[rows], table.frequency[rows]
        )
    if needs & Needs.BIAS:
        logits = apply_bias(logits, rows, positions, table.bias_ids, table.bias_values, table.bias_until)
    tokens = sample(
        logits,
        table.temperature[rows],
        table.top_k[rows],
        table.top_p[rows],
        table.min_p[rows],
        table.seeds[rows],
        positions,
        all_greedy=not needs & Needs.RANDOM,
        any_filter=bool(needs & Needs.FILTER),
    )
    most = max(step.num_logprobs)
    if most < 0:
        return Sampled(tokens, None, None, None)
    found = logprobs(raw, tokens, most)
    return Sampled(tokens, found.chosen, found.top_ids, found.top_logprobs)


class StepHandle:
    """A step in flight: its tokens are on their way to the host."""

    def __init__(self, sampled: Sampled | None, num_logprobs: Sequence[int], copy_stream: torch.cuda.Stream | None):
        self._num_logprobs = num_logprobs
        self._event: torch.cuda.Event | None = None
        if sampled is not None and copy_stream is not None:
            sampled, self._event = _copy_to_host(sampled, copy_stream)
        self._sampled = sampled

    @property
    def ready(self) -> bool:
        """Whether `choices` would return without waiting for the device."""
        return self._event is None or self._event.query()

    def choices(self) -> list[TokenChoice]:
        """Wait for the device, and return one choice for each row that sampled."""
        if self._event is not None:
            self._event.synchronize()
        sampled = self._sampled
        if sampled is None:
            return []
        tokens = sampled.tokens.tolist()
        if sampled.chosen is None or sampled.top_ids is None or sampled.top_logprobs is None:
            return [TokenChoice(token) for token in tokens]
        chosen, ids, values = sampled.chosen.tolist(), sampled.top_ids.tolist(), sampled.top_logprobs.tolist()
        return [
            TokenChoice(token)
            if count < 0
            else TokenChoice(token, chosen[i], tuple(zip(ids[i][:count], values[i][:count], strict=True)))
            for i, (token, count) in enumerate(zip(tokens, self._num_logprobs, strict=True))
        ]


def _copy_to_host(sampled: Sampled, stream: torch.cuda.Stream) -> tuple[Sampled, torch.cuda.Event]:
    """Copy on a stream of its own, so that the next step's kernels need not queue behind the transfer."""
    stream.wait_stream(torch.cuda.current_stream())

    def copy(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        tensor.record_stream(stream)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    with torch.cuda.stream(stream):
        tokens = copy(sampled.tokens)
        assert tokens is not None  # noqa: S101 (for the type checker: a step that sampled has tokens)
        host = Sampled(tokens, copy(sampled.chosen), copy(sampled.top_ids), copy(sampled.top_logprobs))
        event = torch.cuda.Event()
        event.record(stream)
    return host, event
