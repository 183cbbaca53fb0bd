"""Plans steps: chooses how many tokens of each request the next step computes."""

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.cache.host_memory import CopyBatch
from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.cache.prefix_load import PrefixLoad
from nanovllm_core.cache.tiers import HostTier
from nanovllm_core.outputs import StepOutputs
from nanovllm_core.request_state import RequestState, RequestStatus
from nanovllm_core.scheduling.budget import StepLimits
from nanovllm_core.scheduling.draft_times import DraftLimits, DraftTimes
from nanovllm_core.scheduling.drafting import DraftPlanner
from nanovllm_core.scheduling.lifecycle import RequestLifecycle
from nanovllm_core.scheduling.plan import (
    BatchShape,
    DraftEntryRange,
    NewBlocks,
    PromptLogprobsRange,
    RowIndices,
    ScheduledRows,
    ScheduledStep,
    StepPlan,
    StepResults,
)
from nanovllm_core.scheduling.prompt_scheduler import PromptChunk, PromptScheduler, ScheduledPrompts
from nanovllm_core.scheduling.request_order import SortKey, urgency_order
from nanovllm_core.scheduling.result_applier import ResultApplier
from nanovllm_core.scheduling.rows import RowTable
from nanovllm_core.scheduling.step_time import StepTimeModel, StepWork

# Rows get their next block early, before they need it, if at least this many blocks are free per early block.
MIN_FREE_BLOCKS_PER_EARLY_BLOCK = 4


