import errno
import json
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanovllm_core.cache import block_files
from nanovllm_core.cache.block_files import BlockFiles
from nanovllm_core.cache.shared_directory import try_lock
from nanovllm_core.errors import ConfigError

PAYLOAD_BYTES = 5000
HASHES = [random.Random(number).randbytes(32) for number in range(40)]
AMPLE_BYTES = 1 << 30


def payload_of(block_hash: bytes, num_bytes: int = PAYLOAD_BYTES) -> memoryview:
    return memoryview(random.Random(block_hash).randbytes(num_bytes))


def read(files: BlockFiles, block_hash: bytes) -> bytes | None:
    into = memoryview(bytearray(PAYLOAD_BYTES))
    return bytes(into) if files.read(block_hash, into) else None


def path_of(directory: Path, block_hash: bytes) -> Path:
    [path] = directory.glob(f"*/{block_hash.hex()}.safetensors")
    return path


def sum_sizes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def scan(files: BlockFiles) -> None:
    with files._scan_lock:
        files._scan()


@pytest.fixture
def directory(tmp_path) -> Path:
    return tmp_path / "blocks"


@pytest.fixture
def open_files(directory) -> Iterator[Callable[..., BlockFiles]]:
    opened = []

    def open_one(max_bytes: int = AMPLE_BYTES, identity: bytes = b"model") -> BlockFiles:
        opened.append(files := BlockFiles(directory, max_bytes, identity, PAYLOAD_BYTES))
        assert files.indexed.wait(10)
        return files

    yield open_one
    for files in opened:
        files.close()


def test_a_reopened_store_finds_all_payloads(open_files):
    files = open_files()
    assert not files.contains(HASHES[0])
    assert read(files, HASHES[0]) is None
    for block_hash in HASHES:
        files.write(block_hash, payload_of(block_hash))
        assert files.contains(block_hash)
    files.close()
    reopened = open_files()
    for block_hash in HASHES:
        assert reopened.contains(block_hash)
        assert read(reopened, block_hash) == payload_of(block_hash)
    assert (reopened.counts.num_hits, reopened.counts.num_misses) == (len(HASHES), 0)
    assert reopened.counts.bytes_read == len(HASHES) * PAYLOAD_BYTES


def test_a_store_does_not_find_blocks_of_another_identity(open_files):
    first, second = open_files(identity=b"one"), open_files(identity=b"two")
    first.write(HASHES[0], payload_of(HASHES[0]))
    assert not second.contains(HASHES[0])
    assert read(second, HASHES[0]) is None
    # A moved file is found by its name, but has the header of another identity.
    path = path_of(first._directory, HASHES[0])
    path.rename(second._folder / path.name)
    assert read(second, HASHES[0]) is None
    assert second.counts.num_corrupt == 1


