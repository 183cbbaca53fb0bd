"""Tracks requests from the waiting queue until their row and cache blocks are released."""

from dataclasses import dataclass

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.request_state import RequestState, RequestStatus
from nanovllm_core.scheduling.queue import WaitingQueue
from nanovllm_core.scheduling.rows import RowTable


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the engine started.

    tokens: computed tokens of prompts and decodes. prefix_queries, prefix_hits: in tokens.
    """

    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    tokens: int = 0


class Lifecycle:
    """Unfinished requests, and finished ones that still hold a row and blocks.

    Finish, abort and preemption all release through `release_when_idle`, which waits for the steps in flight.
    """

    def __init__(self, cache: CacheManager, rows: RowTable):
        self.cache = cache
        self.rows = rows
        self.waiting = WaitingQueue()
        self.counters = SchedulerCounters()
        # Finished and preempted requests that keep row and blocks until no step in flight refers to them.
        self.num_finishing = 0
        self.num_preempting = 0
        self._requests: dict[int, RequestState] = {}

    @property
    def num_waiting(self) -> int:
        """Waiting requests, including preempted ones that a step in flight still refers to."""
        return len(self.waiting) + self.num_preempting

    @property
    def has_requests(self) -> bool:
        """Whether a request is unfinished, or a finished one still holds a row and blocks."""
        return bool(self._requests) or self.num_finishing > 0

    def find(self, key: int) -> RequestState | None:
        """The unfinished request with this key, or None."""
        return self._requests.get(key)

    def add(self, request: RequestState) -> None:
        """Queue a new request with a unique key."""
        self._requests[request.key] = request
        self.waiting.push(request)

    def start(self, request: RequestState, num_computed: int) -> None:
        """Give a row to a waiting request that the cache has admitted. num_computed: its tokens found in the cache."""
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        self.rows.assign(request, num_computed, len(request.block_ids) * self.cache.block_size)
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_computed
            self.counters.prompt_tokens += request.num_prompt_tokens
            if self.cache.prefix_caching:
                self.counters.prefix_queries += request.num_prompt_tokens
                self.counters.prefix_hits += request.num_cached_tokens

    def preempt(self, request: RequestState) -> None:
        """Move a running request back to the queue and free its blocks. Tokens in flight are still appended."""
        self.rows.running[request.row] = False
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self.num_preempting += 1
        self.release_when_idle(request)

    def finish(self, request: RequestState) -> None:
        """Finish a request in any unfinished state."""
        if request.status is RequestStatus.WAITING and not self.waiting.remove(request):
            self.num_preempting -= 1
        if request.row >= 0:
            self.rows.running[request.row], self.rows.finished[request.row] = False, True
        request.status = RequestStatus.FINISHED
        # The key may be used again at once, even if blocks are released later.
        del self._requests[request.key]
        self.num_finishing += 1
        self.release_when_idle(request)

    def release_when_idle(self, request: RequestState) -> None:
        """Release row and blocks, unless a step in flight refers to them. Called again when that step has finished."""
        if request.row >= 0:
            if self.rows.steps_in_flight[request.row] > 0:
                return
            if self.cache.prefix_caching:
                known = min(self.rows.num_computed[request.row], self.rows.num_known[request.row])
                self.cache.commit(request, int(known))
            self.rows.free(request)
            self.cache.release(request)
        if request.status is RequestStatus.FINISHED:
            self.num_finishing -= 1
        else:
            self.num_preempting -= 1
            self.waiting.push(request)
