"""The main function of a worker's process. Imports what a worker needs only when it runs: the parent imports it too."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

from nanovllm_core.engine.parent import exit_with_parent
from nanovllm_server.observability.logs import configure_logs
from nanovllm_server.processes.worker_protocol import WorkerArguments

# Of malloc.h.
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
LARGE_BLOCK = 1 << 20
# Threads that encode texts, and heaps of a worker. On two cores four threads take 41 ms for 32,000 tokens, in 80
# messages, with one heap and 24 ms with four.
NUM_ENCODING_THREADS = 4


def run_worker(arguments: WorkerArguments, pipe: Connection) -> None:
    """Run a worker until the parent closes it or ends. pipe: to the parent."""
    # They reach the whole foreground group or service; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logs(arguments.settings.log_format, arguments.settings.log_level)
    give_memory_back()
    # Read by the tokenizer's thread pool when it starts.
    os.environ.setdefault("RAYON_NUM_THREADS", str(NUM_ENCODING_THREADS))
    # Before the imports and the tokenizer, which take seconds; see `exit_with_parent`.
    serving = exit_with_parent()
    # Only here: the web framework and the tokenizer.
    import uvloop

    from nanovllm_server.processes.worker import run

    # The worker's task is cancelled when the parent has ended.
    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(run(arguments, pipe, serving))


def give_memory_back() -> None:
    """Have glibc keep few heaps, not one per thread, and no large blocks in them: bodies of megabytes leave no holes.

    Where there is another allocator, this does nothing.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_ARENA_MAX, NUM_ENCODING_THREADS)
            mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
