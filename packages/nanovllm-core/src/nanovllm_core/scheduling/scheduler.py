"""Decides how many tokens of each request the next step computes."""

import random
from collections.abc import Sequence

import numpy as np

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.request import Request, RequestStatus, StepOutputs
from nanovllm_core.scheduling.budget import StepLimits
from nanovllm_core.scheduling.lifecycle import Lifecycle
from nanovllm_core.scheduling.plan import BatchShape, NewBlocks, PromptPart, ScheduledRows, StepPlan, StepResults
from nanovllm_core.scheduling.policy import Score, urgency, victim_score
from nanovllm_core.scheduling.prompts import Chunk, PromptChunks, PromptScheduler
from nanovllm_core.scheduling.result_applier import ResultApplier, ScheduledStep
from nanovllm_core.scheduling.rows import Rows, RowTable
from nanovllm_core.scheduling.step_time import StepTimeModel, StepWork

# Blocks are allocated ahead of need if this many times as many blocks are free.
PLENTY = 4


class Scheduler:
    """Schedules requests from the queue to their last token.

    There is no prefill or decode phase: each step computes some of every request's remaining tokens within one budget.
    Several steps may be in flight: `schedule` may be called before `complete` of earlier steps.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_seqs: int,
        limits: StepLimits,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        seed: int = 0,
        step_times: StepTimeModel | None = None,
    ):
        self._eos_token_ids = frozenset(eos_token_ids)
        self.cache = cache
        self.rows = RowTable(max_num_seqs, len(self._eos_token_ids))
        self._lifecycle = Lifecycle(cache, self.rows)
        self.waiting, self.counters = self._lifecycle.waiting, self._lifecycle.counters
        self._result_applier = ResultApplier(self._lifecycle)
        self.limits = limits
        self.step_times = step_times or StepTimeModel()
        self._prompts = PromptScheduler(self._lifecycle, limits, self.step_times)
        self._max_model_len = max_model_len
        self._seeds = random.Random(seed)

    @property
    def running(self) -> list[Request]:
        """Requests with a row that may be scheduled."""
        return self.rows.requests_of(np.flatnonzero(self.rows.running))

    @property
    def num_waiting(self) -> int:
        """Waiting requests, including preempted ones that a step in flight still refers to."""
        return self._lifecycle.num_waiting

    @property
    def has_requests(self) -> bool:
        """Whether a request is unfinished, or a finished one still holds a row and blocks."""
        return self._lifecycle.has_requests

    def add(self, request: Request) -> None:
        """Queue a new, validated request. Raises ValueError if its key is in use."""
        if self._lifecycle.find(request.key) is not None:
            raise ValueError(f"request key {request.key} is in use")
        sampling = request.sampling
        max_outputs = self._max_model_len - request.num_prompt_tokens
        request.max_total_tokens = request.num_prompt_tokens + min(max_outputs, sampling.max_tokens or max_outputs)
        request.stop_ids = frozenset(sampling.stop_token_ids)
        # A grammar allows end-of-sequence tokens only where it is complete, and then no other tokens.
        if not sampling.ignore_eos or sampling.grammar is not None:
            request.stop_ids |= self._eos_token_ids
        request.seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        # Hash here, not while a step is planned, because the device may be idle then.
        self.cache.hash_prompt(request)
        self._lifecycle.add(request)

    def abort(self, key: int) -> bool:
        """Finish a request now. Returns False if the key is unknown or the request has finished."""
        request = self._lifecycle.find(key)
        if request is None:
            return False
        self._lifecycle.finish(request)
        return True

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step. Returns None if no request can be computed now."""
        preemptions = self.counters.preemptions
        prompts = PromptChunks([], [], NewBlocks())
        decodes = self._schedule_decodes(prompts.new_blocks)
        context = int(self.rows.num_computed[decodes].sum()) + len(decodes)
        # The next free blocks go to preempted requests before new ones.
        may_admit = self.counters.preemptions == preemptions and self._lifecycle.num_preempting == 0
        self._prompts.plan(StepWork(len(decodes), context), prompts, may_admit=may_admit)
        if not len(decodes) and not prompts.chunks:
            return None
        return self._launch(decodes, context, prompts)

    def observe(self, step: ScheduledStep, seconds: float) -> None:
        """Fit the step-time model to the device time of a finished step."""
        self.step_times.observe(step.work, seconds)

    def complete(self, step: ScheduledStep, results: StepResults) -> StepOutputs:
        """Apply the results of a finished step, in scheduling order. Returns the outputs for its requests."""
        return self._result_applier.apply(step, results)

    def _schedule_decodes(self, new_blocks: NewBlocks) -> Rows:
        """The rows that decode one token in this step, after allocating blocks for them."""
        rows = self.rows
        num_tokens = rows.num_tokens
        decodes = np.flatnonzero(rows.running & (num_tokens - rows.num_computed == 1) & (num_tokens < rows.max_total))
        # Each decode computes one token, so it lacks at most one block.
        short = decodes[num_tokens[decodes] > rows.capacity[decodes]]
        if not len(short):
            return decodes
        soon = self._soon_out_of_blocks(decodes)
        if len(soon) * PLENTY <= self.cache.pool.num_free:
            short = soon
        if self._add_blocks(rows.requests_of(short), new_blocks):
            return decodes
        return self._decodes_by_urgency(decodes, new_blocks)

    def _soon_out_of_blocks(self, decodes: Rows) -> Rows:
        """Those of `decodes` that will need another block within `block_size` steps.

        Giving all of them a block now changes the device's block tables in one step instead of in many.
        """
        rows = self.rows
        capacity = rows.capacity[decodes]
        # The last output token is never computed.
        needs_more = capacity < rows.max_total[decodes] - 1
        return decodes[needs_more & (capacity - rows.num_tokens[decodes] < self.cache.block_size)]

    def _add_blocks(self, requests: Sequence[Request], new_blocks: NewBlocks) -> bool:
        """Give each of `requests` one more block. Returns False, without any change, if too few blocks are free."""
        block_ids = self.cache.grow(requests)
        if block_ids is None:
            return False
        grown = [request.row for request in requests]
        self.rows.capacity[grown] += self.cache.block_size
        new_blocks.rows.extend(grown)
        new_blocks.entries.extend([len(request.block_ids) - 1 for request in requests])
        new_blocks.block_ids.extend(block_ids)
        return True

    def _decodes_by_urgency(self, decodes: Rows, new_blocks: NewBlocks) -> Rows:
        """Those of `decodes` that the step includes when too few blocks are free: the most urgent get blocks first."""
        rows = self.rows
        chosen: set[int] = set()
        for request in sorted(rows.requests_of(decodes), key=urgency):
            row = request.row
            # The request may have been preempted by a more urgent one earlier in this loop.
            if request.status is RequestStatus.RUNNING and (
                rows.num_tokens[row] <= rows.capacity[row] or self._add_block_or_preempt(request, chosen, new_blocks)
            ):
                chosen.add(row)
        return np.array(sorted(chosen), np.int64)

    def _add_block_or_preempt(self, request: Request, chosen: set[int], new_blocks: NewBlocks) -> bool:
        """Give a decode one more block, preempting less urgent requests if needed. False if it must wait."""
        while not self._add_blocks([request], new_blocks):
            # Blocks will be released when a step in flight finishes: preempt no other request until then.
            if self._lifecycle.num_preempting or self._lifecycle.num_finishing:
                return False
            victim = max((other for other in self.running if other.row not in chosen), key=self._victim_score)
            self._lifecycle.preempt(victim)
            if victim is request:
                return False
        return True

    def _victim_score(self, request: Request) -> Score:
        left = self.rows.num_tokens[request.row] - self.rows.num_computed[request.row]
        return victim_score(request, prefilling=bool(left > 1))

    def _launch(self, decodes: Rows, context: int, prompts: PromptChunks) -> ScheduledStep:
        rows = self.rows
        chunks, new_rows, new_blocks = prompts
        decode_batch = None if chunks else rows.decode_batch(decodes)
        scheduled = self._scheduled_rows(decodes, chunks) if decode_batch is None else decode_batch.scheduled
        prompt_logprobs = self._prompt_parts(chunks, len(decodes)) if chunks else []
        computed = [(int(rows.num_computed[row]), num_tokens) for row, num_tokens in chunks]
        pairs = self.limits.rounds.estimate_pairs(computed)
        whole = bool(chunks) and not any(start for start, num_tokens in computed if num_tokens > 1)
        taking, counts, samples = scheduled
        ends = rows.num_computed[taking] + counts
        rows.num_computed[taking] = ends
        rows.num_tokens[taking] += samples
        rows.steps_in_flight[taking] += 1
        num_tokens = len(decodes) + sum(chunk.num_tokens for chunk in chunks)
        is_uniform = decode_batch is not None or bool((counts == counts[0]).all())
        plan = StepPlan(
            step=self.counters.steps,
            new_rows=new_rows,
            new_blocks=new_blocks,
            scheduled=scheduled,
            shape=BatchShape(len(taking), num_tokens, int(counts[0]) if is_uniform else None, whole),
            max_seq_len=int(ends.max()),
            prompt_logprobs=prompt_logprobs,
        )
        self.counters.steps += 1
        self.counters.tokens += num_tokens
        work = StepWork(self.limits.padded(num_tokens) if chunks else num_tokens, context, pairs)
        return ScheduledStep(plan, ends, decode_batch, work, self.step_times.predict(work) if chunks else 0.0)

    def _scheduled_rows(self, decodes: Rows, chunks: list[Chunk]) -> ScheduledRows:
        # The order that the kernels expect: rows with one token first, prompts without computed tokens last.
        chunks.sort(key=lambda chunk: (chunk.num_tokens != 1, not self.rows.num_computed[chunk.row]))
        rows = np.concatenate((decodes, [chunk.row for chunk in chunks]))
        counts = np.concatenate((np.ones(len(decodes), np.int64), [chunk.num_tokens for chunk in chunks]))
        return ScheduledRows(rows, counts, self.rows.num_computed[rows] + counts == self.rows.num_tokens[rows])

    def _prompt_parts(self, chunks: list[Chunk], at: int) -> list[PromptPart]:
        """The prompt tokens of `chunks` whose log-probabilities this step computes.

        at: index among the step's tokens of the first chunk's first token. Decodes are not needed here: a prompt whose
            last token is scheduled as a decode has no further token to score.
        """
        parts: list[PromptPart] = []
        requests = self.rows.requests_of(np.array([chunk.row for chunk in chunks], np.int64))
        for (row, num_tokens), request in zip(chunks, requests, strict=True):
            num_top, computed = request.sampling.prompt_logprobs, int(self.rows.num_computed[row])
            # After a preemption tokens are computed again whose successors have been scored already.
            count = min(computed + num_tokens - request.num_scored, request.num_to_score)
            if num_top is not None and count > 0:
                first = request.num_scored
                parts.append(PromptPart(row, first + 1, count, num_top, at + first - computed))
                request.num_scored += count
            at += num_tokens
        return parts
