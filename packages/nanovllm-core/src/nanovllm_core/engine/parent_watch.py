"""Ends a process when the process that started it has ended."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable

# Time limit for a serving process to exit by itself, for example after writing files.
GRACE_S = 5.0
EXIT_CODE = 1


def exit_with_parent(clean_up: Callable[[], None] | None = None) -> threading.Event:
    """Start a thread that ends this process when its parent has ended, even if the main thread is busy.

    clean_up: called before the process ends.
    Returns an event. If the caller sets it, the main thread gets `GRACE_S` seconds to exit after the parent has ended.
    Without a parent process this function does nothing.
    """
    ends_itself = threading.Event()
    parent = multiprocessing.parent_process()
    if parent is None:
        return ends_itself

    def watch() -> None:
        parent.join()
        if clean_up is not None:
            clean_up()
        if ends_itself.is_set():
            time.sleep(GRACE_S)
        os._exit(EXIT_CODE)

    threading.Thread(target=watch, name="nanovllm-parent", daemon=True).start()
    return ends_itself


def parent_is_gone() -> bool:
    """Whether the parent process has ended."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()
