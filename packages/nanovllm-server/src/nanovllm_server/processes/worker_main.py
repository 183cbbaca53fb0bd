"""The main function of a worker's process. Slow imports are in `run_worker`, because the parent imports this module."""

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
# malloc allocates larger blocks outside of its heaps.
MAX_HEAP_BLOCK_BYTES = 1 << 20
# Number of tokenizer threads and of malloc heaps. With a single heap, encoding takes almost twice as long.
NUM_ENCODING_THREADS = 4


def run_worker(arguments: WorkerArguments, pipe: Connection) -> None:
    """Runs a worker until the parent orders the end or dies."""
    # Terminals send these signals to all processes, but only the parent decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logs(arguments.settings.log_format, arguments.settings.log_level)
    return_freed_memory()
    # The tokenizer's thread pool reads this variable when the pool starts.
    os.environ.setdefault("RAYON_NUM_THREADS", str(NUM_ENCODING_THREADS))
    # Call this before the slow imports, because the parent may die during them.
    exits_gracefully = exit_with_parent()
    import uvloop

    from nanovllm_server.processes.worker import run

    # The worker cancels itself when the parent has ended.
    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(run(arguments, pipe, exits_gracefully))


def return_freed_memory() -> None:
    """Makes glibc return more freed memory to the system: few heaps, and large blocks outside of the heaps."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_ARENA_MAX, NUM_ENCODING_THREADS)
            mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES)
