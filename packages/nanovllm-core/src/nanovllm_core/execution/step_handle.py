"""The handle of a launched step: tells when the device has finished it, and reads its results on the host."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.execution.host_copy import HostCopySlot
from nanovllm_core.execution.prompt_scores import PromptScores
from nanovllm_core.execution.request_table import StepInputs
from nanovllm_core.outputs import PromptLogprobs, TokenLogprobs
from nanovllm_core.scheduling.plan import StepResults
from nanovllm_kernels.sampling import Logprobs


class StepHandle:
    """A step in flight, whose results are being copied to the host.

    step: inputs of the step.
    tokens: int32, tokens of all requests of the step, perhaps followed by padding; None when no request samples.
    logprobs: log-probabilities of the requests that asked for them; None if no request asked.
    host_slot: on CUDA the buffer for the tokens; read them before `depth` later steps have begun. None on a CPU.
    failures: requests without a token, as pairs (index among the requests that sample, reason).
    prompt_scores: one entry per `PromptLogprobsRange` of the plan.

    Every step on CUDA records an event at its end, even if no request samples: `wait` bounds the number of steps in
    flight, and copies on other streams wait for the event.
    """

    def __init__(
        self,
        step: StepInputs,
        tokens: Tensor | None,
        logprobs: Logprobs | None,
        host_slot: HostCopySlot | None,
        failures: Sequence[tuple[int, str]] = (),
        prompt_scores: Sequence[PromptScores] = (),
    ):
        self._failures = failures
        self._sampling_indices = step.sampling_indices
        self._num_logprobs = step.num_logprobs
        self._token_array = np.zeros(0, np.int32)
        if host_slot is None:
            if tokens is not None:
                self._token_array = tokens.numpy()
        else:
            if tokens is not None:
                self._token_array = host_slot.token_array
                host_slot.first_tokens(len(tokens)).copy_(tokens, non_blocking=True)
            if logprobs is not None:
                logprobs = Logprobs(*map(_copy_to_host, logprobs))
            prompt_scores = [PromptScores(*map(_copy_to_host, scores)) for scores in prompt_scores]
            host_slot.end_event.record(host_slot.stream)
        self._host_slot = host_slot
        self._logprobs = logprobs
        self._prompt_scores = prompt_scores
        # Seconds that the host took to launch the step. On a CPU launching includes computing.
        self.launch_s = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether the device has finished the step."""
        return self._host_slot is None or self._host_slot.end_event.query()

    def wait(self) -> None:
        """Wait until the device has finished the step."""
        if self._host_slot is not None:
            self._host_slot.end_event.synchronize()

    @property
    def events(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        """The events recorded where a GPU began and finished the step; None on a CPU."""
        return None if self._host_slot is None else (self._host_slot.begin_event, self._host_slot.end_event)

    @property
    def duration_s(self) -> float:
        """Seconds that the step took on the device. Read only after the step has finished."""
        if self._host_slot is None:
            return self.launch_s
        return self._host_slot.begin_event.elapsed_time(self._host_slot.end_event) / 1e3

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """int32 [n], the tokens of the requests that sample. Read only after the step has finished."""
        return self._token_array[self._sampling_indices]

    def read_results(self) -> StepResults:
        """The sampled tokens and all log-probabilities. Call only after the step has finished."""
        prompt_logprobs = [_pack_scores(scores) for scores in self._prompt_scores]
        return StepResults(self.token_ids, self._read_logprobs(), self._failures, prompt_logprobs)

    def _read_logprobs(self) -> Sequence[tuple[int, TokenLogprobs]]:
        if self._logprobs is None:
            return ()
        requested = [(index, num_top) for index, num_top in enumerate(self._num_logprobs.tolist()) if num_top >= 0]
        columns = (column.tolist() for column in self._logprobs)
        return [
            (index, TokenLogprobs(logprob, tuple(zip(top_ids, top_logprobs, strict=True))[:num_top]))
            for (index, num_top), logprob, top_ids, top_logprobs in zip(requested, *columns, strict=True)
        ]


def _pack_scores(scores: PromptScores) -> PromptLogprobs:
    return PromptLogprobs(scores.top_ids.shape[1], *(tensor.numpy().tobytes() for tensor in scores))


def _copy_to_host(tensor: Tensor) -> Tensor:
    # The copy takes microseconds on the step's stream. The next step, queued behind it, may overwrite the source.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
