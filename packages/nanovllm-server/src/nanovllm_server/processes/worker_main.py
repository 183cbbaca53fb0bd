"""The main function of a worker's process. Slow imports are in `run_worker`, because the parent imports this module."""

import asyncio
import contextlib
import os
from multiprocessing.connection import Connection

from nanovllm_core.engine.parent_watch import exit_with_parent
from nanovllm_core.malloc_heaps import limit_malloc_heaps
from nanovllm_core.stop_signals import ignore_stop_signals
from nanovllm_server.observability.logs import configure_logs
from nanovllm_server.processes.worker_protocol import WorkerArguments

# Maximum size of memory blocks in malloc's heaps. malloc allocates larger blocks with mmap.
MAX_HEAP_BLOCK_BYTES = 1 << 20
# Number of tokenizer threads and of malloc heaps. With a single heap, encoding takes almost twice as long.
NUM_ENCODING_THREADS = 4


def run_worker(arguments: WorkerArguments, pipe: Connection) -> None:
    """Runs a worker until the parent orders the worker to close, or until the parent dies."""
    ignore_stop_signals()
    configure_logs(arguments.settings.log_format, arguments.settings.log_level)
    limit_malloc_heaps(NUM_ENCODING_THREADS, MAX_HEAP_BLOCK_BYTES)
    # The tokenizer's thread pool reads this variable when the pool starts.
    os.environ.setdefault("RAYON_NUM_THREADS", str(NUM_ENCODING_THREADS))
    # Call this before the slow imports, because the parent may die during them.
    graceful_exit_event = exit_with_parent()
    import uvloop

    from nanovllm_server.processes.worker import run

    # The worker cancels itself when the parent has ended.
    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(run(arguments, pipe, graceful_exit_event))
