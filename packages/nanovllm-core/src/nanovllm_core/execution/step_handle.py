"""The handle of a launched step: tells when the device has finished it, and reads its results on the host."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.execution.host_copy import HostCopySlot
from nanovllm_core.execution.sampler import PromptScores, Sampled
from nanovllm_core.outputs import PromptLogprobs, TokenLogprobs
from nanovllm_core.scheduling.plan import StepResults


class StepHandle:
    """A step in flight, whose results are being copied to the host.

    sampled: tokens of all requests of the step, perhaps followed by padding; None when no request samples.
    sampling_indices: int64 [n], indices of the step's requests that sample, rising.
    num_logprobs: int64 [n], for each of these how many alternatives to report, -1 for no log-probabilities.
    host_slot: on CUDA the buffer for the tokens; read them before `depth` later steps have begun. None on a CPU.
    failed: requests without a token, as pairs (index among the requests that sample, reason).
    prompt_scores: one entry per `PromptLogprobsRange` of the plan.

    Every step on CUDA records an event at its end, even if no request samples: `wait` bounds the number of steps in
    flight, and copies on other streams wait for the event.
    """

    def __init__(
        self,
        sampled: Sampled | None,
        sampling_indices: NDArray[np.int64],
        num_logprobs: NDArray[np.int64],
        host_slot: HostCopySlot | None,
        failed: Sequence[tuple[int, str]] = (),
        prompt_scores: Sequence[PromptScores] = (),
    ):
        self._failed = failed
        self._sampling_indices = sampling_indices
        self._num_logprobs = num_logprobs
        self._token_array = np.zeros(0, np.int32)
        if sampled is not None:
            tokens, *rest = sampled
            if host_slot is None:
                self._token_array = tokens.numpy()
            else:
                self._token_array = host_slot.token_array
                host_slot.first_tokens(len(tokens)).copy_(tokens, non_blocking=True)
                sampled = Sampled(tokens, *(None if tensor is None else _copy_to_host(tensor) for tensor in rest))
        if host_slot is not None:
            prompt_scores = [PromptScores(*map(_copy_to_host, each)) for each in prompt_scores]
        self._host_slot = host_slot
        if host_slot is not None:
            host_slot.end.record(host_slot.stream)
        self._sampled = sampled
        self._prompt_scores = prompt_scores
        # Seconds that the host took to launch the step. On a CPU launching includes computing.
        self.launch_s = 0.0

    @property
    def ready(self) -> bool:
        """Whether the device has finished the step."""
        return self._host_slot is None or self._host_slot.end.query()

    def wait(self) -> None:
        """Wait until the device has finished the step."""
        if self._host_slot is not None:
            self._host_slot.end.synchronize()

    @property
    def events(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        """The events recorded where a GPU began and finished the step; None on a CPU."""
        return None if self._host_slot is None else (self._host_slot.begin, self._host_slot.end)

    @property
    def seconds(self) -> float:
        """Seconds that the step took on the device. Read only after the step has finished."""
        if self._host_slot is None:
            return self.launch_s
        return self._host_slot.begin.elapsed_time(self._host_slot.end) / 1e3

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """int32 [n], the tokens of the requests that sample. Read only after the step has finished."""
        return self._token_array[self._sampling_indices]

    def tokens(self) -> StepResults:
        """The sampled tokens and all log-probabilities. Call only after the step has finished."""
        sampled, tokens = self._sampled, self.token_ids
        prompt_logprobs = [_packed(scores) for scores in self._prompt_scores]
        if sampled is None or sampled.chosen is None or sampled.top_ids is None or sampled.top_logprobs is None:
            return StepResults(tokens, (), self._failed, prompt_logprobs)
        chosen, ids, values = sampled.chosen.tolist(), sampled.top_ids.tolist(), sampled.top_logprobs.tolist()
        counts = self._num_logprobs.tolist()
        with_logprobs = [index for index, count in enumerate(counts) if count >= 0]
        return StepResults(
            tokens,
            [
                (index, TokenLogprobs(chosen[at], tuple(zip(ids[at], values[at], strict=True))[: counts[index]]))
                for at, index in enumerate(with_logprobs)
            ],
            self._failed,
            prompt_logprobs,
        )


def _packed(scores: PromptScores) -> PromptLogprobs:
    return PromptLogprobs(scores.top_ids.shape[1], *(tensor.numpy().tobytes() for tensor in scores))


def _copy_to_host(tensor: Tensor) -> Tensor:
    # The copy takes microseconds on the step's stream. The next step, queued behind it, may overwrite the source.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
