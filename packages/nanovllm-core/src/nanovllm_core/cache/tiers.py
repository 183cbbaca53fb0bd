"""Keeps copies of cache entries in host memory, and loads prefixes of prompts from there.

Rank 0's scheduler decides about all copies. The ranks only execute batches of copies, in order.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from nanovllm_core.cache.block_pool import BlockPool
from nanovllm_core.cache.copy_time import CopyTimeModel
from nanovllm_core.cache.host_memory import CopyBatch, Direction, EntryCopies, EntryKind, HostMemory
from nanovllm_core.request_state import BlockHash, RequestState
from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL

# Limits of stores, so that they disturb steps little: bytes of a batch (at least one entry), entries of a batch, and
# batches in flight.
MAX_STORE_BYTES = 64 << 20
MAX_STORE_ENTRIES = 256
MAX_STORES_IN_FLIGHT = 2

# (first token, number of tokens) -> seconds in which steps would compute these tokens of a prompt.
PredictCompute = Callable[[int, int], float]


class _Transfer(NamedTuple):
    """A copy of one entry. group: see `EntryCopies`. entry: index in the cache. slot: index in the host memory."""

    group: int
    kind: EntryKind
    block_hash: BlockHash
    entry: int
    slot: int
    has_draft_entries: bool


@dataclass(slots=True, eq=False)
class PrefixLoad:
    """Copies of a prefix to the blocks and the state slot of a request, which waits for them.

    held: entries of the prefix that are in the cache already, as pairs (kind, entry). The load holds them.
    num_tokens: number of tokens by which the load makes the cached prefix longer.
    is_ended: whether nothing writes to the request's blocks any more.
    is_usable: whether the copies of all entries have succeeded, so that the entries may be found by hash.
    """

    request: RequestState
    group: int
    transfers: list[_Transfer]
    held: list[tuple[EntryKind, int]]
    num_tokens: int
    begin_s: float
    is_ended: bool = False
    is_usable: bool = False


@dataclass(slots=True, eq=False)
class _BatchInFlight:
    """epoch, num_failures: of the tier and of its memory when the batch was launched."""

    transfers: list[_Transfer]
    loads: list[PrefixLoad]
    num_bytes: int
    begin_s: float
    epoch: int
    num_failures: int


@dataclass(slots=True)
class TierCounters:
    """Totals since the engine started.

    num_bytes, copy_s: bytes and seconds of copies, from launch to end, by direction.
    num_loaded_tokens: tokens of loads that have succeeded. num_rejected_tokens: tokens that were in the tier, but were
        faster to compute. num_failed_loads: loads that have failed. wait_s: time of requests in WAITING_KV.
    """

    num_loaded_tokens: int = 0
    num_rejected_tokens: int = 0
    num_failed_loads: int = 0
    wait_s: float = 0.0
    num_bytes: list[int] = field(default_factory=lambda: [0] * len(Direction))
    copy_s: list[float] = field(default_factory=lambda: [0.0] * len(Direction))


class HostTier:
    """The index of the entries in host memory, and the copies in flight.

    A `BlockPool` of slots per kind of entry finds entries by hash, and evicts the entry that was used least recently.
    block_size: tokens per block.
    """

    def __init__(self, memory: HostMemory, block_size: int, predict_compute: PredictCompute):
        self.pools = [BlockPool(num_slots) for num_slots in memory.layout.num_slots]
        self.counters = TierCounters()
        self._memory = memory
        self._block_size = block_size
        self._blocks_per_checkpoint = CHECKPOINT_INTERVAL // block_size
        self._predict_compute = predict_compute
        self._load_time = CopyTimeModel()
        self._entry_bytes = [memory.layout.num_parts * num_bytes for num_bytes in memory.layout.entry_bytes]
        # The pools of each group's cache, by kind.
        self._cache_pools: list[Sequence[BlockPool]] = []
        # Entries to store: the group whose cache has the entry, by kind and hash, oldest first.
        self._store_queue: OrderedDict[tuple[EntryKind, BlockHash], int] = OrderedDict()
        self._new_loads: list[PrefixLoad] = []
        # Entries of copies in flight: to store, as pairs (kind, hash), and by group the hashes of entries to load.
        self._storing: set[tuple[EntryKind, BlockHash]] = set()
        self._loading: list[set[BlockHash]] = []
        self._in_flight: list[deque[_BatchInFlight]] = [deque() for _ in Direction]
        self._num_ended = [0] * len(Direction)
        self._epoch = 0

    def attach(self, pools: Sequence[BlockPool]) -> int:
        """Add the cache of a group of requests, with its pools by kind. Returns the group's number."""
        self._cache_pools.append(pools)
        self._loading.append(set())
        return len(self._cache_pools) - 1

    @property
    def is_busy(self) -> bool:
        """Whether copies are in flight."""
        return any(self._in_flight)

    def keep(self, group: int, kind: EntryKind, block_hash: BlockHash) -> None:
        """Store an entry of a cache soon, or evict its copy later if it has been stored."""
        slot = self.pools[kind].lookup(block_hash)
        if slot is not None:
            self.pools[kind].touch(slot)
        elif (kind, block_hash) not in self._store_queue:
            self._store_queue[kind, block_hash] = group
            if len(self._store_queue) > sum(self._memory.layout.num_slots):
                self._store_queue.popitem(last=False)

    def find_prefix(self, group: int, hashes: Sequence[BlockHash], start: int) -> int:
        """The number of leading blocks after which a request could start, if the missing entries were loaded.

        start: number of leading blocks after which the request can start without loads; the least result.
        """
        end = start
        while end < len(hashes) and self._is_found(group, EntryKind.BLOCK, hashes[end]):
            end += 1
        if len(self.pools) == 1:
            return end
        interval = self._blocks_per_checkpoint
        for num_blocks in range(end - end % interval, start, -interval):
            if self._is_found(group, EntryKind.CHECKPOINT, hashes[num_blocks - 1]):
                return num_blocks
        return start

    def _is_found(self, group: int, kind: EntryKind, block_hash: BlockHash) -> bool:
        if self._cache_pools[group][kind].lookup(block_hash) is not None:
            return True
        return self._memory.is_ready and self.pools[kind].lookup(block_hash) is not None

    def is_worth_waiting(self, group: int, hashes: Sequence[BlockHash]) -> bool:
        """Whether a request with these blocks should wait for loads in flight that bring some of the blocks."""
        loading = self._loading[group]
        if not loading or loading.isdisjoint(hashes):
            return False
        indices = [index for index, block_hash in enumerate(hashes) if block_hash in loading]
        num_tokens = (indices[-1] + 1 - indices[0]) * self._block_size
        return self._predict_load(0) <= self._predict_compute(indices[0] * self._block_size, num_tokens)

    def has_loads(self, group: int) -> bool:
        """Whether loads to the cache of `group` are in flight. The blocks of their requests will soon be released."""
        return bool(self._loading[group])

    def _predict_load(self, num_bytes: int) -> float:
        """Seconds until the end of a load of `num_bytes` that starts now, after the loads in flight."""
        num_bytes += sum(batch.num_bytes for batch in self._in_flight[Direction.LOAD])
        return self._load_time.predict(num_bytes)

    def start_load(
        self, request: RequestState, group: int, num_blocks: int, prefix_blocks: int, state_slot: int
    ) -> PrefixLoad | None:
        """Load a prefix to the blocks and the state slot of an admitted request, unless to compute it is faster.

        num_blocks: number of leading blocks after which the request can start without loads.
        prefix_blocks: result of `find_prefix`, larger than `num_blocks`.
        """
        pools, hashes = self._cache_pools[group], request.block_hashes[:prefix_blocks]
        targets = [(EntryKind.BLOCK, hashes[i], request.block_ids[i]) for i in range(num_blocks, prefix_blocks)]
        if len(pools) > 1:
            targets.append((EntryKind.CHECKPOINT, hashes[-1], state_slot))
        missing = [
            (kind, block_hash, entry) for kind, block_hash, entry in targets if not pools[kind].lookup(block_hash)
        ]
        num_bytes = sum(self._entry_bytes[kind] for kind, _, _ in missing)
        num_tokens = (prefix_blocks - num_blocks) * self._block_size
        compute_s = self._predict_compute(num_blocks * self._block_size, num_tokens)
        if self._predict_load(num_bytes) > compute_s:
            self._load_time.reject()
            self.counters.num_rejected_tokens += num_tokens
            return None
        transfers: list[_Transfer] = []
        for kind, block_hash, entry in missing:
            slot = self.pools[kind].lookup(block_hash)
            if slot is None:
                raise RuntimeError("an entry that find_prefix has found is neither in the cache nor in host memory")
            self.pools[kind].acquire(slot)
            has_draft_entries = bool(self.pools[kind].has_draft_entries[slot])
            transfers.append(_Transfer(group, kind, block_hash, entry, slot, has_draft_entries))
        held = [(kind, found) for kind, block_hash, _ in targets if (found := pools[kind].lookup(block_hash))]
        for kind, entry in held:
            pools[kind].acquire(entry)
        load = PrefixLoad(request, group, transfers, held, num_tokens, time.monotonic())
        self._loading[group].update(block_hash for _, block_hash, _ in missing)
        self._new_loads.append(load)
        return load

    def finish_load(self, load: PrefixLoad) -> None:
        """Make the entries of an ended load findable in the cache, and release what the load holds."""
        pools = self._cache_pools[load.group]
        if load.is_usable:
            for transfer in load.transfers:
                pool = pools[transfer.kind]
                pool.register(transfer.entry, transfer.block_hash)
                pool.has_draft_entries[transfer.entry] = transfer.has_draft_entries
        for kind, entry in reversed(load.held):
            pools[kind].release([entry])

    def take_loads(self) -> list[CopyBatch]:
        """The copies of new loads, which the ranks must now execute."""
        loads, self._new_loads = self._new_loads, []
        transfers = [transfer for load in loads for transfer in load.transfers]
        return self._launch(Direction.LOAD, transfers, loads) if loads else []

    def take_stores(self) -> list[CopyBatch]:
        """Copies of queued entries, which the ranks must now execute. All planned steps must have been launched."""
        if not self._store_queue or not self._memory.is_ready:
            return []
        if len(self._in_flight[Direction.STORE]) >= MAX_STORES_IN_FLIGHT:
            return []
        transfers: list[_Transfer] = []
        num_bytes = 0
        for kind, block_hash in list(islice(self._store_queue, MAX_STORE_ENTRIES)):
            if transfers and num_bytes + self._entry_bytes[kind] > MAX_STORE_BYTES:
                break
            group = self._store_queue[kind, block_hash]
            cache_pool, pool = self._cache_pools[group][kind], self.pools[kind]
            entry = cache_pool.lookup(block_hash)
            is_stored = pool.lookup(block_hash) is not None or (kind, block_hash) in self._storing
            if entry is not None and not is_stored and not (pool.num_free and cache_pool.can_hold(entry)):
                continue
            del self._store_queue[kind, block_hash]
            if entry is None or is_stored:
                continue
            cache_pool.acquire(entry)
            (slot,) = pool.allocate(1)
            has_draft_entries = bool(cache_pool.has_draft_entries[entry])
            transfers.append(_Transfer(group, kind, block_hash, entry, slot, has_draft_entries))
            self._storing.add((kind, block_hash))
            num_bytes += self._entry_bytes[kind]
        return self._launch(Direction.STORE, transfers, []) if transfers else []

    def complete(self) -> list[PrefixLoad]:
        """Process the batches that have ended. Returns the loads that have ended, for `finish_load`."""
        ended_loads: list[PrefixLoad] = []
        for direction in Direction:
            num_done = self._memory.num_done(direction)
            while self._num_ended[direction] < num_done:
                self._num_ended[direction] += 1
                batch = self._in_flight[direction].popleft()
                is_usable = (batch.epoch, batch.num_failures) == (self._epoch, self._memory.num_failures)
                seconds = time.monotonic() - batch.begin_s
                self.counters.num_bytes[direction] += batch.num_bytes
                self.counters.copy_s[direction] += seconds
                if direction is Direction.STORE:
                    self._end_stores(batch, is_usable=is_usable)
                else:
                    if batch.num_bytes:
                        self._load_time.observe(batch.num_bytes, seconds)
                    self._end_loads(batch, is_usable=is_usable)
                    ended_loads += batch.loads
        return ended_loads

    def forget(self) -> None:
        """Forget all entries. Copies in flight end without effect."""
        self._epoch += 1
        self._store_queue.clear()
        for pool in self.pools:
            pool.forget_hashes()

    def _launch(self, direction: Direction, transfers: list[_Transfer], loads: list[PrefixLoad]) -> list[CopyBatch]:
        by_cache: dict[tuple[int, EntryKind], EntryCopies] = {}
        for transfer in transfers:
            copies = by_cache.setdefault(transfer[:2], EntryCopies(transfer.group, transfer.kind, [], []))
            copies.entries.append(transfer.entry)
            copies.slots.append(transfer.slot)
        num_bytes = sum(self._entry_bytes[transfer.kind] for transfer in transfers)
        state = self._epoch, self._memory.num_failures
        self._in_flight[direction].append(_BatchInFlight(transfers, loads, num_bytes, time.monotonic(), *state))
        return [CopyBatch(direction, list(by_cache.values()))]

    def _end_stores(self, batch: _BatchInFlight, *, is_usable: bool) -> None:
        for transfer in batch.transfers:
            pool = self.pools[transfer.kind]
            self._storing.discard((transfer.kind, transfer.block_hash))
            self._cache_pools[transfer.group][transfer.kind].release([transfer.entry])
            if is_usable:
                pool.register(transfer.slot, transfer.block_hash)
                pool.has_draft_entries[transfer.slot] = transfer.has_draft_entries
            pool.release([transfer.slot])

    def _end_loads(self, batch: _BatchInFlight, *, is_usable: bool) -> None:
        for load in batch.loads:
            load.is_ended, load.is_usable = True, is_usable
            self.counters.wait_s += time.monotonic() - load.begin_s
            self.counters.num_loaded_tokens += load.num_tokens * is_usable
            self.counters.num_failed_loads += not is_usable
            # The last entry is evicted first, because earlier entries are useful without it.
            for transfer in reversed(load.transfers):
                self.pools[transfer.kind].release([transfer.slot])
                self._loading[transfer.group].discard(transfer.block_hash)
