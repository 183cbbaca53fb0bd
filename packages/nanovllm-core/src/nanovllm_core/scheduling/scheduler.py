"""Decides, step by step, which requests compute how many tokens.

One rule: a request has `num_computed_tokens` chasing `num_tokens`, and a step gives each some tokens out of one
budget. Several steps may be in flight: `schedule` is called before the last step's tokens are known, `complete` when
they are. This room must not know about devices, tensors, text or asyncio.
"""

import random
from collections.abc import Sequence

import numpy as np

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.request import Request, RequestStatus, StepOutputs
from nanovllm_core.scheduling.budget import StepLimits
from nanovllm_core.scheduling.intake import Intake, ScheduledStep
from nanovllm_core.scheduling.lifecycle import Lifecycle
from nanovllm_core.scheduling.plan import BatchShape, NewBlocks, PromptPart, ScheduledRows, StepPlan, StepTokens
from nanovllm_core.scheduling.policy import Score, urgency, victim_score
from nanovllm_core.scheduling.prompts import Chunk, PromptChunks, PromptScheduler
from nanovllm_core.scheduling.rows import Rows, RowTable
from nanovllm_core.scheduling.step_time import StepTimeModel, StepWork

# Blocks are given ahead of need where so many times as many are free.
PLENTY = 4


