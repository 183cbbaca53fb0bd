"""The main function of a worker's process, which imports heavy modules itself: the parent imports this module too."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

from nanovllm_core.engine.parent_watch import exit_with_parent
from nanovllm_server.observability.logs import configure_logs
from nanovllm_server.processes.worker_protocol import WorkerArguments

# Parameters of `mallopt`, from malloc.h.
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
# Larger blocks of memory are allocated outside of malloc's heaps.
MAX_HEAP_BLOCK_BYTES = 1 << 20
# Number of tokenizer threads and of malloc heaps. With one heap, encoding takes almost twice as long.
NUM_ENCODING_THREADS = 4


def run_worker(arguments: WorkerArguments, pipe: Connection) -> None:
    """Runs a worker until the parent closes the worker or ends. pipe: connection to the parent."""
    # A terminal or service manager sends these signals to all processes; the parent decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logs(arguments.settings.log_format, arguments.settings.log_level)
    return_freed_memory()
    # The tokenizer's thread pool reads this variable when the pool starts.
    os.environ.setdefault("RAYON_NUM_THREADS", str(NUM_ENCODING_THREADS))
    # Must precede the imports and the tokenizer, which take seconds; see `exit_with_parent`.
    is_ready = exit_with_parent()
    # These modules import the web framework and the tokenizer.
    import uvloop

    from nanovllm_server.processes.worker import run

    # The worker's task is cancelled when the parent has ended.
    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(run(arguments, pipe, is_ready))


def return_freed_memory() -> None:
    """Makes glibc use few heaps and allocate large blocks outside of heaps, so that freed memory returns to the system.

    Does nothing with another allocator.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_ARENA_MAX, NUM_ENCODING_THREADS)
            mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES)
