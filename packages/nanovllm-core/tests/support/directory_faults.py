"""Random faults in a directory of KV blocks."""

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MAX_FAULT_S = 0.05
UNPRIVILEGED_USER = 65534  # Root could write to a read-only directory.


def give_to_unprivileged_user(directory: Path) -> None:
    if os.geteuid() == 0:
        os.chown(directory, UNPRIVILEGED_USER, UNPRIVILEGED_USER)
        directory.parent.chmod(0o755)


def drop_privileges() -> None:
    if os.geteuid() == 0:
        os.seteuid(UNPRIVILEGED_USER)


@contextmanager
def dropped_privileges() -> Iterator[None]:
    user = os.geteuid()
    drop_privileges()
    yield
    os.seteuid(user)


def choose_forever(names: Sequence[str], rng: random.Random) -> Iterator[str]:
    while True:
        yield from rng.sample(names, len(names))


class DirectoryFaults:
    def __init__(self, directory: Path, rng: random.Random):
        self._directory = directory
        self._rng = rng
        self.num_added_bytes = 0

    def inject(self, name: str) -> bool:
        """Returns False if the chosen file has been evicted, or no file is left."""
        try:
            FAULTS[name](self)
        except FileNotFoundError:
            return False
        return True

    def _choose_file(self) -> Path:
        paths = sorted(self._directory.glob("*/*.safetensors"))
        if not paths:
            raise FileNotFoundError
        return self._rng.choice(paths)

    def _wait(self) -> None:
        time.sleep(self._rng.random() * MAX_FAULT_S)

    def _folders(self) -> list[Path]:
        return [path for path in self._directory.iterdir() if path.is_dir()]

    def truncate(self) -> None:
        os.truncate(path := self._choose_file(), self._rng.randrange(path.stat().st_size))

    def extend(self) -> None:
        num_bytes = self._rng.randrange(1, 100)
        with self._choose_file().open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(bytes(num_bytes))
        self.num_added_bytes += num_bytes

    def flip_bit(self) -> None:
        with self._choose_file().open("r+b") as file:
            position = self._rng.randrange(max(os.fstat(file.fileno()).st_size, 1))
            byte = os.pread(file.fileno(), 1, position) or b"\0"
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << self._rng.randrange(8)]), position)

    def swap(self) -> None:
        first, second = self._choose_file(), self._choose_file()
        aside = self._directory / "aside"
        first.rename(aside)
        second.rename(first)
        aside.rename(second)

    def remove(self) -> None:
        self._choose_file().unlink()

    def remove_folders(self) -> None:
        for folder in self._folders():
            shutil.rmtree(folder, ignore_errors=True)

    def remove_directory_for_a_while(self) -> None:
        aside = self._directory.with_name("aside")
        self._directory.rename(aside)
        self._wait()
        aside.rename(self._directory)

    def make_read_only_for_a_while(self) -> None:
        paths = [self._directory, *self._folders()]
        for path in paths:
            path.chmod(0o500)
        self._wait()
        for path in paths:
            path.chmod(0o700)

    def open_to_others_for_a_while(self) -> None:
        self._directory.chmod(0o755)
        self._wait()
        self._directory.chmod(0o700)


FAULTS: dict[str, Callable[[DirectoryFaults], None]] = {
    fault.__name__: fault
    for fault in (
        DirectoryFaults.truncate,
        DirectoryFaults.extend,
        DirectoryFaults.flip_bit,
        DirectoryFaults.swap,
        DirectoryFaults.remove,
        DirectoryFaults.remove_folders,
        DirectoryFaults.remove_directory_for_a_while,
        DirectoryFaults.make_read_only_for_a_while,
        DirectoryFaults.open_to_others_for_a_while,
    )
}
