"""A process that must not outlive the process that started it."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable

# Seconds that a process has to end by itself once it serves: it may have files to write out.
GRACE_S = 5.0
EXIT_CODE = 1


def exit_with_parent(clean_up: Callable[[], None] | None = None) -> threading.Event:
    """End this process once its parent is gone, on a thread, so that a busy main thread makes no difference.

    clean_up: called first. The process ends at once, or, after the returned event was set, `GRACE_S` later: then the
    main thread is expected to end the process itself. Does nothing in a process without a parent.
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
    """Whether the process that started this one has ended."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()
