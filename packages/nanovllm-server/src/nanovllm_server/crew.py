"""The processes that serve HTTP, seen from the one that starts them: orders, reports, and a new one for one lost.

Imports nothing that only a worker needs. This room must not know HTTP, nor what a worker does with its orders.
"""

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
from ctypes import Array, c_double
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Literal

from nanovllm_core import EngineAddress
from nanovllm_core.engine.parent import exit_with_parent
from nanovllm_server.observability.logs import configure_logs, get_logger
from nanovllm_server.protocol.request import SamplingDefaults
from nanovllm_server.rings import RingMemory
from nanovllm_server.settings import Settings, SettingsError

# open: begin to serve. drain: let nobody in any more, report when all have left, but go on answering. close: end.
Order = Literal["open", "drain", "close"]
Report = Literal["ready", "drained"]


# Of malloc.h.
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
LARGE_BLOCK = 1 << 20
# Threads that encode texts, and heaps of a worker. On two cores four threads take 41 ms for 32,000 tokens, in 80
# messages, with one heap and 24 ms with four.
NUM_ENCODING_THREADS = 4


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker can't start. expected: the message alone tells the user what to do."""

    message: str
    expected: bool


@dataclass(frozen=True, slots=True)
class Assignment:
    """All that a worker is given. It travels as an argument of a process, by which sockets and pipes are inherited.

    index: its row in `numbers` and its ring in `rings`. rings: carry what workers have encoded; None for one worker.
    model, template, defaults: where the tokenizer is, the chat template to use instead of its own, and the sampling
    that the model advises.
    """

    index: int
    settings: Settings
    model: Path
    template: str | None
    defaults: SamplingDefaults
    engine: EngineAddress
    listener: socket.socket
    numbers: "Array[c_double]"
    rings: RingMemory | None


def work(assignment: Assignment, orders: Connection) -> None:
    """What runs in a worker's process."""
    # They reach the whole foreground group or service; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logs(assignment.settings.log_format, assignment.settings.log_level)
    give_memory_back()
    # Read by the tokenizer's thread pool when it starts.
    os.environ.setdefault("RAYON_NUM_THREADS", str(NUM_ENCODING_THREADS))
    # Before the imports and the tokenizer, which take seconds; see `exit_with_parent`.
    serving = exit_with_parent()
    # Only here: the web framework and the tokenizer.
    import uvloop

    from nanovllm_server.worker import run

    # The parent is gone, and with it the reason to be.
    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(run(assignment, orders, serving))


def give_memory_back() -> None:
    """Have glibc keep few heaps, not one per thread, and no large blocks in them: bodies of megabytes leave no holes.

    Where there is another allocator, this does nothing.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_ARENA_MAX, NUM_ENCODING_THREADS)
            mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


class Worker:
    """A worker's process. `ready`, `drained` and `gone` are done when it is; `ready` fails when it can't start."""

    def __init__(self, assignment: Assignment):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=work, args=(assignment, theirs), name=f"nanovllm-http-{assignment.index}", daemon=True
        )
        with theirs:
            self._process.start()
        # However this process ends: it would wait for its children.
        self._at_exit = Finalize(None, self._process.kill, exitpriority=0)
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.drained: asyncio.Future[None] = self._loop.create_future()
        self.gone: asyncio.Future[int | None] = self._loop.create_future()
        self._loop.add_reader(self._pipe.fileno(), self._on_report)

    @property
    def pid(self) -> int | None:
        """The process's id."""
        return self._process.pid

    def order(self, order: Order) -> None:
        """Tell the worker something, if it is still there."""
        if not self.gone.done():
            try:
                self._pipe.send(order)
            except BrokenPipeError:
                self._on_end()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def _on_report(self) -> None:
        try:
            report: Report | Failed = self._pipe.recv()
        except (EOFError, OSError):
            self._on_end()
            return
        match report:
            case "ready":
                self.ready.set_result(None)
            case "drained":
                self.drained.set_result(None)
            case Failed(message, expected):
                self.ready.set_exception((SettingsError if expected else RuntimeError)(message))

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()
        # What closed its end of the pipe has ended, or is about to.
        self._process.kill()
        self._process.join()
        self._at_exit.cancel()
        code = self._process.exitcode
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(f"an HTTP worker died while it was starting (exit code {code})"))
        self.gone.set_result(code)


class Crew:
    """All workers. One that dies after it was ready is replaced: what it was at is lost, and nothing else.

    failed: done, with the reason, when a replacement can't start; the crew is of no more use then.
    """

    def __init__(self, assignments: list[Assignment]):
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._assignments = assignments
        self._workers = [Worker(assignment) for assignment in assignments]
        self._keepers: list[asyncio.Task[None]] = []
        self._logger = get_logger("nanovllm")

    async def ready(self) -> None:
        """Wait until all are. Raises SettingsError or RuntimeError when one can't start."""
        await asyncio.gather(*(worker.ready for worker in self._workers))

    def open(self) -> None:
        """Let all serve, and keep it so."""
        for index, worker in enumerate(self._workers):
            worker.order("open")
            self._keepers.append(asyncio.create_task(self._keep(index)))

    async def drain(self) -> None:
        """Let nobody in any more, and wait until everybody has left."""
        self._stop_keeping()
        for worker in self._workers:
            worker.order("drain")
        for worker in self._workers:
            await asyncio.wait((worker.drained, worker.gone), return_when=asyncio.FIRST_COMPLETED)

    async def close(self, seconds: float) -> None:
        """End all, by force those that take longer than `seconds`."""
        self._stop_keeping()
        for worker in self._workers:
            worker.order("close")
        await asyncio.wait([worker.gone for worker in self._workers], timeout=seconds)
        self.kill()

    def kill(self) -> None:
        """End all now."""
        self._stop_keeping()
        for worker in self._workers:
            worker.kill()

    async def _keep(self, index: int) -> None:
        try:
            while True:
                # Waited for, not awaited: that would cancel them when this task is.
                await asyncio.wait((self._workers[index].gone,))
                code = self._workers[index].gone.result()
                self._logger.error("HTTP worker died", worker=index, exit_code=code)
                worker = self._workers[index] = Worker(self._assignments[index])
                await asyncio.wait((worker.ready,))
                worker.ready.result()
                worker.order("open")
        except (SettingsError, RuntimeError) as error:
            self.failed.set_exception(error)

    def _stop_keeping(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        self._keepers.clear()