class Scheduler:
    """Requests from the queue to their last token."""

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
        self._intake = Intake(self._lifecycle)
        self.limits = limits
        self.step_times = step_times or StepTimeModel()
        self._prompts = PromptScheduler(self._lifecycle, limits, self.step_times)
        self._max_model_len = max_model_len
        self._seeds = random.Random(seed)

    @property
    def running(self) -> list[Request]:
        """Requests with a row that may be scheduled."""
        return self.rows.of(np.flatnonzero(self.rows.running))

    @property
    def num_waiting(self) -> int:
        """Requests without a row, those included whose preemption waits for a step in flight."""
        return self._lifecycle.num_waiting

    @property
    def has_requests(self) -> bool:
        """Whether anything is left to do, be it only to take back what finished requests held."""
        return self._lifecycle.has_requests

    def add(self, request: Request) -> None:
        """Queue a new request, already checked. Raises ValueError when its key is taken."""
        if self._lifecycle.find(request.key) is not None:
            raise ValueError(f"request key {request.key} is in use")
        sampling = request.sampling
        room = self._max_model_len - request.num_prompt_tokens
        request.max_total_tokens = request.num_prompt_tokens + min(room, sampling.max_tokens or room)
        request.stop_ids = frozenset(sampling.stop_token_ids)
        # A grammar allows no end-of-sequence token but where it is complete, and then nothing else.
        if not sampling.ignore_eos or sampling.grammar is not None:
            request.stop_ids |= self._eos_token_ids
        request.seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        # Not when a step is planned, which the device may be waiting for.
        self.cache.hash_prompt(request)
        self._lifecycle.add(request)

    def abort(self, key: int) -> bool:
        """End a request now; what it holds comes back once no step refers to it. False if it is unknown or over."""
        request = self._lifecycle.find(key)
        if request is None:
            return False
        self._lifecycle.finish(request)
        return True

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step, or return None when there is nothing that could be computed now."""
        preemptions = self.counters.preemptions
        prompts = PromptChunks([], [], NewBlocks())
        decodes = self._schedule_decodes(prompts.new_blocks)
        context = int(self.rows.num_computed[decodes].sum()) + len(decodes)
        # A request that was just preempted needs the next free blocks more than a new one does.
        may_admit = self.counters.preemptions == preemptions and self._lifecycle.num_preempting == 0
        self._prompts.plan(StepWork(len(decodes), context), prompts, may_admit=may_admit)
        if not len(decodes) and not prompts.chunks:
            return None
        return self._launch(decodes, context, prompts)

    def observe(self, step: ScheduledStep, seconds: float) -> None:
        """Learn from the time that the device took for a step."""
        self.step_times.observe(step.work, seconds)

    def complete(self, step: ScheduledStep, found: StepTokens) -> StepOutputs:
        """Take in what a step computed, and return what it made for whom. Steps come back in the order they began."""
        return self._intake.complete(step, found)

    def _schedule_decodes(self, new_blocks: NewBlocks) -> Rows:
        """One token for every running request that has its prompt behind it, and blocks to put it in."""
        rows = self.rows
        num_tokens = rows.num_tokens
        decodes = np.flatnonzero(rows.running & (num_tokens - rows.num_computed == 1) & (num_tokens < rows.max_total))
        # None lacks more than one block, as none computes more tokens than a block holds.
        short = decodes[num_tokens[decodes] > rows.capacity[decodes]]
        if not len(short):
            return decodes
        soon = self._soon_short(decodes)
        if len(soon) * PLENTY <= self.cache.pool.num_free:
            short = soon
        if self._grow(rows.of(short), new_blocks):
            return decodes
        return self._decodes_by_urgency(decodes, new_blocks)

    def _soon_short(self, decodes: Rows) -> Rows:
        """Those of `decodes` that will need a block more before a block's worth of steps is over.

        Given to all of them at once, the device's block tables change in one step of so many, and in none between.
        """
        rows = self.rows
        capacity = rows.capacity[decodes]
        # The last token of an answer is never computed.
        needs_more = capacity < rows.max_total[decodes] - 1
        return decodes[needs_more & (capacity - rows.num_tokens[decodes] < self.cache.block_size)]

    def _grow(self, requests: Sequence[Request], new_blocks: NewBlocks) -> bool:
        """One block more for each of `requests`; False, and nothing changed, when there are too few."""
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
        """Those of `decodes` that take part although blocks are short: the most urgent get theirs first."""
        rows = self.rows
        chosen: set[int] = set()
        for request in sorted(rows.of(decodes), key=urgency):
            row = request.row
            # One may have been preempted for one before it in this very pass.
            if request.status is RequestStatus.RUNNING and (
                rows.num_tokens[row] <= rows.capacity[row] or self._grow_by_force(request, chosen, new_blocks)
            ):
                chosen.add(row)
        return np.array(sorted(chosen), np.int64)

    def _grow_by_force(self, request: Request, chosen: set[int], new_blocks: NewBlocks) -> bool:
        """Get a block for a decode, from less urgent requests if need be; False if it must sit this step out."""
        while not self._grow([request], new_blocks):
            # Blocks are on their way back with a step in flight: take nobody else's meanwhile.
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
        cohort = None if chunks else rows.cohort(decodes)
        scheduled = self._with_chunks(decodes, chunks) if cohort is None else cohort.scheduled
        prompt_logprobs = self._prompt_parts(chunks, len(decodes)) if chunks else []
        computed = [(int(rows.num_computed[row]), num_tokens) for row, num_tokens in chunks]
        pairs = self.limits.rounds.pairs(computed)
        whole = bool(chunks) and not any(start for start, num_tokens in computed if num_tokens > 1)
        taking, counts, samples = scheduled
        ends = rows.num_computed[taking] + counts
        rows.num_computed[taking] = ends
        rows.num_tokens[taking] += samples
        rows.steps_in_flight[taking] += 1
        num_tokens = len(decodes) + sum(chunk.num_tokens for chunk in chunks)
        is_uniform = cohort is not None or bool((counts == counts[0]).all())
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
        return ScheduledStep(plan, ends, cohort, work, self.step_times.predict(work) if chunks else 0.0)

    def _with_chunks(self, decodes: Rows, chunks: list[Chunk]) -> ScheduledRows:
        # A chunk of one token is a decode to the kernels; prompts that begin here may need less of them than others.
        chunks.sort(key=lambda chunk: (chunk.num_tokens != 1, not self.rows.num_computed[chunk.row]))
        rows = np.concatenate((decodes, [chunk.row for chunk in chunks]))
        counts = np.concatenate((np.ones(len(decodes), np.int64), [chunk.num_tokens for chunk in chunks]))
        return ScheduledRows(rows, counts, self.rows.num_computed[rows] + counts == self.rows.num_tokens[rows])

    def _prompt_parts(self, chunks: list[Chunk], at: int) -> list[PromptPart]:
        """What `chunks`, which begin at `at` of the step's tokens, are to tell of their prompts.

        What is left of a prompt when it is planned with the decodes is its last token, which tells nothing of it.
        """
        parts: list[PromptPart] = []
        requests = self.rows.of(np.array([chunk.row for chunk in chunks], np.int64))
        for (row, num_tokens), request in zip(chunks, requests, strict=True):
            num_top, computed = request.sampling.prompt_logprobs, int(self.rows.num_computed[row])
            # One that was preempted may compute tokens again whose successors have been scored.
            count = min(computed + num_tokens - request.num_scored, request.num_to_score)
            if num_top is not None and count > 0:
                first = request.num_scored
                parts.append(PromptPart(row, first + 1, count, num_top, at + first - computed))
                request.num_scored += count
            at += num_tokens
        return parts
