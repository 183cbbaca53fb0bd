"""Holds entries of the host memory for other engines. All calls come from the engine's thread."""

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

# Keys of the requests that compute prompts for other engines. Engine processes give no client such large keys.
FIRST_REQUEST_KEY = 1 << 62
# Maximum bytes that one fetch holds. A fetch may always hold one entry.
MAX_HELD_BYTES = 64 << 20
MAX_LEASES = 256  # further fetches find no entries


class LeaseUpdate(NamedTuple):
    """What the server tells a client. number: the lease's number. entries, kinds: entries that are now held.

    num_missing: number of entries that the client does not get; None if more entries may follow.
    compute_s: seconds since the start of the lease.
    """

    number: int
    entries: list[ReadyEntry]
    kinds: list[EntryKind]
    num_missing: int | None
    compute_s: float


@dataclass(slots=True, eq=False)
class _Lease:
    """A fetch of a client. waiting: positions of entries that were not sent, in order. held: slots by position.

    request: computes the prompt; None if nothing is computed.
    num_missing: number of entries that the client does not get.
    has_ended: whether `poll` has announced the last entry.
    """

    fetch: Fetch
    waiting: list[int]
    begin_s: float
    request: RequestState | None = None
    num_missing: int = 0
    has_ended: bool = False
    held: dict[int, int] = field(default_factory=dict[int, int])


class LeaseTable:
    """The fetches of all clients. `poll` finds entries that clients can copy, and holds them until they are released.

    Each fetch has a lease with a number that is never used again. Only `release` and `close` release held entries.
    num_served_bytes: bytes of the entries that clients have received.
    """

    def __init__(self, scheduler: Scheduler, tier: HostTier, slot_bytes: Sequence[int], max_model_len: int):
        self.num_served_bytes = 0
        self._scheduler = scheduler
        self._tier = tier
        self._slot_bytes = slot_bytes
        self._max_model_len = max_model_len
        self._leases: dict[int, _Lease] = {}
        self._next_request_key = FIRST_REQUEST_KEY

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, number: int, fetch: Fetch) -> None:
        """Start to serve a fetch."""
        entries = list(range(len(fetch.entries))) if len(self._leases) < MAX_LEASES else []
        lease = _Lease(fetch, entries, time.perf_counter())
        lease.num_missing = len(fetch.entries) - len(entries)
        self._leases[number] = lease
        if not entries:
            return
        is_known = [self._keep(EntryKind(kind), block_hash) for kind, block_hash in fetch.entries]
        prompt_ids = np.frombuffer(fetch.prompt_ids, np.int32)
        if not all(is_known) and 0 < len(prompt_ids) < self._max_model_len:
            lease.request = self._compute(number, fetch, prompt_ids)

    def _keep(self, kind: EntryKind, block_hash: bytes) -> bool:
        """Copy an entry to the host memory if only a cache has it. Returns False if neither has it."""
        is_known = self._tier.pools[kind].lookup(block_hash) is not None
        for group, cache in enumerate(self._scheduler.caches):
            if cache.pools[kind].lookup(block_hash) is not None:
                self._tier.keep(group, kind, block_hash)
                is_known = True
        return is_known

    def _compute(self, number: int, fetch: Fetch, prompt_ids: TokenIds) -> RequestState:
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
                if (slot := lease.held.pop(position, None)) is not None:
                    kind = lease.fetch.entries[position][0]
                    self._tier.pools[kind].release([slot])
                    self.num_served_bytes += self._slot_bytes[kind]

    def close(self, number: int) -> None:
        """End a fetch that the client gave up, or that has expired."""
        if (lease := self._leases.pop(number, None)) is not None:
            for position, slot in lease.held.items():
                self._tier.pools[lease.fetch.entries[position][0]].release([slot])
            if lease.request is not None:
                self._scheduler.abort(lease.request.key)

    def reset_prefix_cache(self) -> None:
        """Forget all entries. Entries that are held may still be copied."""
        self._scheduler.reset_prefix_cache()

    def poll(self) -> list[LeaseUpdate]:
        """Hold entries that are ready, and end fetches whose entries were all received."""
        updates: list[LeaseUpdate] = []
        for number, lease in list(self._leases.items()):
            if not lease.has_ended:
                entries, kinds = self._take_ready(lease)
                lease.has_ended = not lease.waiting
                if entries or lease.has_ended:
                    num_missing = lease.num_missing if lease.has_ended else None
                    compute_s = time.perf_counter() - lease.begin_s
                    updates.append(LeaseUpdate(number, entries, kinds, num_missing, compute_s))
            if lease.has_ended and not lease.held:
                del self._leases[number]
        return updates

    def _take_ready(self, lease: _Lease) -> tuple[list[ReadyEntry], list[EntryKind]]:
        """Hold entries from the start of `lease.waiting`, until an entry is not ready or the limit is reached."""
        entries: list[ReadyEntry] = []
        kinds: list[EntryKind] = []
        num_held_bytes = sum(self._slot_bytes[lease.fetch.entries[position][0]] for position in lease.held)
        num_taken = 0
        for position in lease.waiting:
            kind, block_hash = EntryKind(lease.fetch.entries[position][0]), lease.fetch.entries[position][1]
            num_held_bytes += self._slot_bytes[kind]
            if lease.held and num_held_bytes > MAX_HELD_BYTES:
                break
            pool = self._tier.pools[kind]
            slot = pool.lookup(block_hash)
            if slot is None:
                if self._may_come(lease, kind, block_hash):
                    break
                lease.num_missing += 1
            else:
                pool.acquire(slot)
                lease.held[position] = slot
                entries.append(ReadyEntry(position, slot, slot in pool.blocks_with_draft_entries))
                kinds.append(kind)
            num_taken += 1
        del lease.waiting[:num_taken]
        return entries, kinds

    def _may_come(self, lease: _Lease, kind: EntryKind, block_hash: bytes) -> bool:
        request = lease.request
        # A finished request has a row until its last blocks can be found.
        is_computing = request is not None and (request.status is not RequestStatus.FINISHED or request.row >= 0)
        return is_computing or self._tier.is_storing(kind, block_hash)