def flip_bit(position: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 1 << 3
        path.write_bytes(data)

    return flip


DAMAGES = {
    "empty": lambda path: os.truncate(path, 0),
    "one byte too short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one byte too long": lambda path: os.truncate(path, path.stat().st_size + 1),
    "without header": lambda path: os.truncate(path, 10),
    "a bit of the header's length": flip_bit(0),
    "a bit of the header": flip_bit(60),
    "the first bit of the payload": flip_bit(-PAYLOAD_BYTES),
    "the last bit of the payload": flip_bit(-1),
    "the file of another block": lambda path: path_of(path.parent.parent, HASHES[1]).rename(path),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_a_miss_and_is_removed(open_files, damage):
    files = open_files()
    for block_hash in HASHES[:2]:
        files.write(block_hash, payload_of(block_hash))
    path = path_of(files._directory, HASHES[0])
    damage(path)
    assert read(files, HASHES[0]) is None
    assert not files.contains(HASHES[0])
    assert not path.exists()
    assert (files.counts.num_corrupt, files.counts.num_misses, files.counts.num_hits) == (1, 1, 0)
    files.write(HASHES[0], payload_of(HASHES[0]))
    assert read(files, HASHES[0]) == payload_of(HASHES[0])


def test_a_file_has_the_safetensors_layout(open_files):
    files = open_files()
    files.write(HASHES[0], payload_of(HASHES[0]))
    data = path_of(files._directory, HASHES[0]).read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    assert header_bytes % 8 == 0
    header = json.loads(data[8 : 8 + header_bytes])
    assert header["payload"] == {"dtype": "U8", "shape": [PAYLOAD_BYTES], "data_offsets": [0, PAYLOAD_BYTES]}
    assert header["__metadata__"]["hash"] == HASHES[0].hex()
    assert all(isinstance(value, str) for value in header["__metadata__"].values())
    assert data[8 + header_bytes :] == payload_of(HASHES[0])


def test_a_file_has_its_name_only_when_it_is_complete(open_files, monkeypatch):
    files, rename, names = open_files(), Path.rename, []

    def rename_and_check(path: Path, target: Path) -> Path:
        names.append(path.name)
        assert path.parent == target.parent
        assert path.stat().st_size == files._file_bytes
        assert not target.exists()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_and_check)
    files.write(HASHES[0], payload_of(HASHES[0]))
    [name] = names
    assert name.startswith("temporary-")


def fail_with(error_number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(error_number, os.strerror(error_number))

    return fail


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_an_error_stops_writes_for_a_while_and_is_logged_once(open_files, monkeypatch, caplog, error_number):
    caplog.set_level(logging.WARNING)
    files, now = open_files(), block_files.time.monotonic()
    monkeypatch.setattr(block_files.time, "monotonic", lambda: now)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_with(error_number))
        for block_hash in HASHES[:3]:
            files.write(block_hash, payload_of(block_hash))
        assert files.counts.num_write_errors == 1
        assert files.counts.num_skipped_writes == 2
        now += block_files._SUSPENSION_S
        files.write(HASHES[0], payload_of(HASHES[0]))
        assert files.counts.num_write_errors == 2
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert os.strerror(error_number) in record.getMessage()
    assert not any(map(files.contains, HASHES))
    now += block_files._SUSPENSION_S
    files.write(HASHES[0], payload_of(HASHES[0]))
    assert read(files, HASHES[0]) == payload_of(HASHES[0])
    assert len([*files._folder.iterdir()]) == 1


def test_a_read_error_is_a_miss(open_files, monkeypatch):
    files = open_files()
    files.write(HASHES[0], payload_of(HASHES[0]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", fail_with(errno.EIO))
        assert read(files, HASHES[0]) is None
    assert (files.counts.num_read_errors, files.counts.num_corrupt) == (1, 0)
    # The file may be intact, so it stays.
    assert read(files, HASHES[0]) == payload_of(HASHES[0])


def test_a_read_only_directory_still_gives_hits(open_files, monkeypatch):
    files = open_files()
    files.write(HASHES[0], payload_of(HASHES[0]))
    monkeypatch.setattr(os, "utime", fail_with(errno.EROFS))
    assert read(files, HASHES[0]) == payload_of(HASHES[0])


def test_a_directory_that_vanishes_gives_misses_until_it_is_back(open_files, directory, monkeypatch):
    files, elsewhere = open_files(), directory.with_name("elsewhere")
    monkeypatch.setattr(block_files, "_SUSPENSION_S", 0)
    files.write(HASHES[0], payload_of(HASHES[0]))
    directory.rename(elsewhere)
    assert files.contains(HASHES[0])  # The index is in memory.
    assert read(files, HASHES[0]) is None
    for block_hash in HASHES:
        files.write(block_hash, payload_of(block_hash))
    assert files.counts.num_write_errors > 0
    assert not directory.exists()  # The store must not create a directory that may be a mount point.
    directory.mkdir(mode=0o700)
    files.write(HASHES[1], payload_of(HASHES[1]))
    assert read(files, HASHES[1]) == payload_of(HASHES[1])
    assert len([*directory.glob("writer-*")]) == 1


def test_a_directory_is_private(open_files, directory, monkeypatch):
    files = open_files()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert files._folder.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o750)
    with pytest.raises(ConfigError, match=r"kv_offload_dir is .*: run chmod 700"):
        open_files()
    scan(files)
    files.write(HASHES[0], payload_of(HASHES[0]))
    assert files.counts.num_write_errors == 1
    assert not files.contains(HASHES[0])
    directory.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="must be a directory of this user"):
        open_files()


def test_a_directory_that_is_a_file_is_refused(open_files, directory):
    directory.write_text("text")
    with pytest.raises(ConfigError, match="can't be used: File exists"):
        open_files()


def test_a_limit_below_two_files_is_refused(open_files):
    with pytest.raises(ConfigError, match=r"kv_offload_disk_gib is .* at least"):
        open_files(max_bytes=2 * PAYLOAD_BYTES)


@pytest.fixture
def without_background_scans(monkeypatch) -> None:
    """Scan only once in the background: repeated scans would evict files at different times in each run."""
    monkeypatch.setattr(BlockFiles, "_scan_repeatedly", scan)


@pytest.mark.usefixtures("without_background_scans")
def test_the_least_recently_used_file_is_evicted(open_files, directory):
    files = open_files()
    max_bytes = 10 * files._file_bytes
    for age, block_hash in enumerate(HASHES[:9]):
        files.write(block_hash, payload_of(block_hash))
        os.utime(path_of(directory, block_hash), (1000 - age, 1000 - age))
    assert read(files, HASHES[8]) is not None
    files.close()
    files = open_files(max_bytes, b"other")
    for number, block_hash in enumerate(HASHES[9:12]):
        files.write(block_hash, payload_of(block_hash))
        assert sum_sizes(directory) <= max_bytes
        kept = {path.name for path in directory.glob("*/*")}
        assert {f"{block_hash.hex()}.safetensors" for block_hash in HASHES[8 : 10 + number]} <= kept
    assert {f"{block_hash.hex()}.safetensors" for block_hash in HASHES[:6]} <= kept
    assert f"{HASHES[7].hex()}.safetensors" not in kept
    assert files.counts.num_evicted == 2


@pytest.mark.parametrize("num_engines", [1, 2, 3])
@pytest.mark.parametrize("has_one_identity", [False, True])
@pytest.mark.usefixtures("without_background_scans")
def test_engines_together_stay_within_the_limit(open_files, directory, num_engines, has_one_identity):
    max_bytes, rng = 12 * (PAYLOAD_BYTES + 400), random.Random(0)
    engines = [open_files(max_bytes, b"" if has_one_identity else b"%d" % index) for index in range(num_engines)]
    for _ in range(300):
        block_hash = rng.choice(HASHES)
        rng.choice(engines).write(block_hash, payload_of(block_hash))
        assert sum_sizes(directory) <= max_bytes
        found = read(rng.choice(engines), block_hash := rng.choice(HASHES))
        assert found is None or found == payload_of(block_hash)
    assert sum_sizes(directory) >= max_bytes / 2
    for files in engines:
        assert files.counts.num_hits > 3
        assert files.counts.num_evicted > 10
        assert files.counts.num_skipped_writes == files.counts.num_corrupt == 0


def test_engines_find_the_files_of_each_other(open_files):
    first, second = open_files(), open_files()
    first.write(HASHES[0], payload_of(HASHES[0]))
    assert read(second, HASHES[0]) == payload_of(HASHES[0])  # A read does not need the index.
    assert not second.contains(HASHES[0])
    scan(second)
    assert second.contains(HASHES[0])
    first.clear()
    scan(second)
    assert not second.contains(HASHES[0])


@pytest.mark.usefixtures("without_background_scans")
def test_writes_are_skipped_while_another_engine_scans(open_files, directory):
    files = open_files(3 * (PAYLOAD_BYTES + 400))
    with try_lock(directory):
        for block_hash in HASHES[:3]:
            files.write(block_hash, payload_of(block_hash))
        assert read(files, HASHES[0]) == payload_of(HASHES[0])
    assert files.counts.num_skipped_writes == 2
    files.write(HASHES[3], payload_of(HASHES[3]))
    assert files.contains(HASHES[3])


@pytest.mark.usefixtures("without_background_scans")
def test_files_that_are_being_written_count_towards_the_limit(open_files, directory, monkeypatch):
    files = open_files(max_bytes := 5 * (PAYLOAD_BYTES + 400))
    rename, has_started, may_end = Path.rename, threading.Event(), threading.Event()

    def rename_late(path: Path, target: Path) -> Path:
        if target.name.startswith(HASHES[0].hex()):
            has_started.set()
            assert may_end.wait(10)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_late)
    thread = threading.Thread(target=files.write, args=(HASHES[0], payload_of(HASHES[0])))
    thread.start()
    assert has_started.wait(10)
    for block_hash in HASHES[1:10]:
        files.write(block_hash, payload_of(block_hash))
        assert sum_sizes(directory) <= max_bytes
    may_end.set()
    thread.join()
    assert sum_sizes(directory) <= max_bytes
    assert files.contains(HASHES[0])


