"""Keeps payloads of the prefix cache, such as KV blocks, in files that outlive the process.

A file's name is the block's hash, so the directory is the index.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import threading
import time
from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanovllm_core.cache.checksum import checksum_of
from nanovllm_core.cache.shared_directory import (
    Writer,
    check_directory,
    create_directory,
    find_reservations,
    hash_of_name,
    is_block_file,
    name_of_hash,
    scan_files,
    try_lock,
)
from nanovllm_core.errors import ConfigError

# Share of `max_bytes` that all engines together reserve for future writes. Each new reservation needs a scan.
_RESERVED_SHARE = 1 / 16
# Time between two scans; longer if a scan takes more than 1 % of this time. Scans find other engines' files.
_SCAN_INTERVAL_S = 60.0
_MAX_SCAN_SHARE = 0.01
_SCAN_RETRY_S = 0.5  # time until the next scan if the last scan was not possible
_SUSPENSION_S = 30.0  # time without writes after an error
_log = logging.getLogger(__name__)


@dataclass
class FileCounts:
    """Totals since the start of the engine.

    num_misses: number of reads that found no intact file.
    num_corrupt: number of files that were removed because their contents were wrong.
    num_read_errors, num_write_errors: number of failures of the operating system.
    num_skipped_writes: number of payloads that were not written. Reasons: the first scan had not ended, no bytes could
        be reserved, or an error had suspended writes.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_corrupt: int = 0
    num_read_errors: int = 0
    num_write_errors: int = 0
    num_skipped_writes: int = 0
    num_evicted: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class BlockFiles:
    """Reads and writes payloads of one size, one file per hash. Several threads may use an instance.

    Engines of a host can share a directory. The file that was used least recently is evicted first. A file's
    modification time is the time of its last use.

    directory: only the user of this process may have access.
    max_bytes: maximum size of all files in the directory, including files of other engines and with other `identity`.
    identity: everything that determines the payload of a hash, such as model, dtype, layout and kind of payload.
    indexed: set once `contains` knows the files that earlier engines have written.
    """

    def __init__(self, directory: Path, max_bytes: int, identity: bytes, payload_bytes: int):
        self.counts = FileCounts()
        self.indexed = threading.Event()
        self._directory = directory
        self._max_bytes = max_bytes
        self._payload_bytes = payload_bytes
        self._identity = hashlib.sha256(b"%d:" % payload_bytes + identity).hexdigest()
        self._folder = directory / self._identity
        self._file_bytes = len(self._make_header(bytes(32), 0)) + payload_bytes
        if max_bytes < 2 * self._file_bytes:
            raise ConfigError(
                f"kv_offload_disk_gib is {max_bytes / 2**30:.3g}, but must be at least "
                f"{2 * self._file_bytes / 2**30:.3g} for this model"
            )
        create_directory(directory)
        self._index: set[bytes] = set()
        self._next_index = self._index  # during a scan, the new set that the scan fills
        self._writer = Writer(directory)
        self._temporary_numbers = itertools.count()
        self._leftovers: deque[Path] = deque()  # temporary files of failed writes, which the next scan removes
        self._scan_lock = threading.Lock()
        # Guards the counts and the attributes below.
        self._lock = threading.Lock()
        # Sums since the start. A write adds its bytes to `_claimed_bytes` when it begins, and to `_finished_bytes` when
        # it ends. If a claim would exceed `_max_claimed_bytes`, a scan must first renew the reservation.
        self._claimed_bytes = 0
        self._finished_bytes = 0
        self._max_claimed_bytes = 0
        self._reserved_bytes = 0
        self._suspended_until = 0.0
        self._is_failing = False
        self._is_closed = False
        self._scan_requested = threading.Event()
        self._thread = threading.Thread(target=self._scan_repeatedly, name="nanovllm-files", daemon=True)
        self._thread.start()

    def contains(self, block_hash: bytes) -> bool:
        """Whether the last scan found a file or a later write made one. The file may have been evicted since then."""
        return block_hash in self._index

    def read(self, block_hash: bytes, into: memoryview) -> bool:
        """Read a payload. Returns False if there is no intact file; `into` may then have any contents."""
        path = self._path(block_hash)
        try:
            if self._read_file(path, block_hash, into):
                self._count(num_hits=1, bytes_read=self._payload_bytes)
                return True
            path.unlink(missing_ok=True)
            self._count(num_misses=1, num_corrupt=1)
        except FileNotFoundError:
            self._count(num_misses=1)
        except OSError as error:
            self._count(num_misses=1, num_read_errors=1)
            _log.debug("file of a KV block can't be read: %s", error)
        self._forget(block_hash)
        return False

    def write(self, block_hash: bytes, payload: memoryview) -> None:
        """Write a payload, unless it is already in a file. After an error, nothing is written for some time."""
        if self.contains(block_hash):
            return
        if not self._claim_bytes():
            self._count(num_skipped_writes=1)
            return
        try:
            self._write_file(block_hash, payload)
        except OSError as error:
            self._suspend_writes(error)
        else:
            # The end of a scan makes `_next_index` the index.
            self._index.add(block_hash)
            self._next_index.add(block_hash)
            with self._lock:
                self.counts.bytes_written += self._payload_bytes
                self._is_failing = False
        finally:
            with self._lock:
                self._finished_bytes += self._file_bytes

    def clear(self) -> None:
        """Remove all files of this identity, except files that are being written."""
        self._index.clear()
        self._next_index.clear()
        try:
            for path in self._folder.iterdir():
                if is_block_file(path.name):
                    path.unlink(missing_ok=True)
        except FileNotFoundError:  # The first scan has not created the folder yet: there are no files.
            pass
        except OSError as error:
            self._suspend_writes(error)

    def close(self) -> None:
        """Release the reservation. Call after the last write. The files stay."""
        with self._lock:
            self._is_closed = True
        self._scan_requested.set()
        self._thread.join()
        # If this fails, the next scan of any engine removes the temporary files and the reservation.
        with self._scan_lock, contextlib.suppress(OSError):
            self._remove_leftovers()
            self._writer.close()

    def _forget(self, block_hash: bytes) -> None:
        self._index.discard(block_hash)
        self._next_index.discard(block_hash)

    def _path(self, block_hash: bytes) -> Path:
        return self._folder / name_of_hash(block_hash)

    def _make_header(self, block_hash: bytes, checksum: int) -> bytes:
        """The header of a file in the safetensors layout. All headers have the same length.

        Source: https://github.com/huggingface/safetensors#format
        """
        # Other users can't access the directory, so a checksum against accidental damage is enough.
        metadata = {"identity": self._identity, "hash": block_hash.hex(), "xxh3": f"{checksum:016x}"}
        tensor = {"dtype": "U8", "shape": [self._payload_bytes], "data_offsets": [0, self._payload_bytes]}
        encoded = json.dumps({"__metadata__": metadata, "payload": tensor}).encode()
        encoded += b" " * (-len(encoded) % 8)
        return len(encoded).to_bytes(8, "little") + encoded

    def _read_file(self, path: Path, block_hash: bytes, into: memoryview) -> bool:
        """Read a file. Returns whether size, header and checksum are right."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            header = bytearray(self._file_bytes - self._payload_bytes)
            if os.fstat(descriptor).st_size != self._file_bytes:
                return False
            if os.readv(descriptor, [header, into]) != self._file_bytes:
                return False
            if bytes(header) != self._make_header(block_hash, checksum_of(into)):
                return False
            with contextlib.suppress(OSError):  # A directory that is now read-only still has intact files.
                os.utime(descriptor)
            return True
        finally:
            os.close(descriptor)

    def _write_file(self, block_hash: bytes, payload: memoryview) -> None:
        temporary_path = self._folder / f"temporary-{self._writer.id}-{next(self._temporary_numbers)}"
        try:
            # fsync is not needed: a file that loses contents in a power failure fails its checksum.
            with temporary_path.open("xb") as file:
                file.write(self._make_header(block_hash, checksum_of(payload)))
                file.write(payload)
            temporary_path.rename(self._path(block_hash))
        except OSError:
            self._leftovers.append(temporary_path)
            raise

    def _remove_leftovers(self) -> None:
        while self._leftovers:
            self._leftovers[0].unlink(missing_ok=True)
            self._leftovers.popleft()

    def _count(self, **increments: int) -> None:
        with self._lock:
            for name, increment in increments.items():
                setattr(self.counts, name, getattr(self.counts, name) + increment)

    def _claim_bytes(self) -> bool:
        """Claim the bytes of one file. Scans the directory first if the reservation is used up."""
        if not self.indexed.is_set():
            return False
        if not self._has_unclaimed_bytes():
            with self._scan_lock:
                if not self._has_unclaimed_bytes():
                    self._scan()
        with self._lock:
            if not self._may_write() or not self._has_unclaimed_bytes():
                return False
            self._claimed_bytes += self._file_bytes
            if self._max_claimed_bytes - self._claimed_bytes < self._reserved_bytes / 2:
                self._scan_requested.set()
        return True

    def _has_unclaimed_bytes(self) -> bool:
        return self._claimed_bytes + self._file_bytes <= self._max_claimed_bytes

    def _may_write(self) -> bool:
        return not self._is_closed and time.monotonic() >= self._suspended_until

    def _suspend_writes(self, error: Exception) -> None:
        """Stop writing for some time. Logs only the first error after a successful write."""
        with self._lock:
            self.counts.num_write_errors += 1
            self._suspended_until = time.monotonic() + _SUSPENSION_S
            self._max_claimed_bytes = 0  # The next write scans first, which creates a missing folder.
            is_first_error, self._is_failing = not self._is_failing, True
        if is_first_error:
            _log.warning("files of KV blocks can't be written; retrying every %.0f s: %s", _SUSPENSION_S, error)

    def _scan_repeatedly(self) -> None:
        while not self._is_closed:
            self._scan_requested.clear()
            start = time.monotonic()
            with self._scan_lock:
                is_complete = self._scan()
            interval = max(_SCAN_INTERVAL_S, (time.monotonic() - start) / _MAX_SCAN_SHARE)
            self._scan_requested.wait(interval if is_complete else _SCAN_RETRY_S)

    def _scan(self) -> bool:
        """Update the index, evict files and reserve bytes. Returns False if a scan is impossible now.

        The caller holds `_scan_lock`.
        """
        if not self._may_write():
            return False
        try:
            check_directory(self._directory)
            with try_lock(self._directory):
                self._folder.mkdir(mode=0o700, exist_ok=True)
                is_complete = self._scan_locked_directory()
        except BlockingIOError:  # Another engine scans.
            return False
        except (OSError, ConfigError) as error:
            self._suspend_writes(error)
            return False
        if is_complete:
            self.indexed.set()
        return is_complete

    def _scan_locked_directory(self) -> bool:
        # The scan may miss files that are unfinished now, so their bytes count against the new reservation.
        with self._lock:
            finished_bytes = self._finished_bytes
        self._next_index = set()
        self._remove_leftovers()
        reservations = find_reservations(self._directory)
        reservations.pop(self._writer.id, None)
        names: list[tuple[str, str]] = []
        mtimes, sizes = array("q"), array("q")
        for folder, name, mtime_ns, num_bytes in scan_files(self._directory, {self._writer.id, *reservations}):
            if self._is_closed:
                return False
            if folder == self._identity:
                self._next_index.add(hash_of_name(name))
            names.append((folder, name))
            mtimes.append(mtime_ns)
            sizes.append(num_bytes)
        bytes_not_reserved_by_others = self._max_bytes - sum(reservations.values())
        wanted_bytes = max(int(self._max_bytes * _RESERVED_SHARE) // (1 + len(reservations)), self._file_bytes)
        reserved_bytes = max(min(wanted_bytes, bytes_not_reserved_by_others), 0)
        if (excess_bytes := sum(sizes) + reserved_bytes - bytes_not_reserved_by_others) > 0:
            self._evict(names, mtimes, sizes, excess_bytes)
        self._writer.reserve(reserved_bytes)
        self._index = self._next_index
        with self._lock:
            self._reserved_bytes = reserved_bytes
            self._max_claimed_bytes = finished_bytes + reserved_bytes
        return True

    def _evict(self, names: list[tuple[str, str]], mtimes: "array[int]", sizes: "array[int]", num_bytes: int) -> None:
        """Remove the files that were used least recently, until at least `num_bytes` are removed."""
        # numpy sorts without the interpreter's lock, so the engine's thread can run.
        for position in np.argsort(np.frombuffer(mtimes, np.int64)):
            if num_bytes <= 0:
                break
            folder, name = names[position]
            if folder == self._identity:
                self._forget(hash_of_name(name))
            (self._directory / folder / name).unlink(missing_ok=True)
            num_bytes -= sizes[position]
            self._count(num_evicted=1)
