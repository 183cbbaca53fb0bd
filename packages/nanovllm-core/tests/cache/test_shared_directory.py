import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nanovllm_core.cache.shared_directory import SECRET_BYTES, load_secret, try_lock
from nanovllm_core.errors import ConfigError


def test_engines_that_start_at_once_have_one_secret(tmp_path):
    for number in range(20):
        directory = tmp_path / str(number)
        with ThreadPoolExecutor(8) as executor:
            [secret] = set(executor.map(load_secret, [directory] * 8))
        assert len(secret) == SECRET_BYTES
        assert load_secret(directory) == secret
        [path] = directory.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
    assert len({load_secret(directory) for directory in tmp_path.iterdir()}) == 20


@pytest.mark.parametrize("length", [0, SECRET_BYTES - 1, SECRET_BYTES + 1])
def test_a_damaged_secret_is_replaced(tmp_path, length):
    directory = tmp_path / "blocks"
    load_secret(directory)
    (directory / "secret").write_bytes(bytes(length))
    # Simulate an engine that was killed while it wrote a secret.
    (directory / "secret.new").write_bytes(b"part")
    secret = load_secret(directory)
    assert len(secret) == SECRET_BYTES
    assert load_secret(directory) == secret != bytes(SECRET_BYTES)


def test_a_directory_without_space_for_the_secret_is_refused(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ConfigError, match="secret can't be used: No space left on device"):
        load_secret(tmp_path / "blocks")


def test_a_directory_that_other_users_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        load_secret(tmp_path)


def test_a_directory_is_unlocked_although_a_forked_child_has_a_copy_of_the_descriptor(tmp_path, monkeypatch):
    copies = []
    original_flock = fcntl.flock

    def lock_and_copy(descriptor: int, operation: int) -> None:
        original_flock(descriptor, operation)
        copies.append(os.dup(descriptor))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lock_and_copy)
        with try_lock(tmp_path), pytest.raises(BlockingIOError), try_lock(tmp_path):
            pass
    with try_lock(tmp_path):
        pass
    for copy in copies:
        os.close(copy)
