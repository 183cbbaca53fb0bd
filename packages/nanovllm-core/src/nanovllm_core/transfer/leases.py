"""Grants other engines leases on entries of the host memory, one per fetch. All calls come from the engine's thread."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from nanovllm_core.cache.host_memory import EntryKind
from nanovllm_core.cache.tiers import HostTier
from nanovllm_core.request import Request
from nanovllm_core.request_state import RequestState, RequestStatus
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.scheduling.scheduler import Scheduler
from nanovllm_core.token_ids import TokenIds
from nanovllm_core.transfer.messages import Fetch, ReadyEntry

# First key of requests that compute prompts for other engines. Keys of clients' requests are smaller.
FIRST_REQUEST_KEY = 1 << 62
# A fetch holds at most MAX_HELD_BYTES, and at most MAX_HELD_SHARE of the host memory. It may always hold one entry.
MAX_HELD_BYTES = 256 << 20
MAX_HELD_SHARE = 1 / 8
# Maximum bytes of an update with several entries. The limit splits a large fetch into several updates, so that several
# threads hash and copy in parallel.
MAX_UPDATE_BYTES = 16 << 20
MAX_LEASES = 256  # further fetches find no entries


class LeaseUpdate(NamedTuple):
    """An update of a lease, for its client.

    number: the lease's number.
    entries: entries that the lease newly holds.
    num_missing: number of entries that the client does not get; None if more entries may follow.
    serve_s: seconds since the start of the lease.
    """

    number: int
    entries: list[ReadyEntry]
    num_missing: int | None
    serve_s: float


@dataclass(slots=True, eq=False)
class _Lease:
    """A fetch of a client.

    request: computes the prompt; None if nothing is computed.
    num_settled: number of leading entries that are announced, or that the client does not get.
    num_missing: number of entries that the client does not get.
    """

    fetch: Fetch
    begin_s: float
    request: RequestState | None = None
    num_settled: int = 0
    num_missing: int = 0
    has_announced_end: bool = False
    slot_by_position: dict[int, int] = field(default_factory=dict[int, int])


class LeaseTable:
    """The fetches of all clients. `poll` finds entries that clients can copy, and holds them until they are released.

    Each fetch has a lease with a number that is never used again. Only `release` and `close` release held entries.
    num_served_bytes: bytes of the entries that clients have received.
    """

    def __init__(
        self, scheduler: Scheduler, tier: HostTier, slot_bytes: Sequence[int], vocab_size: int, max_model_len: int
    ):
        self.num_served_bytes = 0
        self._scheduler = scheduler
        self._tier = tier
        self._slot_bytes = slot_bytes
        memory_bytes = sum(pool.num_blocks * num_bytes for pool, num_bytes in zip(tier.pools, slot_bytes, strict=True))
        self._max_held_bytes = min(MAX_HELD_BYTES, int(MAX_HELD_SHARE * memory_bytes))
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._leases: dict[int, _Lease] = {}
        self._next_request_key = FIRST_REQUEST_KEY

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, number: int, fetch: Fetch) -> None:
        """Start to serve a fetch."""
        lease = _Lease(fetch, time.perf_counter())
        self._leases[number] = lease
        if len(self._leases) > MAX_LEASES or not self._tier.is_ready:
            lease.num_missing = lease.num_settled = len(fetch.entries)
            return
        is_known = [self._queue_for_host_memory(EntryKind(kind), block_hash) for kind, block_hash in fetch.entries]
        prompt_ids = np.frombuffer(fetch.prompt_ids, np.int32)
        if not all(is_known) and self._is_valid(prompt_ids):
            lease.request = self._schedule_prompt(number, fetch, prompt_ids)

    def _is_valid(self, prompt_ids: TokenIds) -> bool:
        has_valid_length = 0 < len(prompt_ids) < self._max_model_len
        return has_valid_length and prompt_ids.min() >= 0 and prompt_ids.max() < self._vocab_size

    def _queue_for_host_memory(self, kind: EntryKind, block_hash: bytes) -> bool:
        """Queue an entry for a copy to host memory. Returns False if neither a cache nor the host memory has it."""
        is_known = self._tier.pools[kind].lookup(block_hash) is not None
        for group, cache in enumerate(self._scheduler.caches):
            if cache.pools[kind].lookup(block_hash) is not None:
                self._tier.queue_store(group, kind, block_hash)
                is_known = True
        return is_known

    def _schedule_prompt(self, number: int, fetch: Fetch, prompt_ids: TokenIds) -> RequestState:
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        arrival_s = time.monotonic()
        client_request = Request(f"fetch {number}", prompt_ids, sampling, fetch.cache_salt, fetch.priority, arrival_s)
        request = RequestState(self._next_request_key, client_request)
        self._next_request_key += 1
        self._scheduler.add(request)
        return request

    def release(self, number: int, positions: Sequence[int]) -> None:
        """Release entries that the client has received."""
        if (lease := self._leases.get(number)) is not None:
            for position in positions:
                if (slot := lease.slot_by_position.pop(position, None)) is not None:
                    kind = lease.fetch.entries[position][0]
                    self._tier.pools[kind].release([slot])
                    self.num_served_bytes += self._slot_bytes[kind]

    def close(self, number: int) -> None:
        """End a lease that the client has cancelled, or that has expired."""
        if (lease := self._leases.pop(number, None)) is not None:
            for position, slot in lease.slot_by_position.items():
                self._tier.pools[lease.fetch.entries[position][0]].release([slot])
            if lease.request is not None:
                self._scheduler.abort(lease.request.key)

    def reset_prefix_cache(self) -> None:
        """Forget all entries. Entries that are held may still be copied."""
        self._scheduler.reset_prefix_cache()

    def poll(self) -> list[LeaseUpdate]:
        """Hold entries that are ready, and end leases whose entries were all received. Returns updates for clients."""
        updates: list[LeaseUpdate] = []
        for number, lease in list(self._leases.items()):
            while not lease.has_announced_end:
                entries = self._take_ready(lease)
                lease.has_announced_end = lease.num_settled == len(lease.fetch.entries)
                if not entries and not lease.has_announced_end:
                    break
                num_missing = lease.num_missing if lease.has_announced_end else None
                serve_s = time.perf_counter() - lease.begin_s
                updates.append(LeaseUpdate(number, entries, num_missing, serve_s))
            if lease.has_announced_end and not lease.slot_by_position:
                del self._leases[number]
        return updates

    def _take_ready(self, lease: _Lease) -> list[ReadyEntry]:
        """Hold the next entries, in order, until an entry is not ready or a limit is reached."""
        entries: list[ReadyEntry] = []
        num_held_bytes = sum(self._slot_bytes[lease.fetch.entries[position][0]] for position in lease.slot_by_position)
        num_update_bytes = 0
        for position in range(lease.num_settled, len(lease.fetch.entries)):
            kind, block_hash = EntryKind(lease.fetch.entries[position][0]), lease.fetch.entries[position][1]
            num_held_bytes += self._slot_bytes[kind]
            num_update_bytes += self._slot_bytes[kind]
            if lease.slot_by_position and num_held_bytes > self._max_held_bytes:
                break
            if entries and num_update_bytes > MAX_UPDATE_BYTES:
                break
            pool = self._tier.pools[kind]
            slot = pool.lookup(block_hash)
            if slot is None:
                if self._may_come(lease, kind, block_hash):
                    break
                lease.num_missing += 1
            else:
                pool.acquire(slot)
                lease.slot_by_position[position] = slot
                entries.append(ReadyEntry(position, slot, slot in pool.blocks_with_draft_entries))
            lease.num_settled += 1
        return entries

    def _may_come(self, lease: _Lease, kind: EntryKind, block_hash: bytes) -> bool:
        request = lease.request
        # A finished request keeps its row until its last blocks are in the prefix cache.
        is_computing = request is not None and (request.status is not RequestStatus.FINISHED or request.row >= 0)
        return is_computing or self._tier.is_storing_or_queued(kind, block_hash)
