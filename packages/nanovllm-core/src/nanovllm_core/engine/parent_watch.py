"""Ends a process when the process that started it has ended."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

EXIT_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
FAILURE_EXIT_CODE = 1  # exit code of a process that failed, or whose parent has ended


def exit_with_parent(clean_up: Callable[[], None] | None = None) -> threading.Event:
    """Start a thread that ends this process when the parent process has ended, even if the main thread is busy.

    clean_up: called before the process ends.
    Returns an event that the caller may set. If the event is set when the parent ends, the main thread has
    `EXIT_GRACE_S` seconds to exit by itself.
    """
    graceful_exit_event = threading.Event()
    parent = multiprocessing.parent_process()
    if parent is None:
        return graceful_exit_event
    if sys.platform == "linux":
        # When the parent ends, the kernel continues this process, which may have been stopped (SIGSTOP).
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)

    def exit_after_parent() -> None:
        parent.join()
        if clean_up is not None:
            clean_up()
        if graceful_exit_event.is_set():
            time.sleep(EXIT_GRACE_S)
        os._exit(FAILURE_EXIT_CODE)

    threading.Thread(target=exit_after_parent, name="nanovllm-parent", daemon=True).start()
    return graceful_exit_event


def has_parent_ended() -> bool:
    """Whether the parent process has ended."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()
