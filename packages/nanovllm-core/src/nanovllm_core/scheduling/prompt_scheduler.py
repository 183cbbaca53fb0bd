"""Divides a step's budget among prompts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nanovllm_core.cache.manager import BlockShortage
from nanovllm_core.request_state import RequestState
from nanovllm_core.scheduling.budget import StepBudget, StepLimits
from nanovllm_core.scheduling.lifecycle import RequestLifecycle
from nanovllm_core.scheduling.plan import NewBlocks, NewRow, NewState
from nanovllm_core.scheduling.request_order import admission_order, service_class
from nanovllm_core.scheduling.step_time import StepTimeModel, StepWork

MAX_WAITING_CANDIDATES = 64  # maximum number of waiting requests that one search for candidates considers
# Chunks end at multiples of this number, or of the block size if the block size is smaller.
CHUNK_UNIT_TOKENS = 16
# Every RETRY_INTERVAL_SEARCHES-th search retries requests that lacked blocks: their prefix may be cached by then.
RETRY_INTERVAL_SEARCHES = 16
# On average the oldest prompt of the first service class (see `service_class`) gets at least this share of the
# time for prompts.
MIN_OLDEST_SHARE = 0.25
# Maximum number of other requests that are admitted while a request waits for free blocks. After that, only requests of
# earlier service classes may overtake the waiting request.
MAX_BYPASSES = 32
# A group (see `Scheduler`) is overloaded if it has over MAX_GROUP_IMBALANCE more running requests than the emptiest
# group. A request prefers groups that are not overloaded, because steps take as long as the largest group needs. Among
# these groups, the request prefers the group that has cached most of the prompt.
MAX_GROUP_IMBALANCE = 4


class PromptChunk(NamedTuple):
    """The part of a prompt that a step computes. start: number of tokens that were computed before."""

    row: int
    start: int
    num_tokens: int


class ScheduledPrompts(NamedTuple):
    """The chunks of a step, the rows of requests that the step admits, and all blocks that the step adds."""

    chunks: list[PromptChunk]
    new_rows: list[NewRow]
    new_blocks: NewBlocks


class _Candidate(NamedTuple):
    """A request whose prompt the step may compute; after a preemption, also the existing output.

    No step in flight samples a token of the request, so it ends at `request.num_tokens`.
    start: number of computed tokens; for a waiting request, the estimated number of cached tokens in the group with
        the most cached tokens.
    """

    request: RequestState
    start: int


class PromptScheduler:
    """Chooses the prompts of each step, by service class, then by remaining work."""

    def __init__(self, lifecycle: RequestLifecycle, limits: StepLimits, step_time_model: StepTimeModel):
        self._lifecycle = lifecycle
        self._limits = limits
        self._caches = lifecycle.caches
        self._rows = lifecycle.rows
        self._step_time_model = step_time_model
        self._chunk_unit = min(self._caches[0].block_size, CHUNK_UNIT_TOKENS)
        # For each waiting request: the estimated number of cached tokens in each group, by request key.
        self._cached_tokens_by_key: dict[int, list[int]] = {}
        # For each request that lacked blocks: the number of free blocks that its admission needs, by request key.
        self._needed_blocks_by_key: dict[int, int] = {}
        self._num_candidate_searches = 0
        self._num_admissions = 0
        # Waiting requests that have lacked blocks, with the value of `_num_admissions` when they first lacked blocks.
        self._admissions_at_shortage: dict[RequestState, int] = {}
        # Of these requests, the first in `admission_order` that MAX_BYPASSES requests have overtaken.
        self._blocked_request: RequestState | None = None

    def schedule(self, decode_works: Sequence[StepWork], prompts: ScheduledPrompts, *, may_admit: bool) -> None:
        """Add chunks to `prompts`. decode_works: the work of each group's decodes."""
        candidates = self._running_candidates()
        if may_admit:
            candidates += self._loaded_candidates()
            if self._rows.num_free_rows:
                candidates += self._waiting_candidates()
        if not candidates:
            return
        has_decodes = any(work.num_tokens for work in decode_works)
        budgets = [
            StepBudget(self._limits, self._step_time_model, work, self._chunk_unit, has_decodes=has_decodes)
            for work in decode_works
        ]
        candidates.sort(key=self._service_order)
        oldest = min(candidates, key=lambda candidate: admission_order(candidate.request))
        if oldest.request.num_unfair_steps >= 1 / MIN_OLDEST_SHARE - 1:
            candidates.remove(oldest)
            candidates.insert(0, oldest)
        for candidate in candidates:
            self._schedule_chunk(candidate, budgets, prompts)
        is_fair = self._is_fair_to(oldest.request, prompts.chunks)
        oldest.request.num_unfair_steps = 0 if is_fair else oldest.request.num_unfair_steps + 1
        # A step may have space for more than MAX_WAITING_CANDIDATES short prompts, so search for further candidates.
        while may_admit and not all(budget.is_full for budget in budgets) and self._rows.num_free_rows:
            num_admitted = len(prompts.new_rows)
            for candidate in sorted(self._waiting_candidates(), key=self._service_order):
                self._schedule_chunk(candidate, budgets, prompts)
            if len(prompts.new_rows) == num_admitted:
                break

    def _is_fair_to(self, request: RequestState, chunks: Sequence[PromptChunk]) -> bool:
        """Whether `request` gets at least MIN_OLDEST_SHARE of the time that its group's chunks take."""
        group_of = self._rows.group_of
        seconds_by_row = {
            row: self._step_time_model.chunk_seconds(start, num_tokens)
            for row, start, num_tokens in chunks
            if group_of(row) == group_of(request.row)
        }
        own_s = seconds_by_row.get(request.row)
        return own_s is not None and own_s >= MIN_OLDEST_SHARE * sum(seconds_by_row.values())

    def _schedule_chunk(self, candidate: _Candidate, budgets: Sequence[StepBudget], prompts: ScheduledPrompts) -> None:
        """Add a chunk of the candidate if possible."""
        request, start = candidate
        if (loaded := self._lifecycle.loaded.get(request.key)) is not None:
            self._start_in(loaded.group, request, start, budgets[loaded.group], prompts)
        elif request.row < 0:
            self._start(request, budgets, prompts)
        else:
            budget = budgets[self._rows.group_of(request.row)]
            if num_tokens := budget.size_chunk(start, request.num_tokens):
                prompts.chunks.append(PromptChunk(request.row, start, num_tokens))
                budget.add_chunk(start, request.num_tokens, num_tokens)

    def _start(self, request: RequestState, budgets: Sequence[StepBudget], prompts: ScheduledPrompts) -> None:
        """Admit a waiting request if possible."""
        num_needed_blocks: list[int] = []
        for group in self._rank_groups(request, budgets):
            num_cached_tokens = self._cached_tokens_by_key[request.key][group]
            # A cached prefix is worth waiting for, so do not try groups that have cached less.
            if budgets[group].size_chunk(num_cached_tokens, request.num_tokens) == 0 or self._must_wait(request):
                return
            shortage = self._admit(request, group, budgets[group], prompts)
            if shortage is None:
                return
            num_needed_blocks.append(shortage.num_blocks)
        if num_needed_blocks:
            self._needed_blocks_by_key[request.key] = min(num_needed_blocks)
            self._admissions_at_shortage.setdefault(request, self._num_admissions)

    def _rank_groups(self, request: RequestState, budgets: Sequence[StepBudget]) -> list[int]:
        """The groups with a free row, in the order in which a waiting request should try to start."""
        rows = self._rows
        groups = [group for group in range(len(budgets)) if self._lifecycle.has_free_row(group)]
        if len(groups) < 2:
            return groups
        num_running = {group: len(rows.running_rows(group)) for group in groups}
        max_running = min(num_running.values()) + MAX_GROUP_IMBALANCE
        cached_tokens_by_group = self._cached_tokens_by_key[request.key]

        def order(group: int) -> tuple[bool, int, bool, int, int]:
            num_free_blocks = self._caches[group].pool.num_free
            is_overloaded, is_full = num_running[group] > max_running, budgets[group].is_full
            return is_overloaded, -cached_tokens_by_group[group], is_full, num_running[group], -num_free_blocks

        return sorted(groups, key=order)

    def _running_candidates(self) -> list[_Candidate]:
        rows = self._rows
        # A request with only one token left to compute is scheduled as a decode, so exclude it.
        prefilling_rows = np.flatnonzero(rows.is_running & (rows.num_tokens - rows.num_computed_tokens > 1))
        starts = rows.num_computed_tokens[prefilling_rows].tolist()
        return list(map(_Candidate, rows.requests_of(prefilling_rows), starts))

    def _loaded_candidates(self) -> list[_Candidate]:
        return [_Candidate(loaded.request, loaded.num_cached_tokens) for loaded in self._lifecycle.loaded.values()]

    def _waiting_candidates(self) -> list[_Candidate]:
        requests = list(self._lifecycle.waiting.peek(MAX_WAITING_CANDIDATES))
        self._find_blocked_request()
        if self._blocked_request is not None and self._blocked_request not in requests:
            # Requests that arrived earlier but were queued later may precede it, and have to wait for it.
            requests.append(self._blocked_request)
        last_estimates = self._cached_tokens_by_key
        estimates = {
            request.key: [
                cache.estimate_cached_tokens(request, last_estimate)
                for cache, last_estimate in zip(
                    self._caches, last_estimates.get(request.key, [None] * len(self._caches)), strict=True
                )
            ]
            for request in requests
        }
        self._num_candidate_searches += 1
        if self._num_candidate_searches % RETRY_INTERVAL_SEARCHES == 0:
            self._needed_blocks_by_key.clear()
        # Forget the numbers of needed blocks of requests whose number of cached tokens has changed.
        self._needed_blocks_by_key = {
            key: num_blocks
            for key, num_blocks in self._needed_blocks_by_key.items()
            if estimates.get(key) == last_estimates.get(key)
        }
        self._cached_tokens_by_key = estimates
        return [
            _Candidate(request, max(estimates[request.key])) for request in requests if not self._must_wait(request)
        ]

    def _service_order(self, candidate: _Candidate) -> tuple[tuple[int, int], float, int, float]:
        request, start = candidate
        num_left_tokens = request.num_tokens - start
        remaining_s = self._step_time_model.chunk_seconds(start, num_left_tokens)
        return service_class(request), remaining_s, num_left_tokens, request.client_request.arrival_time

    def _must_wait(self, request: RequestState) -> bool:
        """Whether `request` must wait for free blocks, or for a request that too many others have overtaken."""
        num_blocks = self._needed_blocks_by_key.get(request.key, 0)
        # `num_blocks` includes the watermark (blocks in reserve), which must stay free only while requests run.
        if num_blocks and all(
            cache.pool.num_free < num_blocks and len(self._rows.running_rows(group))
            for group, cache in enumerate(self._caches)
        ):
            return True
        blocked = self._blocked_request
        return blocked not in (None, request) and service_class(request) >= service_class(blocked)

    def _find_blocked_request(self) -> None:
        """Set `_blocked_request`. Call after each admission, and when a request may have left the queue."""
        waiting, shortages = self._lifecycle.waiting, self._admissions_at_shortage.items()
        self._admissions_at_shortage = {request: count for request, count in shortages if request in waiting}
        max_count = self._num_admissions - MAX_BYPASSES
        overtaken = [request for request, count in self._admissions_at_shortage.items() if count <= max_count]
        self._blocked_request = min(overtaken, key=admission_order, default=None)

    def _admit(
        self, request: RequestState, group: int, budget: StepBudget, prompts: ScheduledPrompts
    ) -> BlockShortage | None:
        """Admit a request to `group` if possible. Returns a shortage only if `group` has too few free blocks."""
        cache = self._caches[group]
        if cache.should_await_other_load(request):
            return None
        num_cached_tokens = cache.admit(request, keep_watermark=len(self._rows.running_rows(group)) > 0)
        if isinstance(num_cached_tokens, BlockShortage):
            return num_cached_tokens
        if self._lifecycle.start_load(request, group) or self._start_in(
            group, request, num_cached_tokens, budget, prompts
        ):
            self._num_admissions += 1
            self._find_blocked_request()
        else:
            cache.release(request)
        return None

    def _start_in(
        self, group: int, request: RequestState, num_cached_tokens: int, budget: StepBudget, prompts: ScheduledPrompts
    ) -> bool:
        """Start a request that holds its blocks, and add its first chunk. Returns False if no chunk fits."""
        num_tokens = budget.size_chunk(num_cached_tokens, request.num_tokens)
        if num_tokens == 0:
            return False
        self._lifecycle.start(request, group, num_cached_tokens)
        prompts.new_rows.append(_make_new_row(request, num_cached_tokens))
        prompts.new_blocks.add(request.row, 0, request.block_ids)
        prompts.chunks.append(PromptChunk(request.row, num_cached_tokens, num_tokens))
        budget.add_chunk(num_cached_tokens, request.num_tokens, num_tokens)
        return True


def _make_new_row(request: RequestState, num_computed_tokens: int) -> NewRow:
    return NewRow(
        row=request.row,
        token_ids=request.token_ids(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        sampling=request.sampling,
        seed=request.seed,
        stop_ids=tuple(sorted(request.stop_ids)),
        compiled_grammar=request.compiled_grammar,
        state=NewState(request.state_slot, request.source_state_slot, tuple(request.checkpoints)),
        prediction_ids=request.client_request.prediction_ids,
    )
