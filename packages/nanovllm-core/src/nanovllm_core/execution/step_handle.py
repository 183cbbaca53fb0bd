"""The handle of a launched step, with which the host waits for the step and reads its results."""

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The tokens that a step chose, and with speculation the drafts for the next step. In one tensor: one copy is fast.

    packed: int32 [n], consecutive parts. Each part may have padding at its end.
        samples: [num_samples], see `ForwardOutput`.
        In a step with drafts, [num_reqs], number of new tokens of each request.
        With speculation, drafts: [num_reqs, max_drafts], tokens after each request's last token, proposed now or
        earlier; and [num_reqs], number of drafts that are proposed now.
    """

    packed: Tensor
    num_reqs: int = 0
    max_drafts: int = 0
    has_drafts: bool = False

    @property
    def samples(self) -> Tensor:
        """The samples, int32 [num_samples]."""
        return self.packed[: len(self.packed) - self._num_other_ints]

    @property
    def _num_other_ints(self) -> int:
        return _count_draft_ints(self.num_reqs, self.max_drafts, self.has_drafts)

    def split(self, packed: NDArray[np.int32]) -> "SplitTokens":
        """The parts of `packed` on the host."""
        if not self.max_drafts:
            return SplitTokens(packed, None, None, None)
        num_new_ints = self.num_reqs if self.has_drafts else 0
        lengths = [len(packed) - self._num_other_ints, num_new_ints, self.num_reqs * self.max_drafts]
        samples, num_new, drafts, num_proposed = np.split(packed, np.cumsum(lengths))
        return SplitTokens(
            samples, drafts.reshape(-1, self.max_drafts), num_proposed, num_new if self.has_drafts else None
        )


class SplitTokens(NamedTuple):
    """The parts of `ChosenTokens.packed`; None for a part that does not exist."""

    samples: NDArray[np.int32]
    drafts: NDArray[np.int32] | None
    num_proposed: NDArray[np.int32] | None
    num_new: NDArray[np.int32] | None


NO_TOKENS = SplitTokens(np.zeros(0, np.int32), None, None, None)


def count_packed(num_reqs: int, num_samples: int, max_drafts: int) -> int:
    """The maximum length of `ChosenTokens.packed`."""
    if not max_drafts:
        return num_reqs
    return max(num_reqs, num_samples) + _count_draft_ints(num_reqs, max_drafts, has_drafts=True)


def _count_draft_ints(num_reqs: int, max_drafts: int, has_drafts: bool) -> int:
    """The length of the parts of `ChosenTokens.packed` after the samples."""
    return num_reqs * (max_drafts + 1 + has_drafts) if max_drafts else 0


class StepHandle:
    """A step in flight, whose results are being copied to the host.

    tokens: None if no request samples.
    logprobs: log-probabilities of the samples of requests that ask for them; None without such requests.
    host_slot: the buffer for the tokens; None on a CPU. Later steps overwrite the buffer, see `HostCopyRing`.
    failures: why requests can't sample a token.
    """

    def __init__(
        self,
        step: StepInputs,
        tokens: ChosenTokens | None,
        logprobs: Logprobs | None,
        host_slot: HostCopySlot | None,
        failures: Sequence[GrammarFailure] = (),
        prompt_scores: Sequence[PromptScores] = (),
    ):
        self._failures = failures
        self._sampling_indices = step.sampling_indices
        self._has_drafts = step.has_drafts
        self._query_lens = step.query_lens
        self._num_logprobs = step.num_logprobs
        self._tokens = NO_TOKENS
        if host_slot is None:
            if tokens is not None:
                self._tokens = tokens.split(tokens.packed.numpy())
        else:
            if tokens is not None:
                self._tokens = tokens.split(host_slot.token_array[: len(tokens.packed)])
                host_slot.first_tokens(len(tokens.packed)).copy_(tokens.packed, non_blocking=True)
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
        """New tokens of the requests that sample in a finished step, int32 [m]; `num_tokens` of each request."""
        return self._tokens.samples[self._new_sample_indices]

    @property
    def num_tokens(self) -> NDArray[np.int64] | None:
        """Number of new tokens of each request that samples in a finished step, int64 [n]; None if each has one."""
        num_new = self._tokens.num_new
        return None if num_new is None else num_new[: len(self._sampling_indices)].astype(np.int64)

    @property
    def draft_ids(self) -> NDArray[np.int32] | None:
        """Tokens that stand after the last token of each request that samples, int32 [n, max_drafts].

        Only of a finished step. None without speculation.
        """
        drafts = self._tokens.drafts
        return None if drafts is None else drafts[self._request_indices]

    def read_results(self) -> StepResults:
        """The results of a finished step."""
        prompt_logprobs = [_pack_scores(scores) for scores in self._prompt_scores]
        return StepResults(
            self.token_ids, self._read_logprobs(), self._read_failures(), prompt_logprobs, self._read_draft_results()
        )

    @property
    def _request_indices(self) -> NDArray[np.int64]:
        """Indices of the requests that sample among all requests of the step, int64 [n]."""
        return np.arange(len(self._sampling_indices)) if self._has_drafts else self._sampling_indices

    @cached_property
    def _new_sample_indices(self) -> NDArray[np.int64]:
        """Indices of the samples that are new tokens, in a finished step."""
        counts = self.num_tokens
        if counts is None:
            return self._sampling_indices
        first_outputs = np.cumsum(counts) - counts
        return np.arange(int(counts.sum())) + np.repeat(self._sampling_indices - first_outputs, counts)

    def _read_draft_results(self) -> DraftResults | None:
        drafts, num_proposed = self._tokens.drafts, self._tokens.num_proposed
        if drafts is None or num_proposed is None:
            return None
        requests, num_tokens = self._request_indices, self.num_tokens
        if num_tokens is None:
            num_tokens = np.ones(len(requests), np.int64)
        return DraftResults(num_tokens, num_proposed[requests].astype(np.int64), drafts[requests, 0])

    def _read_failures(self) -> Sequence[tuple[int, str]]:
        if not self._failures:
            return ()
        num_tokens = self.num_tokens
        return [
            (failure.request_index, failure.reason)
            for failure in self._failures
            if num_tokens is None or num_tokens[failure.request_index] > failure.entry
        ]

    def _read_logprobs(self) -> Sequence[tuple[int, TokenLogprobs]]:
        if self._logprobs is None:
            return ()
        # The samples of the requests that ask: number of top tokens, and index among the new tokens or -1.
        num_top, output_indices = self._num_logprobs, np.arange(len(self._num_logprobs))
        if self._has_drafts:
            num_top = np.repeat(num_top, self._query_lens)
            output_indices = np.full(len(num_top), -1)
            output_indices[self._new_sample_indices] = np.arange(len(self._new_sample_indices))
        is_asked = num_top >= 0
        columns = (output_indices[is_asked], num_top[is_asked], *self._logprobs)
        return [
            (index, TokenLogprobs(logprob, tuple(zip(top_ids, top_logprobs, strict=True))[:num_top]))
            for index, num_top, logprob, top_ids, top_logprobs in zip(
                *(column.tolist() for column in columns), strict=True
            )
            if index >= 0
        ]


def _pack_scores(scores: PromptScores) -> PromptLogprobs:
    return PromptLogprobs(scores.top_ids.shape[1], *(tensor.numpy().tobytes() for tensor in scores))


def _copy_to_host(tensor: Tensor) -> Tensor:
    # The next step may overwrite the source, but runs after the copy on the same stream.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
