"""A store of block files finds complete files of its identity, and survives errors of the file system."""

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from block_payloads import HASHES, PAYLOAD_BYTES, path_of, payload_of, read, scan

from nanovllm_core.cache import block_files
from nanovllm_core.errors import ConfigError


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


def test_a_closed_store_writes_nothing_and_reserves_nothing(open_files, directory):
    files = open_files()
    files.close()
    files.write(HASHES[0], payload_of(HASHES[0]))
    assert [path.name for path in directory.rglob("*")] == [files._identity]
