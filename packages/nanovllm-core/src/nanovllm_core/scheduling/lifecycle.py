"""Tracks requests from the waiting queue until their row and cache blocks are released."""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.cache.prefix_load import PrefixLoad
from nanovllm_core.request_state import RequestState, RequestStatus
from nanovllm_core.scheduling.rows import RowTable
from nanovllm_core.scheduling.waiting_queue import WaitingQueue

# Maximum number of tokens of each size class of steps. A step belongs to the first class that is large enough.
STEP_CLASS_MAX_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the engine started.

    num_queried_tokens: prompt tokens that were looked up in the prefix cache.
    num_steps_by_size: number of steps in each size class of STEP_CLASS_MAX_TOKENS, then the number of larger steps.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_queried_tokens: int = 0
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0
    num_steps_by_size: list[int] = field(default_factory=lambda: [0] * (len(STEP_CLASS_MAX_TOKENS) + 1))

    def count_step(self, num_tokens: int) -> None:
        """Count a step that computes `num_tokens` tokens."""
        self.num_steps += 1
        self.num_computed_tokens += num_tokens
        self.num_steps_by_size[bisect_left(STEP_CLASS_MAX_TOKENS, num_tokens)] += 1


class LoadedRequest(NamedTuple):
    """A request that holds all its blocks, and can start in `group`. num_cached_tokens: see `CacheManager.readmit`."""

    request: RequestState
    group: int
    num_cached_tokens: int


