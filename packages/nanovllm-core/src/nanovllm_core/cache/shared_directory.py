"""A private directory that several processes of a host share, with one limit for the size of all files.

Each process that writes is a writer: it keeps a locked file in the directory, and reserves bytes before it writes.
"""

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Collection, Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from nanovllm_core.errors import ConfigError

SECRET_BYTES = 32
_SECRET_NAME = "secret"  # noqa: S105 (a file's name)
_FOLDER_NAME = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_TEMPORARY_NAME = re.compile(r"temporary-([0-9a-f]{16})-\d+")
_WRITER_NAME = re.compile(r"writer-([0-9a-f]{16})-(\d+)")


def name_of_hash(block_hash: bytes) -> str:
    """The name of a block's file. block_hash: 32 bytes."""
    return f"{block_hash.hex()}.safetensors"


def hash_of_name(name: str) -> bytes:
    """The hash of the block in the file `name`."""
    return bytes.fromhex(name.removesuffix(".safetensors"))


def is_block_file(name: str) -> bool:
    """Whether `name_of_hash` can return `name`."""
    return _FILE_NAME.fullmatch(name) is not None


class StoredFile(NamedTuple):
    """A block's file in a folder of the directory. mtime_ns: time of the last use in nanoseconds."""

    folder: str
    name: str
    mtime_ns: int
    num_bytes: int


def create_directory(directory: Path) -> None:
    """Create `directory` if it is missing. Raises ConfigError if another user owns it or can access it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_directory(directory)
    except OSError as error:
        raise ConfigError(f"kv_offload_dir is {directory}, which can't be used: {error.strerror}") from error


def check_directory(directory: Path) -> None:
    """Raise ConfigError if another user owns `directory` or can access it, and OSError if it is missing."""
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise ConfigError(f"kv_offload_dir is {directory}, but must be a directory of this user (uid {os.geteuid()})")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"kv_offload_dir is {directory}, which other users can access: run chmod 700 {directory}")


def load_secret(directory: Path) -> bytes:
    """The secret of all engines that share `directory`, created by the first engine. Raises ConfigError."""
    create_directory(directory)
    path = directory / _SECRET_NAME
    try:
        if (secret := _read_secret(path)) is None:
            with _lock(directory, fcntl.LOCK_EX):
                if (secret := _read_secret(path)) is None:
                    secret = secrets.token_bytes(SECRET_BYTES)
                    _replace_secret(path, secret)
    except OSError as error:
        raise ConfigError(f"kv_offload_dir is {directory}, whose secret can't be used: {error.strerror}") from error
    return secret


def _read_secret(path: Path) -> bytes | None:
    """The secret; None if the file is missing or was truncated."""
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        return None
    return secret if len(secret) == SECRET_BYTES else None


def _replace_secret(path: Path, secret: bytes) -> None:
    temporary_path = path.with_name(f"{path.name}.new")
    temporary_path.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    temporary_path.rename(path)


@contextlib.contextmanager
def _lock(path: Path, operation: int) -> Generator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        # Closing would not unlock while a child process that another thread has just forked has a copy.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def try_lock(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Lock `directory` against other writers. Raises BlockingIOError if another writer has locked it."""
    return _lock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Writer:
    """The file of one writer. The file is unlocked when the writer's process and its forked children have ended.

    The file's name has the number of reserved bytes, because a file can be renamed atomically.
    """

    def __init__(self, directory: Path):
        self.id = secrets.token_hex(8)
        self._directory = directory
        self._path: Path | None = None
        self._descriptor = -1

    def reserve(self, num_bytes: int) -> None:
        """Replace the last reservation by `num_bytes`. The caller has locked the directory."""
        path = self._directory / f"writer-{self.id}-{num_bytes}"
        try:
            if self._path is not None:
                self._path.rename(path)
        except FileNotFoundError:
            self.close()
        if self._path is None:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self._path = path

    def close(self) -> None:
        """Remove the reservation."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._path = None


def find_reservations(directory: Path) -> dict[str, int]:
    """The number of reserved bytes of each writer, by id. Removes the files of writers that have ended.

    The caller has locked the directory.
    """
    reservations: dict[str, int] = {}
    for path in directory.iterdir():
        if match := _WRITER_NAME.fullmatch(path.name):
            try:
                with _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    path.unlink()
            except BlockingIOError:
                reservations[match[1]] = int(match[2])
            except FileNotFoundError:  # The writer has removed the file itself.
                continue
    return reservations


def scan_files(directory: Path, writer_ids: Collection[str]) -> Iterator[StoredFile]:
    """Yield the blocks' files in all folders. Removes temporary files that no writer in `writer_ids` owns.

    The caller has locked the directory.
    """
    for folder in directory.iterdir():
        if not _FOLDER_NAME.fullmatch(folder.name) or not folder.is_dir():
            continue
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if is_block_file(entry.name):
                        status = entry.stat(follow_symlinks=False)
                        yield StoredFile(folder.name, entry.name, status.st_mtime_ns, status.st_size)
                    elif (match := _TEMPORARY_NAME.fullmatch(entry.name)) and match[1] not in writer_ids:
                        os.unlink(entry.path)  # noqa: PTH108
                except FileNotFoundError:  # A reader has removed the file, because it was damaged.
                    continue
