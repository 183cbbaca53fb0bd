"""Requests from the queue to their last block: who waits, who holds a row, and how a hold ends.

Whatever ends a hold on row and blocks (finish, abort, preemption) goes through one exit, which waits until
no step in flight refers to it. This room must not know what a step is, nor why a request is preempted or over.
"""

from dataclasses import dataclass

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.request import Request, RequestStatus
from nanovllm_core.scheduling.queue import WaitingQueue
from nanovllm_core.scheduling.rows import RowTable


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start. tokens: computed, prompts and decodes alike. prefix_queries, prefix_hits: in tokens."""

    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    tokens: int = 0


class Lifecycle:
    """All requests that are not over, and those that are but still hold something."""

    def __init__(self, cache: CacheManager, rows: RowTable):
        self.cache = cache
        self.rows = rows
        self.waiting = WaitingQueue()
        self.counters = SchedulerCounters()
        # Requests that are over or preempted, and whose row and blocks wait for a step in flight.
        self.num_finishing = 0
        self.num_preempting = 0
        self._requests: dict[int, Request] = {}

    @property
    def num_waiting(self) -> int:
        """Requests without a row, those included whose preemption waits for a step in flight."""
        return len(self.waiting) + self.num_preempting

    @property
    def has_requests(self) -> bool:
        """Whether anything is left to do, be it only to take back what finished requests held."""
        return bool(self._requests) or self.num_finishing > 0

    def find(self, key: int) -> Request | None:
        """The request with this key, unless it is over."""
        return self._requests.get(key)

    def add(self, request: Request) -> None:
        """Queue a new request, whose key no other has."""
        self._requests[request.key] = request
        self.waiting.push(request)

    def start(self, request: Request, num_computed: int) -> None:
        """Give a row to a waiting request that the cache has admitted; `num_computed` of its tokens are cached."""
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        self.rows.take(request, num_computed, len(request.block_ids) * self.cache.block_size)
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_computed
            self.counters.prompt_tokens += request.num_prompt_tokens
            if self.cache.prefix_caching:
                self.counters.prefix_queries += request.num_prompt_tokens
                self.counters.prefix_hits += request.num_cached_tokens

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it will compute its tokens again. Its tokens in flight still count."""
        self.rows.running[request.row] = False
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self.num_preempting += 1
        self.release_when_idle(request)

    def finish(self, request: Request) -> None:
        """End a request that is not over yet, wherever it is."""
        if request.status is RequestStatus.WAITING and not self.waiting.remove(request):
            self.num_preempting -= 1
        if request.row >= 0:
            self.rows.running[request.row], self.rows.over[request.row] = False, True
        request.status = RequestStatus.FINISHED
        # Its key is free again at once, whenever its blocks come back.
        del self._requests[request.key]
        self.num_finishing += 1
        self.release_when_idle(request)

    def release_when_idle(self, request: Request) -> None:
        """The one exit: give back row and blocks, unless a step in flight still refers to them."""
        if request.row >= 0:
            if self.rows.steps_in_flight[request.row] > 0:
                return
            if self.cache.prefix_caching:
                known = min(self.rows.num_computed[request.row], self.rows.num_known[request.row])
                self.cache.commit(request, int(known))
            self.rows.give_back(request)
            self.cache.release(request)
        if request.status is RequestStatus.FINISHED:
            self.num_finishing -= 1
        else:
            self.num_preempting -= 1
            self.waiting.push(request)