class RequestLifecycle:
    """Unfinished requests, and finished requests that still hold a row and blocks.

    A preempted or finished request is unreleased while a step or a load in flight still uses its row and blocks.
    caches: the cache of each group of requests (see `Scheduler`).
    """

    def __init__(self, caches: Sequence[CacheManager], rows: RowTable, *, can_drafts_lag: bool):
        self.caches = caches
        self.rows = rows
        self._can_drafts_lag = can_drafts_lag
        self.waiting = WaitingQueue()
        self.counters = SchedulerCounters()
        self.num_finished_unreleased = 0
        self.num_preempted_unreleased = 0
        self._loads: dict[int, PrefixLoad] = {}
        # Requests whose load has ended and that have not started yet.
        self.loaded: dict[int, LoadedRequest] = {}
        self._unfinished_by_key: dict[int, RequestState] = {}

    @property
    def num_waiting(self) -> int:
        """The number of requests that have not started, or are preempted with an unreleased row."""
        return len(self.waiting) + self.num_preempted_unreleased + len(self._loads) + len(self.loaded)

    @property
    def has_requests(self) -> bool:
        """Whether a request is unfinished, or still holds a row and blocks."""
        return bool(self._unfinished_by_key) or self.num_finished_unreleased > 0

    def cache_of(self, request: RequestState) -> CacheManager:
        """The cache with the blocks of a request that has a row."""
        return self.caches[self.rows.group_of(request.row)]

    def has_free_row(self, group: int) -> bool:
        """Whether `group` has a free row that is not reserved for a request that loads or has loaded its prefix."""
        num_loads = sum(load.group == group for load in (*self._loads.values(), *self.loaded.values()))
        return self.rows.count_free_rows(group) > num_loads

    def find(self, key: int) -> RequestState | None:
        """The unfinished request with this key, or None."""
        return self._unfinished_by_key.get(key)

    def add(self, request: RequestState) -> None:
        """Queue a new request with a unique key."""
        self._unfinished_by_key[request.key] = request
        self.waiting.push(request)

    def start_load(self, request: RequestState, group: int) -> bool:
        """Load more of the prefix of a request that `CacheManager.admit` has admitted to `group`.

        Returns whether a load was started. When the load has ended, `loaded` has the request. If the load failed, or
        if the request can't be admitted again, the request returns to the queue instead.
        """
        load = self.caches[group].start_load(request)
        if load is None:
            return False
        self.waiting.remove(request)
        request.status = RequestStatus.WAITING_KV
        self._loads[request.key] = load
        return True

    def start(self, request: RequestState, group: int, num_cached_tokens: int) -> None:
        """Give a row of `group` to a request that waits or has loaded."""
        cache = self.caches[group]
        if self.loaded.pop(request.key, None) is None:
            self.waiting.remove(request)
        else:
            cache.end_hold(request)
        request.status = RequestStatus.RUNNING
        self.rows.assign(request, group, num_cached_tokens, len(request.block_ids) * cache.block_size)
        if self._can_drafts_lag:
            self.rows.draft_lag[request.row] = num_cached_tokens - cache.count_draft_entries(request, num_cached_tokens)
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached_tokens
            request.scheduled_time = time.monotonic()
            self.counters.num_prompt_tokens += request.num_prompt_tokens
            if cache.prefix_caching:
                self.counters.num_queried_tokens += request.num_prompt_tokens
                self.counters.num_cached_tokens += num_cached_tokens

    def give_up_load(self, group: int) -> bool:
        """Queue a `loaded` request of `group` again, and free its blocks. Returns False if there is no such request."""
        found = next((loaded for loaded in reversed(self.loaded.values()) if loaded.group == group), None)
        if found is None:
            return False
        request = found.request
        self._release_loaded(request)
        request.has_started_load = False
        request.status = RequestStatus.WAITING
        self.waiting.push(request)
        return True

    def _release_loaded(self, request: RequestState) -> None:
        self.caches[self.loaded.pop(request.key).group].release(request)

    def preempt(self, request: RequestState) -> None:
        """Free the blocks of a running request and queue it again. Tokens that steps in flight sample are kept."""
        self.rows.is_running[request.row] = False
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        request.has_started_load = False
        self.counters.num_preemptions += 1
        self.num_preempted_unreleased += 1
        self.release_if_unused(request)

    def finish(self, request: RequestState) -> None:
        """Finish a request, whether it waits or runs."""
        if request.status is RequestStatus.WAITING and not self.waiting.remove(request):
            self.num_preempted_unreleased -= 1
        if request.row >= 0:
            self.rows.is_running[request.row], self.rows.is_finished[request.row] = False, True
        request.status = RequestStatus.FINISHED
        del self._unfinished_by_key[request.key]
        self.num_finished_unreleased += 1
        self.release_if_unused(request)

    def release_if_unused(self, request: RequestState) -> None:
        """Release row and blocks unless a step or load in flight uses them. Call again after the step or load."""
        if request.row >= 0:
            if self.rows.num_steps_in_flight[request.row] > 0:
                return
            cache = self.cache_of(request)
            if cache.prefix_caching:
                # The hash of a block needs all token ids of the block on the host.
                num_computed = self.rows.num_computed_tokens[request.row]
                cache.commit(request, int(min(num_computed, self.rows.num_host_tokens[request.row])))
                if self._can_drafts_lag:
                    cache.mark_draft_entries(request, int(num_computed - max(self.rows.draft_lag[request.row], 0)))
            self.rows.release(request)
            cache.release(request)
        elif request.key in self._loads:
            load = self._loads[request.key]
            if not load.is_ended:
                return
            del self._loads[request.key]
            cache = self.caches[load.group]
            cache.finish_load(load)
            if load.is_usable and request.status is RequestStatus.WAITING_KV:
                num_cached_tokens = cache.readmit(request)
                if num_cached_tokens is not None:
                    self.loaded[request.key] = LoadedRequest(request, load.group, num_cached_tokens)
                    return
        elif request.key in self.loaded:
            self._release_loaded(request)
        if request.status is RequestStatus.FINISHED:
            self.num_finished_unreleased -= 1
        elif request.status is RequestStatus.WAITING_KV:
            request.status = RequestStatus.WAITING
            self.waiting.push(request)
        else:
            self.num_preempted_unreleased -= 1
            self.waiting.push(request)
