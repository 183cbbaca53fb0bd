"""The handle of a launched step, with which the host waits for the step and reads its results."""

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

    tokens: int32, tokens of all requests of the step, perhaps with padding at the end; None if no request samples.
    logprobs: log-probabilities for the requests that ask for them; None without such requests.
    host_slot: the buffer for the tokens; None on a CPU. Later steps overwrite the buffer, see `HostCopyRing`.
    failures: pairs (index among the requests that sample, reason) of requests that got no token.
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
        # Time that the host took to launch the step. On a CPU the launch computes the step.
        self.launch_s = 0.0

    @property
    def is_finished(self) -> bool:
        """Whether the device has finished the step and the copies."""
        return self._host_slot is None or self._host_slot.end_event.query()

    def wait(self) -> None:
        """Wait until the step is finished."""
        if self._host_slot is not None:
            self._host_slot.end_event.synchronize()

    @property
    def events(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        """The events at the beginning and the end of the step; None on a CPU."""
        return None if self._host_slot is None else (self._host_slot.begin_event, self._host_slot.end_event)

    @property
    def duration_s(self) -> float:
        """Seconds that a finished step took on the device."""
        if self._host_slot is None:
            return self.launch_s
        return self._host_slot.begin_event.elapsed_time(self._host_slot.end_event) / 1e3

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Tokens int32 [n] of the requests that sample in a finished step."""
        return self._token_array[self._sampling_indices]

    def read_results(self) -> StepResults:
        """The results of a finished step."""
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
    # The next step may overwrite the source, but runs after the copy on the same stream.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
