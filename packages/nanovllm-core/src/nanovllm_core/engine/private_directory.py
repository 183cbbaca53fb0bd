"""The private directory of an engine's process. It holds a socket and, while several ranks start, their directory."""

import contextlib
import shutil
from pathlib import Path

RANKS_PREFIX = "nanovllm-ranks-"  # prefix of the name of the ranks' directory


def find_private_directory(endpoint: str) -> Path:
    """Return the directory of the socket of a ZeroMQ endpoint."""
    return _find_socket(endpoint).parent


def remove_private_directory(endpoint: str) -> None:
    """Remove the endpoint's socket and the ranks' directory. Then remove the private directory, if it is empty."""
    socket, directory = _find_socket(endpoint), find_private_directory(endpoint)
    # Another thread or a rank may create a file during the removal. The second attempt removes this file.
    for _ in range(2):
        with contextlib.suppress(OSError):
            socket.unlink(missing_ok=True)
            for ranks_directory in directory.glob(f"{RANKS_PREFIX}*"):
                shutil.rmtree(ranks_directory)
            directory.rmdir()


def _find_socket(endpoint: str) -> Path:
    return Path(endpoint.removeprefix("ipc://"))
