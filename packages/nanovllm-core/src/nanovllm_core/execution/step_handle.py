"""The handle of a launched step, with which the host waits for the step and reads its results."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.execution.host_copy import HostCopySlot
from nanovllm_core.execution.prompt_scores import PromptScores
from nanovllm_core.execution.request_table import StepInputs
from nanovllm_core.execution.row_constraint import GrammarFailure
from nanovllm_core.outputs import PromptLogprobs, TokenLogprobs
from nanovllm_core.scheduling.plan import DraftResults, StepResults
from nanovllm_kernels.sampling import Logprobs


class ChosenTokens(NamedTuple):
    """The tokens that a step chose, and the drafts for the next step. Each int32 tensor may have padding at its end.

    samples: [num_samples], see `ForwardOutput`; None if no request samples.
    num_new: [num_reqs], number of new tokens of each request; None for a step without drafts.
    proposals: [num_reqs, 1 + max_drafts]. The first column is the number of drafts that this step proposes. The other
        columns are the tokens after the request's last token, proposed now or earlier. None without speculation.
    """

    samples: Tensor | None = None
    num_new: Tensor | None = None
    proposals: Tensor | None = None


class StepHandle:
    """A step in flight, whose results are being copied to the host.

    logprobs: log-probabilities of the samples of requests that ask for them; None without such requests.
    host_slot: the buffer for the tokens; None on a CPU. Later steps overwrite the buffer, see `HostCopyRing`.
    failures: requests that can't sample one of their tokens, with the reasons.
    """

    def __init__(
        self,
        step: StepInputs,
        chosen: ChosenTokens,
        logprobs: Logprobs | None,
        host_slot: HostCopySlot | None,
        failures: Sequence[GrammarFailure] = (),
        prompt_scores: Sequence[PromptScores] = (),
    ):
        self._failures = failures
        self._sampling_indices = step.sampling_indices
        self._query_lens = step.query_lens
        self._num_logprobs = step.num_logprobs
        if host_slot is None:
            self._samples, self._num_new, self._proposals = (None if x is None else x.numpy() for x in chosen)
        else:
            self._samples, self._num_new, self._proposals = host_slot.copy(chosen)
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
        """New tokens of a finished step, int32 [m]. The i-th request that samples has num_tokens[i] tokens."""
        if self._samples is None:
            return np.zeros(0, np.int32)
        if self._num_new is None:
            return self._samples[self._sampling_indices]
        return self._samples[: len(self._is_new)][self._is_new]

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Number of new tokens of each request that samples in a finished step, int64 [n]."""
        num_reqs = len(self._sampling_indices)
        return np.ones(num_reqs, np.int64) if self._num_new is None else self._num_new[:num_reqs].astype(np.int64)

    @property
    def drafts(self) -> DraftResults | None:
        """`StepResults.drafts` of a finished step."""
        if self._proposals is None:
            return None
        # In a step with drafts all requests sample.
        request_indices = self._sampling_indices if self._num_new is None else np.arange(len(self._sampling_indices))
        proposals = self._proposals[request_indices]
        return DraftResults(self.num_tokens, proposals[:, 0].astype(np.int64), proposals[:, 1:])

    def read_results(self) -> StepResults:
        """The results of a finished step."""
        prompt_logprobs = [_pack_scores(scores) for scores in self._prompt_scores]
        return StepResults(self.token_ids, self._read_logprobs(), self._read_failures(), prompt_logprobs, self.drafts)

    @cached_property
    def _is_new(self) -> NDArray[np.bool_]:
        """Whether each sample of a finished step with drafts is a new token, bool [num_samples]."""
        query_lens = self._query_lens
        indices = np.arange(int(query_lens.sum())) - np.repeat(query_lens.cumsum() - query_lens, query_lens)
        return indices < np.repeat(self.num_tokens, query_lens)

    def _read_failures(self) -> Sequence[tuple[int, str]]:
        num_tokens = self.num_tokens
        return [
            (failure.request_index, failure.reason)
            for failure in self._failures
            if num_tokens[failure.request_index] > failure.num_drafts
        ]

    def _read_logprobs(self) -> Sequence[tuple[int, TokenLogprobs]]:
        if self._logprobs is None:
            return ()
        # For each sample: number of top tokens to report (-1: no log-probabilities), and the sample's index in
        # `token_ids` (-1: the sample is not a new token).
        num_top, output_indices = self._num_logprobs, np.arange(len(self._num_logprobs))
        if self._num_new is not None:
            num_top = np.repeat(num_top, self._query_lens)
            output_indices = np.where(self._is_new, self._is_new.cumsum() - 1, -1)
        has_logprobs = num_top >= 0
        columns = [x.tolist() for x in (output_indices[has_logprobs], num_top[has_logprobs], *self._logprobs)]
        return [
            (index, TokenLogprobs(logprob, tuple(zip(top_ids, top_logprobs, strict=True))[:num_top]))
            for index, num_top, logprob, top_ids, top_logprobs in zip(*columns, strict=True)
            if index >= 0
        ]


def _pack_scores(scores: PromptScores) -> PromptLogprobs:
    return PromptLogprobs(scores.top_ids.shape[1], *(tensor.numpy().tobytes() for tensor in scores))


def _copy_to_host(tensor: Tensor) -> Tensor:
    # The next step may overwrite the source, but runs after the copy on the same stream.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
