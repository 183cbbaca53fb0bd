"""Connects an engine's thread with the parts of transfers that run on the event loop's thread."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from nanovllm_core.cache.host_memory import HostMemory
from nanovllm_core.cache.tiers import HostTier
from nanovllm_core.config import ResolvedConfig
from nanovllm_core.request_state import RequestState
from nanovllm_core.scheduling.scheduler import Scheduler
from nanovllm_core.transfer.fetches import FetchCounters, FetchOutcome, FetchPlanner, PrefixFetch
from nanovllm_core.transfer.leases import LeaseTable
from nanovllm_core.transfer.nixl import start_nixl
from nanovllm_core.transfer.prefix_client import NUM_COPY_THREADS, PeerConnection
from nanovllm_core.transfer.prefix_server import PrefixServer
from nanovllm_core.transfer.secret import TransferKeys


class TransferStats(NamedTuple):
    """Statistics of transfers since the engine started. num_served_bytes: bytes that other engines have fetched."""

    fetched: FetchCounters
    num_served_bytes: int
    num_leases: int


class Transfers:
    """Fetches entries from other engines, and serves entries to other engines, as the settings say.

    The event loop's thread creates and closes this object. The engine's thread calls the other methods.
    wake: wakes the engine's thread, which then calls `poll`.
    on_finish: called on the engine's thread with each fetch that has ended.
    Raises ConfigError if the address of `transfer_listen` can't be bound, or if NIXL is required and can't be used.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        keys: TransferKeys,
        identity: dict[str, str],
        memory: HostMemory,
        scheduler: Scheduler,
        tier: HostTier,
        vocab_size: int,
        max_model_len: int,
    ):
        self.wake: Callable[[], None] = lambda: None
        self.on_finish: Callable[[PrefixFetch], None] = lambda _: None
        self._scheduler = scheduler
        self._prefill_peer = config.prefill_peer
        self._engine_thread_calls: deque[Callable[[], object]] = deque()
        slot_bytes = memory.layout.slot_bytes
        self._leases = LeaseTable(scheduler, tier, slot_bytes, vocab_size, max_model_len)
        self._planner = FetchPlanner(scheduler.caches, tier, slot_bytes, config.prefill_peer)
        agent, carrier = None, config.transfer_carrier
        if carrier in ("auto", "nixl"):
            agent = start_nixl(memory.address, len(memory.view), is_required=carrier == "nixl")
        self._executor = ThreadPoolExecutor(NUM_COPY_THREADS, "nanovllm-fetches")
        self.server: PrefixServer | None = None
        if config.transfer_listen is not None:
            self.server = PrefixServer(
                config.transfer_listen, keys, identity, memory, agent, self._leases, self._run_on_engine_thread
            )
        self._peers = {
            address: PeerConnection(
                address, keys, identity, memory, agent, carrier, self._executor, self._on_fetch_end, self._on_copies_end
            )
            for address in config.transfer_peers
        }
        self._run_on_event_loop: Callable[[Callable[[], None]], object] = (
            asyncio.get_running_loop().call_soon_threadsafe
        )

    def close(self) -> None:
        """End all fetches and leases."""
        for peer in self._peers.values():
            peer.close()
        if self.server is not None:
            self.server.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def start_fetch(self, request: RequestState) -> bool:
        """Start a fetch for a new request. Returns False if the caller must schedule the request now."""
        fetch = self._planner.plan(request, lambda address: self._peers[address].is_ready)
        if fetch is None:
            return False
        self._run_on_event_loop(partial(self._peers[fetch.peer].start, fetch))
        return True

    def abort(self, key: int) -> bool:
        """Abort a request that waits for a fetch. Returns False if the request has no fetch."""
        fetch = self._planner.abort(key)
        if fetch is not None:
            self._run_on_event_loop(partial(self._peers[fetch.peer].cancel, fetch, FetchOutcome.ABORTED))
        return fetch is not None

    def reset_peer_prefix_cache(self) -> None:
        """Make the engine that computes prompts for this engine forget all entries."""
        if self._prefill_peer is not None:
            self._run_on_event_loop(self._peers[self._prefill_peer].reset_prefix_cache)

    def poll(self) -> None:
        """Schedule requests whose fetches have ended, and lease entries to other engines."""
        while self._engine_thread_calls:
            self._engine_thread_calls.popleft()()
        if self.server is not None and (updates := self._leases.poll()):
            self.server.publish(updates)

    def collect_stats(self) -> TransferStats:
        """The statistics since the engine started."""
        return TransferStats(self._planner.counters, self._leases.num_served_bytes, len(self._leases))

    def _run_on_engine_thread(self, call: Callable[[], object]) -> None:
        self._engine_thread_calls.append(call)
        self.wake()

    def _on_fetch_end(self, fetch: PrefixFetch) -> None:
        self._run_on_engine_thread(partial(self._finish, fetch))

    def _on_copies_end(self, fetch: PrefixFetch, positions: Sequence[int]) -> None:
        self._run_on_engine_thread(partial(self._planner.release, fetch, positions))

    def _finish(self, fetch: PrefixFetch) -> None:
        self.on_finish(fetch)
        if self._planner.finish(fetch):
            self._scheduler.add(fetch.request)
