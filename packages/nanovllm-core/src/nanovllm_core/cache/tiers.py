"""Keeps copies of cache entries in host memory and in files, and loads prefixes of prompts from there.

Rank 0's scheduler decides about all copies. The ranks only execute batches of copies, in order.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import islice

from nanovllm_core.cache.block_pool import BlockPool
from nanovllm_core.cache.copy_time import CopyTimeModel
from nanovllm_core.cache.file_tier import FileTier
from nanovllm_core.cache.host_memory import CopyBatch, Direction, EntryCopies, EntryKind, HostMemory
from nanovllm_core.cache.prefix_load import BatchInFlight, EntryCopy, PrefixLoad, Target
from nanovllm_core.cache.tier_counters import TierCounters
from nanovllm_core.request_state import BlockHash, RequestState
from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL

# Limits of stores (copies to host memory): bytes per batch (a single entry may have more), entries per batch, and
# batches in flight. Entries in flight can't be evicted. The limits allow 1 GiB in flight: a step of a long prompt
# writes about as much.
MAX_STORE_BYTES = 512 << 20
MAX_STORE_ENTRIES = 256
MAX_STORES_IN_FLIGHT = 2

# (position of the first token, number of tokens) -> seconds in which steps would compute these tokens of a prompt.
PredictCompute = Callable[[int, int], float]


class HostTier:
    """The index of the entries in host memory, and the copies in flight.

    Each kind of entry has a `BlockPool` of slots, which finds entries by hash and evicts the least recently used entry.
    block_size: tokens per block.
    files: copies of the entries in files; None if no files are used.
    epoch: the number of calls of `forget`. Entries from earlier epochs must not be found.
    """

    def __init__(
        self, memory: HostMemory, block_size: int, predict_compute: PredictCompute, files: FileTier | None = None
    ):
        self.pools = [BlockPool(num_slots) for num_slots in memory.layout.num_slots]
        self.counters = TierCounters()
        self._memory = memory
        self._block_size = block_size
        self._blocks_per_checkpoint = CHECKPOINT_INTERVAL // block_size
        self.predict_compute = predict_compute
        self.files = files
        self._load_time = CopyTimeModel()
        self._entry_bytes = [memory.layout.num_parts * num_bytes for num_bytes in memory.layout.entry_bytes]
        # The pools of each group's cache, by kind.
        self._cache_pools: list[Sequence[BlockPool]] = []
        # Entries to store: the group whose cache has the entry, by kind and hash, oldest first.
        self._store_queue: OrderedDict[tuple[EntryKind, BlockHash], int] = OrderedDict()
        # Entries of the host memory to write to files, by kind and hash, oldest first.
        self._write_queue: OrderedDict[tuple[EntryKind, BlockHash], None] = OrderedDict()
        self._new_loads: list[PrefixLoad] = []
        self._storing: set[tuple[EntryKind, BlockHash]] = set()
        # The number of loads in flight of each entry, by group and hash: several requests may load the same entry.
        self._loading: list[Counter[BlockHash]] = []
        self._in_flight: list[deque[BatchInFlight]] = [deque() for _ in Direction]
        self._num_ended = [0] * len(Direction)
        self.epoch = 0

    def attach(self, pools: Sequence[BlockPool]) -> int:
        """Add the cache of a group of requests, with its pools by kind. Returns the group's number."""
        self._cache_pools.append(pools)
        self._loading.append(Counter())
        return len(self._cache_pools) - 1

    @property
    def is_busy(self) -> bool:
        """Whether copies are in flight."""
        has_writes = self.files is not None and self.files.is_busy
        return any(self._in_flight) or bool(self._new_loads) or has_writes

    @property
    def is_ready(self) -> bool:
        """Whether copies to and from the host memory are possible. Pinning of the memory may take minutes, or fail."""
        return self._memory.is_ready

    def is_storing_or_queued(self, kind: EntryKind, block_hash: BlockHash) -> bool:
        """Whether the host memory will probably get a copy of this entry soon."""
        return (kind, block_hash) in self._storing or (kind, block_hash) in self._store_queue

    def queue_store(self, group: int, kind: EntryKind, block_hash: BlockHash) -> None:
        """Queue a cache entry for a copy to host memory. If there is a copy, make it the last copy to be evicted."""
        slot = self.pools[kind].lookup(block_hash)
        if slot is not None:
            self.pools[kind].touch(slot)
            self._queue_write(kind, block_hash)
        elif (kind, block_hash) not in self._store_queue:
            self._store_queue[kind, block_hash] = group
            if len(self._store_queue) > sum(self._memory.layout.num_slots):
                self._store_queue.popitem(last=False)

    def _queue_write(self, kind: EntryKind, block_hash: BlockHash) -> None:
        if self.files is not None and not self.files.is_written_or_queued(kind, block_hash):
            self._write_queue[kind, block_hash] = None
            if len(self._write_queue) > sum(self._memory.layout.num_slots):
                self._write_queue.popitem(last=False)

    def find_prefix(self, group: int, hashes: Sequence[BlockHash], start: int, *, uses_files: bool = True) -> int:
        """The number of leading blocks that a request need not compute, if entries that the cache lacks are loaded.

        start: number of leading blocks that the request need not compute without loads. The result is at least `start`.
        """
        end = start
        while end < len(hashes) and self._is_found(group, EntryKind.BLOCK, hashes[end], uses_files):
            end += 1
        if len(self.pools) == 1:
            return end
        interval = self._blocks_per_checkpoint
        for num_blocks in range(end - end % interval, start, -interval):
            if self._is_found(group, EntryKind.CHECKPOINT, hashes[num_blocks - 1], uses_files):
                return num_blocks
        return start

    def _is_found(self, group: int, kind: EntryKind, block_hash: BlockHash, uses_files: bool) -> bool:
        if self._cache_pools[group][kind].lookup(block_hash) is not None:
            return True
        if not self._memory.is_ready:
            return False
        has_file = uses_files and self.files is not None and self.files.contains(kind, block_hash)
        return has_file or self.pools[kind].lookup(block_hash) is not None

    def is_worth_waiting(self, group: int, hashes: Sequence[BlockHash]) -> bool:
        """Whether a request with these blocks should wait for loads in flight that bring some of the blocks."""
        loading = self._loading[group]
        if not loading or loading.keys().isdisjoint(hashes):
            return False
        indices = [index for index, block_hash in enumerate(hashes) if block_hash in loading]
        num_tokens = (indices[-1] + 1 - indices[0]) * self._block_size
        return self._predict_load(0) <= self.predict_compute(indices[0] * self._block_size, num_tokens)

    def has_loads(self, group: int) -> bool:
        """Whether loads to the cache of `group` are in flight. The loads write to blocks that can't be freed yet."""
        return bool(self._loading[group])

    def _predict_load(self, num_bytes: int) -> float:
        """Seconds until the end of a load of `num_bytes` that starts now, after the loads in flight."""
        num_bytes += sum(batch.num_bytes for batch in self._in_flight[Direction.LOAD])
        return self._load_time.predict(num_bytes)

    def start_load(self, request: RequestState, group: int, hashes: Sequence[BlockHash]) -> PrefixLoad | None:
        """Load more of the prefix of an admitted request to its blocks and its state slot.

        hashes: hashes of the leading blocks that the request need not compute if they are found.
        Returns None if nothing more is found, or if computing is faster.
        """
        num_cached = request.num_committed_blocks
        prefixes = [self.find_prefix(group, hashes, num_cached, uses_files=uses_files) for uses_files in (True, False)]
        for num_prefix_blocks in dict.fromkeys(prefixes):
            if num_prefix_blocks > num_cached:
                targets = self._list_targets(request, group, hashes[:num_prefix_blocks])
                if self._is_worth_loading(group, targets, num_cached, num_prefix_blocks):
                    return self._start_copies(request, group, targets, num_prefix_blocks - num_cached)
        if prefixes[0] > num_cached:
            self.counters.num_rejected_tokens += (prefixes[0] - num_cached) * self._block_size
        return None

    def _list_targets(self, request: RequestState, group: int, hashes: Sequence[BlockHash]) -> list[Target]:
        """The entries that a request still needs, to start after the blocks with `hashes`."""
        targets = [
            (EntryKind.BLOCK, hashes[index], request.block_ids[index])
            for index in range(request.num_committed_blocks, len(hashes))
        ]
        if len(self.pools) > 1:
            targets.append((EntryKind.CHECKPOINT, hashes[-1], request.state_slot))
        return [
            Target(
                kind,
                block_hash,
                entry,
                self._cache_pools[group][kind].lookup(block_hash),
                self.pools[kind].lookup(block_hash),
            )
            for kind, block_hash, entry in targets
        ]

    def _is_worth_loading(
        self, group: int, targets: Sequence[Target], num_cached_blocks: int, num_prefix_blocks: int
    ) -> bool:
        """Whether loading takes at most as long as computing the tokens, and all pools have space for the load."""
        copies = [target for target in targets if target.found is None]
        reads = [target for target in copies if target.slot is None]
        for kind, pool in enumerate(self.pools):
            num_slots = sum(target.kind == kind and not pool.count_holders(target.slot or 0) for target in copies)
            if num_slots > pool.num_free:
                return False
        checkpoint = targets[-1].found if targets[-1].kind is EntryKind.CHECKPOINT else None
        if checkpoint is not None and not self._cache_pools[group][EntryKind.CHECKPOINT].can_acquire(checkpoint):
            # Holding the checkpoint would take the slot of a request that may start.
            return False
        num_tokens = (num_prefix_blocks - num_cached_blocks) * self._block_size
        load_s = self._predict_load(sum(self._entry_bytes[target.kind] for target in copies))
        if reads and self.files is not None:
            load_s += self.files.predict_read(target.kind for target in reads)
        if load_s <= self.predict_compute(num_cached_blocks * self._block_size, num_tokens):
            return True
        self._load_time.reject()
        if self.files is not None:
            self.files.reject_read()
        return False

    def _start_copies(
        self, request: RequestState, group: int, targets: Sequence[Target], num_new_blocks: int
    ) -> PrefixLoad:
        load = PrefixLoad(
            request, group, [], [], [], num_new_blocks * self._block_size, 0, self.epoch, time.perf_counter()
        )
        # First hold the entries that were found, so that the allocations below do not evict them.
        for kind, _, _, found, slot in targets:
            if found is not None:
                self._cache_pools[group][kind].acquire(found)
                load.held.append((kind, found))
            elif slot is not None:
                self.pools[kind].acquire(slot)
        for kind, block_hash, entry, found, slot in targets:
            if found is not None:
                continue
            pool = self.pools[kind]
            if slot is None:
                (slot,) = pool.allocate(1)
                if self.files is None:
                    raise RuntimeError("an entry that find_prefix has found is neither in the cache nor in host memory")
                load.reads.append(self.files.read(kind, block_hash, slot))
                load.num_file_tokens += self._block_size * (kind is EntryKind.BLOCK)
            has_draft_entries = slot in pool.blocks_with_draft_entries
            load.copies.append(EntryCopy(group, kind, block_hash, entry, slot, has_draft_entries))
        self._loading[group].update(copy.block_hash for copy in load.copies)
        self._new_loads.append(load)
        return load

    def finish_load(self, load: PrefixLoad) -> None:
        """Make the entries of an ended load findable in the cache, and release the entries that the load holds."""
        pools = self._cache_pools[load.group]
        if load.is_usable:
            for copy in load.copies:
                pool = pools[copy.kind]
                pool.register(copy.entry, copy.block_hash)
                if copy.has_draft_entries:
                    pool.blocks_with_draft_entries.add(copy.entry)
        for kind, entry in reversed(load.held):
            pools[kind].release([entry])

    def take_loads(self) -> list[CopyBatch]:
        """The copies of new loads whose reads have ended, which the ranks must now execute."""
        loads = [load for load in self._new_loads if not load.reads]
        self._new_loads = [load for load in self._new_loads if load.reads]
        copies = [copy for load in loads for copy in load.copies]
        return self._launch(Direction.LOAD, copies, loads) if loads else []

    def take_stores(self) -> list[CopyBatch]:
        """Copies of queued entries, which the ranks must now execute. All planned steps must have been launched."""
        if not self._store_queue or not self._memory.is_ready:
            return []
        if len(self._in_flight[Direction.STORE]) >= MAX_STORES_IN_FLIGHT:
            return []
        copies: list[EntryCopy] = []
        num_bytes = 0
        for kind, block_hash in list(islice(self._store_queue, MAX_STORE_ENTRIES)):
            if copies and num_bytes + self._entry_bytes[kind] > MAX_STORE_BYTES:
                break
            group = self._store_queue[kind, block_hash]
            cache_pool, pool = self._cache_pools[group][kind], self.pools[kind]
            entry = cache_pool.lookup(block_hash)
            is_stored = pool.lookup(block_hash) is not None or (kind, block_hash) in self._storing
            if entry is not None and not is_stored and not (pool.num_free and cache_pool.can_acquire(entry)):
                continue
            del self._store_queue[kind, block_hash]
            if entry is None or is_stored:
                continue
            cache_pool.acquire(entry)
            (slot,) = pool.allocate(1)
            has_draft_entries = entry in cache_pool.blocks_with_draft_entries
            copies.append(EntryCopy(group, kind, block_hash, entry, slot, has_draft_entries))
            self._storing.add((kind, block_hash))
            num_bytes += self._entry_bytes[kind]
        return self._launch(Direction.STORE, copies, []) if copies else []

    def collect_ended_loads(self) -> list[PrefixLoad]:
        """Process the batches that have ended. Returns the loads that have ended, for `finish_load`."""
        ended_loads: list[PrefixLoad] = []
        for direction in Direction:
            num_done = self._memory.num_done(direction)
            while self._num_ended[direction] < num_done:
                self._num_ended[direction] += 1
                batch = self._in_flight[direction].popleft()
                is_usable = (batch.epoch, batch.num_failures) == (self.epoch, self._memory.num_failures)
                seconds = time.perf_counter() - batch.begin_s
                self.counters.num_bytes[direction] += batch.num_bytes
                self.counters.copy_s[direction] += seconds
                if direction is Direction.STORE:
                    self._end_stores(batch, is_usable=is_usable)
                else:
                    if batch.num_bytes:
                        self._load_time.observe(batch.num_bytes, seconds)
                    for load in batch.loads:
                        self._end_load(load, is_usable=is_usable and load.epoch == self.epoch)
                    ended_loads += batch.loads
        return ended_loads if self.files is None else ended_loads + self._complete_files(self.files)

    def close(self) -> None:
        """Wait for files that are being written. Call after the last copy."""
        if self.files is not None:
            self.files.close()

    def forget(self) -> None:
        """Forget all entries. Copies in flight end without effect."""
        self.epoch += 1
        self._store_queue.clear()
        self._write_queue.clear()
        for pool in self.pools:
            pool.forget_hashes()
        if self.files is not None:
            self.files.remove_all()

    def _launch(self, direction: Direction, copies: list[EntryCopy], loads: list[PrefixLoad]) -> list[CopyBatch]:
        by_cache: dict[tuple[int, EntryKind], EntryCopies] = {}
        for copy in copies:
            cache_copies = by_cache.setdefault(copy[:2], EntryCopies(copy.group, copy.kind, [], []))
            cache_copies.entries.append(copy.entry)
            cache_copies.slots.append(copy.slot)
        num_bytes = sum(self._entry_bytes[copy.kind] for copy in copies)
        state = self.epoch, self._memory.num_failures
        self._in_flight[direction].append(BatchInFlight(copies, loads, num_bytes, time.perf_counter(), *state))
        return [CopyBatch(direction, list(by_cache.values()))]

    def _end_stores(self, batch: BatchInFlight, *, is_usable: bool) -> None:
        for copy in batch.copies:
            pool = self.pools[copy.kind]
            self._storing.discard((copy.kind, copy.block_hash))
            self._cache_pools[copy.group][copy.kind].release([copy.entry])
            if is_usable:
                pool.register(copy.slot, copy.block_hash)
                if copy.has_draft_entries:
                    pool.blocks_with_draft_entries.add(copy.slot)
                self._queue_write(copy.kind, copy.block_hash)
            pool.release([copy.slot])

    def _complete_files(self, files: FileTier) -> list[PrefixLoad]:
        """Process ended reads and writes of files, and start writes.

        Returns the loads that have ended because a read has failed.
        """
        for kind, slot in files.take_written():
            self.pools[kind].release([slot])
        while self._write_queue and not files.is_full:
            kind, block_hash = self._write_queue.popitem(last=False)[0]
            slot = self.pools[kind].lookup(block_hash)
            if slot is not None and not files.is_written_or_queued(kind, block_hash):
                self.pools[kind].acquire(slot)
                files.start_write(kind, block_hash, slot)
        failed_loads: list[PrefixLoad] = []
        for load in self._new_loads:
            if not load.reads or not all(read.future.done() for read in load.reads):
                continue
            is_usable = load.epoch == self.epoch
            for read in load.reads:
                if not files.end_read(read):
                    is_usable, load.may_retry = False, True
                elif load.epoch == self.epoch:
                    self.pools[read.kind].register(read.slot, read.block_hash)
            load.reads = []
            if not is_usable:
                self._end_load(load, is_usable=False)
                failed_loads.append(load)
        self._new_loads = [load for load in self._new_loads if not load.is_ended]
        return failed_loads

    def _end_load(self, load: PrefixLoad, *, is_usable: bool) -> None:
        load.is_ended, load.is_usable = True, is_usable
        counters = self.counters
        counters.wait_s += time.perf_counter() - load.begin_s
        counters.num_loaded_tokens += load.num_tokens * is_usable
        counters.num_file_tokens += load.num_file_tokens * is_usable
        counters.num_failed_loads += not is_usable
        # The last entry is evicted first, because earlier entries are useful without it.
        for copy in reversed(load.copies):
            self.pools[copy.kind].release([copy.slot])
        self._loading[load.group] -= Counter(copy.block_hash for copy in load.copies)