def test_files_of_ended_writers_are_removed_and_other_files_stay(open_files, directory):
    files = open_files()
    living = open_files()
    kept = [
        directory / "notes.txt",
        directory / "folder" / "temporary-0123456789abcdef-1",
        files._folder / "notes.txt",
        files._folder / f"temporary-{living._writer.id}-7",
    ]
    removed = [
        directory / "writer-0123456789abcdef-1000",
        files._folder / "temporary-0123456789abcdef-1",
        directory / ("0" * 64) / "temporary-0123456789abcdef-2",
    ]
    for path in kept + removed:
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    scan(files)
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in removed)


def test_clear_removes_the_files_of_one_identity(open_files, directory):
    first, second = open_files(), open_files(identity=b"other")
    for files in (first, second):
        files.write(HASHES[0], payload_of(HASHES[0]))
    first.clear()
    assert not first.contains(HASHES[0])
    assert read(first, HASHES[0]) is None
    assert read(second, HASHES[0]) == payload_of(HASHES[0])


def test_a_closed_store_writes_nothing_and_reserves_nothing(open_files, directory):
    files = open_files()
    files.close()
    files.write(HASHES[0], payload_of(HASHES[0]))
    assert [path.name for path in directory.rglob("*")] == [files._identity]


def test_threads_share_a_store(open_files, directory):
    max_bytes = 12 * (PAYLOAD_BYTES + 400)
    files, errors = open_files(max_bytes), []

    def use(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(200):
            block_hash = rng.choice(HASHES)
            files.write(block_hash, payload_of(block_hash))
            found = read(files, block_hash := rng.choice(HASHES))
            if found not in (None, payload_of(block_hash)):
                errors.append(block_hash)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = files.counts
    assert not errors
    assert counts.num_hits + counts.num_misses == 800
    assert counts.num_corrupt == counts.num_read_errors == counts.num_write_errors == 0
    assert sum_sizes(directory) <= max_bytes