class Scheduler:
    """Schedules requests from arrival to the last token. A step may contain prompt chunks and decodes.

    Each running request belongs to a group with its own cache and its own rows. If ranks have different requests, there
    is one group per rank; else there is one group. A step takes as long as the largest group needs. Therefore the
    limits of a step apply to each group.

    Several steps may be in flight: `schedule` may be called before `complete` of earlier steps.
    tier: the cache tier in host memory, one level below `caches`; None without this tier.
    """

    def __init__(
        self,
        caches: Sequence[CacheManager],
        *,
        max_num_seqs: int,
        limits: StepLimits,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        seed: int = 0,
        step_time_model: StepTimeModel | None = None,
        draft_limits: DraftLimits | None = None,
        draft_times: DraftTimes | None = None,
        tier: HostTier | None = None,
    ):
        self._eos_token_ids = frozenset(eos_token_ids)
        self.caches = caches
        self.tier = tier
        self.rows = RowTable(max_num_seqs, len(self._eos_token_ids), len(caches))
        self._draft_limits = draft_limits = draft_limits or DraftLimits()
        self._lifecycle = RequestLifecycle(caches, self.rows, can_drafts_lag=draft_limits.can_lag)
        self.counters = self._lifecycle.counters
        self.limits = limits
        self.step_time_model = step_time_model or StepTimeModel()
        planner = DraftPlanner(self.rows, draft_limits, self.step_time_model, draft_times or DraftTimes())
        self.draft_planner = planner if draft_limits.max_drafts else None
        self._result_applier = ResultApplier(self._lifecycle, self.draft_planner)
        self._prompt_scheduler = PromptScheduler(self._lifecycle, limits, self.step_time_model)
        self._max_model_len = max_model_len
        self._seed_generator = random.Random(seed)

    @property
    def running_requests(self) -> list[RequestState]:
        """The requests that may be scheduled."""
        return self.rows.requests_of(np.flatnonzero(self.rows.is_running))

    @property
    def num_waiting(self) -> int:
        """The number of requests that are queued, wait for a load, or were preempted but still hold their row."""
        return self._lifecycle.num_waiting

    @property
    def has_requests(self) -> bool:
        """Whether a request is unfinished, or still holds a row and blocks."""
        return self._lifecycle.has_requests

    @property
    def has_copies(self) -> bool:
        """Whether copies between tiers of the cache are in flight."""
        return self.tier is not None and self.tier.is_busy

    def complete_copies(self) -> Sequence[PrefixLoad]:
        """Process copies that have ended. Returns the ended loads. Requests of these loads can now be scheduled."""
        loads = () if self.tier is None else self.tier.collect_ended_loads()
        for load in loads:
            self._lifecycle.release_if_unused(load.request)
        return loads

    def take_copies(self, *, has_plan: bool) -> Sequence[CopyBatch]:
        """Copies that the ranks must execute now. has_plan: whether a planned step has not been launched yet."""
        if self.tier is None:
            return ()
        if not has_plan:
            return self.tier.take_loads() + self.tier.take_stores()
        # A load may write to the slot of a checkpoint from which a request of the planned step starts. Other loads are
        # launched now, because after the launch of the step they would wait for the step's end.
        has_checkpoints = len(self.tier.pools) > 1
        return () if has_checkpoints else self.tier.take_loads()

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks and checkpoints, in all tiers. Running requests keep their blocks."""
        for cache in self.caches:
            cache.forget()
        if self.tier is not None:
            self.tier.forget()

    def add(self, request: RequestState) -> None:
        """Queue a validated request. Raises ValueError if the key is in use."""
        if self._lifecycle.find(request.key) is not None:
            raise ValueError(f"request key {request.key} is in use")
        sampling = request.sampling
        max_output_tokens = sampling.max_tokens or self._max_model_len
        request.max_total_tokens = min(request.num_prompt_tokens + max_output_tokens, self._max_model_len)
        request.stop_ids = frozenset(sampling.stop_token_ids)
        # After a complete match, a grammar allows only end-of-sequence tokens, so these tokens must stop the request.
        if not sampling.ignore_eos or sampling.grammar is not None:
            request.stop_ids |= self._eos_token_ids
        request.seed = self._seed_generator.getrandbits(63) if sampling.seed is None else sampling.seed
        # Hash the prompt now, not in `schedule`, because the device may be idle during `schedule`.
        self.caches[0].hash_prompt(request)
        self._lifecycle.add(request)

    def abort(self, key: int) -> bool:
        """Finish a request now. Returns False if no unfinished request has this key."""
        request = self._lifecycle.find(key)
        if request is None:
            return False
        self._lifecycle.finish(request)
        return True

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step; None if no request can be computed now."""
        num_preemptions_before = self.counters.num_preemptions
        prompts = ScheduledPrompts([], [], NewBlocks())
        decode_rows = self._schedule_decodes(prompts.new_blocks)
        decode_works = [
            StepWork(len(rows), int(self.rows.num_computed_tokens[rows].sum()) + len(rows))
            for rows in self.rows.split_by_group(decode_rows)
        ]
        # Preempted requests get free blocks first. Therefore admit no request if this call has preempted a request, or
        # while an earlier preempted request still holds its row.
        has_preempted = self.counters.num_preemptions > num_preemptions_before
        has_preempted |= self._lifecycle.num_preempted_unreleased > 0
        self._prompt_scheduler.schedule(decode_works, prompts, may_admit=not has_preempted)
        if not len(decode_rows) and not prompts.chunks:
            return None
        num_drafts = None
        if self.draft_planner is not None and not prompts.chunks:
            num_drafts = self.draft_planner.choose(decode_rows, decode_works[0])
        if num_drafts is not None and not self._allocate_drafts(decode_rows, num_drafts, prompts.new_blocks):
            num_drafts = None
        return self._make_step(decode_rows, decode_works, prompts, num_drafts)

    def observe(self, step: ScheduledStep, seconds: float) -> None:
        """Fit the predictions of step times to the device time of a finished step."""
        self.step_time_model.observe(step.work, seconds)
        if self.draft_planner is not None and step.decode_columns is not None:
            self.draft_planner.observe_time(step.plan.shape.num_reqs, step.work, seconds)

    def complete(self, step: ScheduledStep, results: StepResults) -> StepOutputs:
        """Apply a finished step's results, and return its outputs. Call in the order in which steps were scheduled."""
        return self._result_applier.apply(step, results)

    def _schedule_decodes(self, new_blocks: NewBlocks) -> RowIndices:
        """The rows that decode one token in this step. Allocates their blocks."""
        rows, num_tokens = self.rows, self.rows.num_tokens
        can_decode = (num_tokens - rows.num_computed_tokens == 1) & (num_tokens < rows.max_total_tokens)
        decode_rows = np.flatnonzero(rows.is_running & can_decode)
        # Each decode computes one token, so it lacks at most one block.
        if not self._lack_space(decode_rows, 0).any():
            return decode_rows
        return np.concatenate(
            [
                self._allocate_decodes(cache, group_rows, new_blocks)
                for cache, group_rows in zip(self.caches, rows.split_by_group(decode_rows), strict=True)
            ]
        )

    def _allocate_decodes(self, cache: CacheManager, decode_rows: RowIndices, new_blocks: NewBlocks) -> RowIndices:
        """Allocate the blocks of one group's decodes. Returns the rows that can decode."""
        growing_rows = decode_rows[self._lack_space(decode_rows, 0)]
        if not len(growing_rows):
            return decode_rows
        rows_near_capacity = self._rows_near_capacity(decode_rows)
        if len(rows_near_capacity) * MIN_FREE_BLOCKS_PER_EARLY_BLOCK <= cache.pool.num_free:
            growing_rows = rows_near_capacity
        if self._add_blocks(cache, self.rows.requests_of(growing_rows), new_blocks):
            return decode_rows
        return self._select_decodes_by_urgency(cache, decode_rows, new_blocks)

    def _allocate_drafts(self, decode_rows: RowIndices, num_drafts: NDArray[np.int64], new_blocks: NewBlocks) -> bool:
        """Allocate the blocks of drafts. Returns False if too few blocks are free."""
        requests = self.rows.requests_of(decode_rows[self._lack_space(decode_rows, num_drafts)])
        return not requests or self._add_blocks(self.caches[0], requests, new_blocks)

    def _lack_space(self, decode_rows: RowIndices, num_drafts: NDArray[np.int64] | int) -> NDArray[np.bool_]:
        """Whether each row lacks space for the tokens that the step computes and for the drafts that it proposes."""
        rows, limits = self.rows, self._draft_limits
        num_needed = rows.num_tokens[decode_rows] + num_drafts
        if limits.uses_cache:
            # The last output token is not computed, so it needs no place in a block.
            num_with_proposals = np.minimum(num_needed + limits.max_drafts, rows.max_total_tokens[decode_rows] - 1)
            num_needed = np.maximum(num_needed, num_with_proposals)
        return num_needed > rows.capacity[decode_rows]

    def _rows_near_capacity(self, decode_rows: RowIndices) -> RowIndices:
        """The rows that will need another block within `block_size` steps.

        If all these rows get a block in one step, the device's block table changes in fewer steps.
        """
        rows = self.rows
        capacity = rows.capacity[decode_rows]
        needs_more = capacity < rows.max_total_tokens[decode_rows] - 1
        return decode_rows[needs_more & (capacity - rows.num_tokens[decode_rows] < self.caches[0].block_size)]

    def _add_blocks(self, cache: CacheManager, requests: Sequence[RequestState], new_blocks: NewBlocks) -> bool:
        """Give each request one more block. Returns False and changes nothing if too few blocks are free."""
        block_ids = cache.grow(requests)
        if block_ids is None:
            return False
        rows = [request.row for request in requests]
        self.rows.capacity[rows] += cache.block_size
        new_blocks.rows.extend(rows)
        new_blocks.entries.extend([len(request.block_ids) - 1 for request in requests])
        new_blocks.block_ids.extend(block_ids)
        return True

    def _select_decodes_by_urgency(
        self, cache: CacheManager, decode_rows: RowIndices, new_blocks: NewBlocks
    ) -> RowIndices:
        """The rows that can decode when too few blocks are free. The most urgent requests get blocks first."""
        rows = self.rows
        selected_rows: set[int] = set()
        for request in sorted(rows.requests_of(decode_rows), key=urgency_order):
            row = request.row
            # An earlier iteration may have preempted this request.
            if request.status is RequestStatus.RUNNING and (
                rows.num_tokens[row] <= rows.capacity[row]
                or self._add_block_or_preempt(cache, request, selected_rows, new_blocks)
            ):
                selected_rows.add(row)
        return np.array(sorted(selected_rows), np.int64)

    def _add_block_or_preempt(
        self, cache: CacheManager, request: RequestState, selected_rows: set[int], new_blocks: NewBlocks
    ) -> bool:
        """Give a request a block, preempting others of its group if needed. Returns False if the request must wait."""
        group = self.rows.group_of(request.row)
        while not self._add_blocks(cache, [request], new_blocks):
            if self._lifecycle.give_up_load(group):
                continue
            # A step in flight will soon release blocks, or a load can soon be given up: preempt no further request.
            if self.rows.count_unreleased(group) or cache.has_loads():
                return False
            running_requests = self.rows.requests_of(self.rows.running_rows(group))
            candidates = (running for running in running_requests if running.row not in selected_rows)
            victim = max(candidates, key=self._preemption_order)
            self._lifecycle.preempt(victim)
            if victim is request:
                return False
        return True

    def _preemption_order(self, request: RequestState) -> SortKey:
        """The request with the highest key is preempted first: an unfinished prefill, or the least urgent request."""
        is_prefilling = self.rows.num_tokens[request.row] - self.rows.num_computed_tokens[request.row] > 1
        return (int(is_prefilling), *urgency_order(request))

    def _make_step(
        self,
        decode_rows: RowIndices,
        decode_works: Sequence[StepWork],
        prompts: ScheduledPrompts,
        num_drafts: NDArray[np.int64] | None,
    ) -> ScheduledStep:
        """Make the step. Updates `rows` as if the step had already computed and sampled its tokens.

        num_drafts: number of drafts of each of `decode_rows`; None for a step without drafts.
        """
        rows = self.rows
        chunks, new_rows, new_blocks = prompts
        if chunks:
            scheduled, decode_columns = self._scheduled_rows(decode_rows, chunks), None
        elif num_drafts is not None:
            scheduled, decode_columns = rows.draft_batch(decode_rows, num_drafts)
        else:
            scheduled, decode_columns = rows.decode_batch(decode_rows)
        prompt_logprobs_ranges = self._prompt_logprobs_ranges(chunks, len(decode_rows)) if chunks else []
        has_only_whole_prompts = bool(chunks) and not any(chunk.start for chunk in chunks if chunk.num_tokens > 1)
        row_indices, tokens_per_row, is_sampled = scheduled
        num_computed_tokens = rows.num_computed_tokens[row_indices] + tokens_per_row
        rows.num_computed_tokens[row_indices] = num_computed_tokens
        rows.num_tokens[row_indices] += is_sampled if num_drafts is None else tokens_per_row
        rows.num_steps_in_flight[row_indices] += 1
        max_group_reqs, work = self._measure_largest_group(decode_works, chunks)
        proposes, late_draft_entries, has_proposals = False, list[DraftEntryRange](), is_sampled
        if self.draft_planner is not None:
            proposes, late_draft_entries, has_proposals = self.draft_planner.plan_proposals(
                scheduled, num_computed_tokens, decode_works[0], has_prompts=bool(chunks)
            )
        if num_drafts is not None:
            work, query_len = work._replace(num_tokens=int(tokens_per_row.sum())), None
        else:
            is_uniform = not chunks or bool((tokens_per_row == tokens_per_row[0]).all())
            query_len = int(tokens_per_row[0]) if is_uniform else None
        has_drafts = num_drafts is not None
        plan = StepPlan(
            step_number=self.counters.num_steps,
            new_rows=new_rows,
            new_blocks=new_blocks,
            scheduled=scheduled,
            shape=BatchShape(max_group_reqs, work.num_tokens, query_len, has_only_whole_prompts, has_drafts, proposes),
            max_seq_len=int(num_computed_tokens.max()),
            prompt_logprobs_ranges=prompt_logprobs_ranges,
            late_draft_entries=late_draft_entries,
        )
        self.counters.count_step(int(tokens_per_row.sum()))
        if chunks:
            work = work._replace(num_tokens=self.limits.pad(work.num_tokens))
        elif self._draft_limits.uses_cache:
            num_late = sum(entries.num_tokens for entries in late_draft_entries)
            work = work._replace(num_proposal_passes=int(proposes), num_late_draft_entries=num_late)
        predicted_s = self.step_time_model.predict(work) if chunks else 0.0
        return ScheduledStep(plan, num_computed_tokens, decode_columns, work, predicted_s, has_proposals)

    def _measure_largest_group(
        self, decode_works: Sequence[StepWork], chunks: Sequence[PromptChunk]
    ) -> tuple[int, StepWork]:
        """The maximum number of requests of a group, and a `StepWork` whose fields are maxima over the groups.

        No number includes padding.
        """
        num_reqs, works = [work.num_tokens for work in decode_works], [*decode_works]
        if chunks:
            for group, work in enumerate(decode_works):
                ranges = [(start, length) for row, start, length in chunks if self.rows.group_of(row) == group]
                num_reqs[group] += len(ranges)
                num_tokens = work.num_tokens + sum(length for _, length in ranges)
                prompt_pairs = self.limits.attention_estimator.estimate_pairs(ranges)
                works[group] = work._replace(num_tokens=num_tokens, prompt_pairs=prompt_pairs)
        return max(num_reqs), StepWork(*map(max, zip(*works, strict=True)))

    def _scheduled_rows(self, decode_rows: RowIndices, chunks: list[PromptChunk]) -> ScheduledRows:
        # The kernels expect rows with one token first, and prompts without computed tokens last.
        table = self.rows
        chunks.sort(key=lambda chunk: (chunk.num_tokens != 1, chunk.start == 0))
        rows = np.concatenate((decode_rows, [chunk.row for chunk in chunks]))
        tokens_per_row = np.concatenate((np.ones(len(decode_rows), np.int64), [chunk.num_tokens for chunk in chunks]))
        is_sampled = table.num_computed_tokens[rows] + tokens_per_row == table.num_tokens[rows]
        return ScheduledRows(rows, tokens_per_row, is_sampled)

    def _prompt_logprobs_ranges(self, chunks: list[PromptChunk], num_decodes: int) -> list[PromptLogprobsRange]:
        """The prompt tokens whose log-probabilities the step computes. num_decodes: the step's number of decodes."""
        ranges: list[PromptLogprobsRange] = []
        requests = self.rows.requests_of(np.array([chunk.row for chunk in chunks], np.int64))
        # Index of the chunk's first token among all tokens of the step.
        first_token_index = num_decodes
        for (row, num_computed, num_tokens), request in zip(chunks, requests, strict=True):
            num_top = request.sampling.prompt_logprobs
            # A preempted request recomputes tokens whose log-probabilities are known. Do not score these tokens again.
            num_scored = request.num_scheduled_prompt_logprobs
            num_to_score = min(num_computed + num_tokens - num_scored, request.num_unscheduled_prompt_logprobs)
            if num_top is not None and num_to_score > 0:
                logits_index = first_token_index + num_scored - num_computed
                ranges.append(PromptLogprobsRange(row, num_scored + 1, num_to_score, num_top, logits_index))
                request.num_scheduled_prompt_logprobs += num_to_score
            first_token_index += num_tokens
        return ranges
