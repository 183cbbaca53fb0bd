"""Stores that share a directory find the files of each other, and together stay within its limit."""

import os
import random
import threading
from pathlib import Path

import pytest
from block_payloads import AMPLE_BYTES, HASHES, PAYLOAD_BYTES, path_of, payload_of, read, scan, sum_sizes

from nanovllm_core.cache.block_files import BlockFiles
from nanovllm_core.cache.shared_directory import try_lock


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
            assert may_end.wait(60)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_late)
    thread = threading.Thread(target=files.write, args=(HASHES[0], payload_of(HASHES[0])))
    thread.start()
    assert has_started.wait(60)
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


def test_clear_stops_no_writes_if_another_engine_has_delayed_the_first_scan(directory):
    directory.mkdir(mode=0o700)
    with try_lock(directory):
        files = BlockFiles(directory, AMPLE_BYTES, b"model", PAYLOAD_BYTES)
        files.clear()
    try:
        scan(files)
        files.write(HASHES[0], payload_of(HASHES[0]))
        assert files.contains(HASHES[0])
        assert files.counts.num_write_errors == 0
    finally:
        files.close()


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
