"""Takes in what steps computed: tokens, the blocks that they filled, and who has come to an end.

This room must not know how steps are planned.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.request import FinishReason, StepOutputs, TokenLogprobs
from nanovllm_core.scheduling.lifecycle import Lifecycle
from nanovllm_core.scheduling.plan import ScheduledRows, StepPlan, StepTokens
from nanovllm_core.scheduling.rows import Cohort, Members, Rows
from nanovllm_core.scheduling.step_time import StepWork

# Tokens of an answer whose blocks become findable together. Registering blocks of 16 one by one takes twice as long.
COMMITTED_TOKENS = 64


class ScheduledStep(NamedTuple):
    """A step in flight.

    plan: for the runners.
    ends: tokens that each row has computed after the step, int64 [n].
    cohort: what is known of the rows if all of them decode.
    work: what the step computes.
    expected_s: its predicted time in seconds; 0 for a step without prompts.
    """

    plan: StepPlan
    ends: NDArray[np.int64]
    cohort: Cohort | None
    work: StepWork
    expected_s: float


class Intake:
    """What comes back of steps, for the requests of `lifecycle`."""

    def __init__(self, lifecycle: Lifecycle):
        self._lifecycle = lifecycle
        self._cache = lifecycle.cache
        self._rows = lifecycle.rows

    def complete(self, step: ScheduledStep, found: StepTokens) -> StepOutputs:
        """Take in what a step computed, and return what it made for whom. Steps come back in the order they began."""
        rows = self._rows
        scheduled, num_tokens, samples = step.plan.scheduled
        rows.steps_in_flight[scheduled] -= 1
        failures = self._fail(step.plan.scheduled, found)
        over = rows.over[scheduled]
        if self._cache.prefix_caching:
            self._commit(scheduled, num_tokens, step.ends, over)
        prompt_logprobs = [
            (int(rows.keys[part.row]), logprobs)
            for part, logprobs in zip(step.plan.prompt_logprobs, found.prompt_logprobs, strict=True)
            if not rows.over[part.row]
        ]
        logprobs = self._logprobs(step.plan.scheduled, found) if found.logprobs else []
        if step.cohort is not None and not over.any():
            members, tokens = step.cohort.members, found.tokens
        else:
            wanted = ~over[samples]
            members, tokens = rows.members(scheduled[samples][wanted]), found.tokens[wanted]
        new = tokens.tolist()
        begins, ends = self._append(members, tokens, new)
        # Some have just ended and given theirs back: such a row is nobody's.
        for request in rows.of(scheduled[~rows.running[scheduled]]):
            self._lifecycle.release_when_idle(request)
        return StepOutputs(members.keys, new, logprobs, begins, ends, failures, prompt_logprobs)

    def _commit(
        self, scheduled: Rows, num_tokens: NDArray[np.int64], ends: NDArray[np.int64], over: NDArray[np.bool_]
    ) -> None:
        """Let later prompts find the blocks that a step filled: a prompt's at once, an answer's a few at a time."""
        size = self._cache.block_size
        every = np.where(num_tokens == 1, max(COMMITTED_TOKENS, size), size)
        filled = np.flatnonzero((ends % every < num_tokens) & ~over)
        for request, end in zip(self._rows.of(scheduled[filled]), ends[filled].tolist(), strict=True):
            self._cache.commit(request, end)

    def _fail(self, scheduled: ScheduledRows, found: StepTokens) -> list[tuple[int, str]]:
        """End the requests that have nothing to sample, and say why."""
        failures: list[tuple[int, str]] = []
        if found.failed:
            sampled = scheduled.rows[scheduled.samples]
            for index, reason in found.failed:
                if not self._rows.over[sampled[index]]:
                    (request,) = self._rows.of(sampled[index : index + 1])
                    failures.append((request.key, reason))
                    self._lifecycle.finish(request)
        return failures

    def _logprobs(self, scheduled: ScheduledRows, found: StepTokens) -> list[tuple[int, TokenLogprobs]]:
        rows = self._rows
        sampled = scheduled.rows[scheduled.samples]
        keys, over = rows.keys[sampled].tolist(), rows.over[sampled]
        return [(keys[index], logprobs) for index, logprobs in found.logprobs if not over[index]]

    def _append(
        self, members: Members, tokens: NDArray[np.int32], new: list[int]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, FinishReason, int | None]]]:
        """Take in a token for each of `members`; returns who begins and who ends with it, as `StepOutputs` has it.

        new: the tokens as a list.
        """
        rows, (took, requests, keys, output_ids) = self._rows, members
        # As a loop over the requests, but not one of Python's; append returns nothing, and nothing is kept.
        deque(map(list.append, output_ids, new), maxlen=0)
        num_known = rows.num_known[took]
        first = np.flatnonzero(num_known == rows.num_prompt[took])
        num_known += 1
        rows.num_known[took] = num_known
        stopped = rows.stopped_by(took, tokens)
        ended = np.flatnonzero(stopped | (num_known >= rows.max_total[took]))
        self._lifecycle.counters.generation_tokens += len(new)
        begins = [(keys[index], requests[index].num_cached_tokens) for index in first.tolist()]
        ends: list[tuple[int, FinishReason, int | None]] = []
        for index in ended.tolist():
            ends.append((keys[index], "stop", new[index]) if stopped[index] else (keys[index], "length", None))
            self._lifecycle.finish(requests[index])
        return begins, ends
