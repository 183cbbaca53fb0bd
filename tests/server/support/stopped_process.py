"""Stops processes for a while, so that tests don't depend on their speed."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def stop_process(pid: int) -> Iterator[None]:
    """Stops the process until the context ends."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
