"""Plans fetches of prompts, holds their slots, and registers the entries that arrived.

All calls come from the engine's thread.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from nanovllm_core.cache.host_memory import EntryKind
from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.cache.tiers import HostTier
from nanovllm_core.request_state import RequestState, RequestStatus
from nanovllm_core.transfer.fetch_times import MAX_FETCH_RATIO, FetchTimes
from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL

# A fetch is given up if it takes this much longer than MAX_FETCH_RATIO allows.
MAX_DELAY_S = 3.0


class FetchOutcome(StrEnum):
    """How the plan or the fetch of a prompt ended.

    FETCHED, PARTLY, NOTHING: all, some or no entries arrived.
    CACHED: no entry was missing. SLOWER: computing is faster. NO_SPACE: the host memory has no space, or is not ready.
    PEER_DOWN: the peer does not answer, or refused this engine. LOST: the peer stopped answering during the fetch.
    TOO_SLOW: the fetch took too long. ABORTED: the client aborted the request.
    """

    FETCHED = "fetched"
    PARTLY = "partly"
    NOTHING = "nothing"
    CACHED = "cached"
    SLOWER = "slower"
    NO_SPACE = "no_space"
    PEER_DOWN = "peer_down"
    LOST = "lost"
    TOO_SLOW = "too_slow"
    ABORTED = "aborted"


class WantedEntry(NamedTuple):
    """An entry to fetch. slot: slot of the host memory that the fetch holds for this entry."""

    kind: EntryKind
    block_hash: bytes
    slot: int


@dataclass(slots=True, eq=False)
class PrefixFetch:
    """A fetch of a prompt's entries from a peer.

    peer_computes: whether the peer must compute entries that the peer lacks.
    num_tokens: number of tokens in the wanted blocks.
    compute_s: predicted time in which this engine would compute these tokens.
    epoch: value of `HostTier.epoch` when the fetch began.
    begin_s, end_s: times of `time.perf_counter`.
    arrived_positions: indices in `entries`, as in all sets of positions.
    positions_with_draft_entries: entries that include the draft model's entries.
    late_positions: entries whose copies were in progress when the fetch ended. Their slots are held until the copies
        end.
    peer_s: seconds from the arrival of the fetch at the peer until the entries were ready there.
    """

    request: RequestState
    peer: str
    peer_computes: bool
    entries: list[WantedEntry]
    num_tokens: int
    compute_s: float
    epoch: int
    begin_s: float
    outcome: FetchOutcome = FetchOutcome.NOTHING
    end_s: float = 0.0
    peer_s: float = 0.0
    arrived_positions: set[int] = field(default_factory=set[int])
    positions_with_draft_entries: set[int] = field(default_factory=set[int])
    copying_positions: set[int] = field(default_factory=set[int])
    late_positions: frozenset[int] = frozenset()

    @property
    def limit_s(self) -> float:
        """Time after which the fetch is given up, in seconds."""
        return MAX_DELAY_S + MAX_FETCH_RATIO * self.compute_s


@dataclass(slots=True)
class FetchCounters:
    """Totals since the engine started: requests by outcome, fetched tokens and bytes, seconds that requests waited."""

    outcomes: dict[FetchOutcome, int] = field(default_factory=lambda: dict.fromkeys(FetchOutcome, 0))
    num_tokens: int = 0
    num_bytes: int = 0
    wait_s: float = 0.0


class FetchPlanner:
    """Holds host memory for fetches, and makes fetched entries findable.

    After the fetch, the prompt is admitted like any prompt whose entries are in the host memory.
    prefill_peer: the peer that computes long prompts; None without such a peer.
    """

    def __init__(
        self, caches: Sequence[CacheManager], tier: HostTier, slot_bytes: tuple[int, ...], prefill_peer: str | None
    ):
        self.counters = FetchCounters()
        self._caches = caches
        self._tier = tier
        self._slot_bytes = slot_bytes
        self._prefill_peer = prefill_peer
        # Keys are values of `PrefixFetch.peer_computes`.
        self._fetch_times = {True: FetchTimes(), False: FetchTimes()}
        self._fetches: dict[int, PrefixFetch] = {}

    def plan(self, request: RequestState, is_peer_ready: Callable[[str], bool]) -> PrefixFetch | None:
        """Plan a fetch for a new request, which then waits for `finish`; None if a fetch can't start or is useless."""
        peer = request.client_request.prefix_peer or self._prefill_peer
        if peer is None:
            return None
        fetch_or_outcome = self._plan(request, peer, is_peer_ready)
        if isinstance(fetch_or_outcome, FetchOutcome):
            self.counters.outcomes[fetch_or_outcome] += 1
            return None
        request.status = RequestStatus.WAITING_KV
        self._fetches[request.key] = fetch_or_outcome
        return fetch_or_outcome

    def _plan(
        self, request: RequestState, peer: str, is_peer_ready: Callable[[str], bool]
    ) -> PrefixFetch | FetchOutcome:
        cache, tier, peer_computes = self._caches[0], self._tier, not request.client_request.prefix_peer
        if not tier.is_ready:
            return FetchOutcome.NO_SPACE
        cache.hash_prompt(request)
        hashes = cache.reusable_hashes(request)
        if len(tier.pools) > 1:
            # Recurrent layers start from a checkpoint, so blocks after the last checkpoint are useless.
            del hashes[len(hashes) - len(hashes) % (CHECKPOINT_INTERVAL // cache.block_size) :]
        num_found = max(tier.find_prefix(group, hashes, 0) for group in range(len(self._caches)))
        if num_found == len(hashes):
            return FetchOutcome.CACHED
        num_tokens = (len(hashes) - num_found) * cache.block_size
        if not self._fetch_times[peer_computes].is_worthwhile(num_tokens):
            return FetchOutcome.SLOWER
        if not is_peer_ready(peer):
            return FetchOutcome.PEER_DOWN
        wanted = [(EntryKind.BLOCK, block_hash) for block_hash in hashes[num_found:]]
        if len(tier.pools) > 1:
            wanted.append((EntryKind.CHECKPOINT, hashes[-1]))
        missing = [(kind, _as_bytes(block_hash)) for kind, block_hash in wanted if not self._is_found(kind, block_hash)]
        if not missing:
            return FetchOutcome.CACHED
        self._touch(hashes)
        num_slots = Counter(kind for kind, _ in missing)
        if any(tier.pools[kind].num_free < count for kind, count in num_slots.items()):
            return FetchOutcome.NO_SPACE
        entries = [WantedEntry(kind, block_hash, tier.pools[kind].allocate(1)[0]) for kind, block_hash in missing]
        compute_s = tier.predict_compute(num_found * cache.block_size, num_tokens)
        return PrefixFetch(
            request, peer, peer_computes, entries, num_tokens, compute_s, tier.epoch, begin_s=time.perf_counter()
        )

    def _is_found(self, kind: EntryKind, block_hash: bytes | int) -> bool:
        pools = [self._tier.pools[kind]]
        # With several groups of requests, ignore the groups' caches: the request may run in a group without the entry.
        if len(self._caches) == 1:
            pools.append(self._caches[0].pools[kind])
        return any(pool.lookup(block_hash) is not None for pool in pools)

    def _touch(self, hashes: Sequence[bytes | int]) -> None:
        """Make the pools evict the prompt's existing entries last, because the fetch allocates slots."""
        for kind, pool in enumerate(self._tier.pools):
            for block_hash in reversed(hashes if kind == EntryKind.BLOCK else hashes[-1:]):
                if (slot := pool.lookup(block_hash)) is not None:
                    pool.touch(slot)

    def finish(self, fetch: PrefixFetch) -> bool:
        """Make the entries of an ended fetch findable. Returns whether the request must now be scheduled."""
        is_same_epoch, tier, counters = fetch.epoch == self._tier.epoch, self._tier, self.counters
        counters.outcomes[fetch.outcome] += 1
        counters.wait_s += fetch.end_s - fetch.begin_s
        # Release the last entry first, so that it is evicted first: earlier entries are useful without it.
        for position in reversed(range(len(fetch.entries))):
            kind, block_hash, slot = fetch.entries[position]
            pool = tier.pools[kind]
            if position in fetch.arrived_positions:
                counters.num_bytes += self._slot_bytes[kind]
                if kind is EntryKind.BLOCK:
                    counters.num_tokens += self._caches[0].block_size
                if is_same_epoch:
                    pool.register(slot, block_hash)
                if position in fetch.positions_with_draft_entries:
                    pool.blocks_with_draft_entries.add(slot)
            if position not in fetch.late_positions:
                pool.release([slot])
        if fetch.outcome is not FetchOutcome.ABORTED:
            missing_share = 1 - len(fetch.arrived_positions) / len(fetch.entries)
            seconds = fetch.end_s - fetch.begin_s + missing_share * fetch.compute_s
            self._fetch_times[fetch.peer_computes].observe(fetch.num_tokens, seconds, fetch.compute_s)
        del self._fetches[fetch.request.key]
        # The client may have aborted between the end of the fetch and this call.
        if fetch.request.status is RequestStatus.FINISHED:
            return False
        fetch.request.status = RequestStatus.WAITING
        return True

    def release(self, fetch: PrefixFetch, positions: Collection[int]) -> None:
        """Release the slots of `PrefixFetch.late_positions` whose copies have ended."""
        for position in positions:
            kind, _, slot = fetch.entries[position]
            self._tier.pools[kind].release([slot])

    def abort(self, key: int) -> PrefixFetch | None:
        """Finish an aborted request. Returns its fetch, which the caller must end; None if the request has no fetch."""
        if (fetch := self._fetches.get(key)) is not None:
            fetch.request.status = RequestStatus.FINISHED
        return fetch


def _as_bytes(block_hash: bytes | int) -> bytes:
    if isinstance(block_hash, int):
        raise TypeError("prefix hashes are integers, but fetches need SHA-256 hashes: set prefix_hash to 'sha256'")
    return block_hash
