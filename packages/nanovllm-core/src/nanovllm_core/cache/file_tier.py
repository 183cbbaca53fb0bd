"""Keeps copies of the host memory's entries (blocks and checkpoints) in files."""

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from nanovllm_core.cache.block_files import BlockFiles
from nanovllm_core.cache.copy_time import CopyTimeModel
from nanovllm_core.cache.host_memory import EntryKind, HostMemory
from nanovllm_core.request_state import BlockHash

# One thread reads only 2.3 GB/s, mostly because of the checksum, so several threads read. Half of the cores stay free.
NUM_THREADS = min(8, max(2, (os.cpu_count() or 2) // 2))
MAX_WRITES_IN_FLIGHT = 32  # limited, because each write holds a slot of the host memory


@dataclass(slots=True)
class FileRead:
    """A read of an entry into a slot of the host memory.

    future: its result is the seconds that the read took, or None if there is no intact file.
    """

    kind: EntryKind
    block_hash: BlockHash
    slot: int
    future: "Future[float | None]"


class FileTier:
    """Copies slots of the host memory to files and back. All calls come from one thread.

    stores: the files of each kind of entry, indexed by kind.
    read_s, write_s: seconds of all reads and of all writes since the engine started, summed over the threads.
    """

    def __init__(self, stores: Sequence[BlockFiles], memory: HostMemory):
        self.read_s = self.write_s = 0.0
        self._stores = stores
        self._memory = memory
        self._executor = ThreadPoolExecutor(NUM_THREADS, "nanovllm-kv-files")
        self._read_time = CopyTimeModel()
        # The slot and the future of each write in flight, by kind and hash.
        self._writes: dict[tuple[EntryKind, BlockHash], tuple[int, Future[float]]] = {}
        self._removal: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether writes are in flight."""
        return bool(self._writes)

    @property
    def is_full(self) -> bool:
        """Whether no more writes may start now."""
        return len(self._writes) >= MAX_WRITES_IN_FLIGHT

    @property
    def bytes_read(self) -> int:
        """Bytes of intact files that were read since the engine started."""
        return sum(store.counts.bytes_read for store in self._stores)

    @property
    def bytes_written(self) -> int:
        """Bytes that were written since the engine started."""
        return sum(store.counts.bytes_written for store in self._stores)

    def contains(self, kind: EntryKind, block_hash: BlockHash) -> bool:
        """Whether there is probably a file of this entry."""
        if self._removal is not None and not self._removal.done():
            return False
        return isinstance(block_hash, bytes) and self._stores[kind].contains(block_hash)

    def predict_read(self, kinds: Iterable[EntryKind]) -> float:
        """Predicted seconds until entries of these kinds are read."""
        # Each file holds one entry, so only sizes of single entries were observed.
        counts, slot_bytes = Counter(kinds), self._memory.layout.slot_bytes
        entry_s = {kind: self._read_time.predict(slot_bytes[kind]) for kind in counts}
        total_s = sum(count * entry_s[kind] for kind, count in counts.items())
        # Threads read different entries at the same time, but one thread reads a whole entry.
        return max(total_s / NUM_THREADS, *entry_s.values(), 0.0)

    def reject_read(self) -> None:
        """Record that entries were not read, because reading would have taken too long."""
        self._read_time.reject()

    def read(self, kind: EntryKind, block_hash: BlockHash, slot: int) -> FileRead:
        """Start to read an entry into a slot, which the caller holds."""
        return FileRead(kind, block_hash, slot, self._executor.submit(self._read, kind, block_hash, slot))

    def end_read(self, read: FileRead) -> bool:
        """Process a finished read. Returns whether the slot now has the entry."""
        seconds = read.future.result()
        if seconds is None:
            return False
        self.read_s += seconds
        self._read_time.observe(self._memory.layout.slot_bytes[read.kind], seconds)
        return True

    def start_write(self, kind: EntryKind, block_hash: BlockHash, slot: int) -> None:
        """Start to write an entry. The caller holds the slot until `take_written` returns it, and checks `is_full`."""
        self._writes[kind, block_hash] = slot, self._executor.submit(self._write, kind, block_hash, slot)

    def is_written_or_queued(self, kind: EntryKind, block_hash: BlockHash) -> bool:
        """Whether there is probably a file of this entry, now or when a write in flight has ended."""
        return (kind, block_hash) in self._writes or self.contains(kind, block_hash)

    def take_written(self) -> list[tuple[EntryKind, int]]:
        """Pairs (kind, slot) of the writes that have ended since the last call."""
        ended_keys = [key for key, (_, future) in self._writes.items() if future.done()]
        written: list[tuple[EntryKind, int]] = []
        for key in ended_keys:
            slot, future = self._writes.pop(key)
            written.append((key[0], slot))
            if not future.cancelled():
                self.write_s += future.result()
        return written

    def remove_all(self) -> None:
        """Remove all files of this model on a thread. Until the files are removed, `contains` returns False."""
        writes = [future for _, future in self._writes.values() if not future.cancel()]
        self._removal = self._executor.submit(self._remove, writes)

    def close(self) -> None:
        """Wait for the writes that have begun, and drop the writes that have not begun."""
        self._executor.shutdown(cancel_futures=True)
        for store in self._stores:
            store.close()

    def _read(self, kind: EntryKind, block_hash: BlockHash, slot: int) -> float | None:
        begin_s = time.monotonic()
        is_read = self._stores[kind].read(_as_bytes(block_hash), self._memory.slot(kind, slot))
        return time.monotonic() - begin_s if is_read else None

    def _write(self, kind: EntryKind, block_hash: BlockHash, slot: int) -> float:
        begin_s = time.monotonic()
        self._stores[kind].write(_as_bytes(block_hash), self._memory.slot(kind, slot))
        return time.monotonic() - begin_s

    def _remove(self, writes: Sequence["Future[float]"]) -> None:
        # Without this wait, files that are being written now would remain.
        wait(writes)
        for store in self._stores:
            store.clear()


def _as_bytes(block_hash: BlockHash) -> bytes:
    if isinstance(block_hash, int):
        raise TypeError("prefix hashes are integers, but files need SHA-256 hashes: set prefix_hash to 'sha256'")
    return block_hash
