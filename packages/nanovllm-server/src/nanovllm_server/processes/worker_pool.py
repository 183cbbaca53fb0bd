"""The pool of processes that serve HTTP, as the parent sees it: starts workers, sends orders, replaces dead ones."""

import asyncio
import multiprocessing
from multiprocessing.util import Finalize

from nanovllm_server.observability.logs import get_logger
from nanovllm_server.processes.worker_main import run_worker
from nanovllm_server.processes.worker_protocol import Order, Report, StartFailure, WorkerArguments
from nanovllm_server.settings import SettingsError


class WorkerProcess:
    """One worker's process.

    ready: future, done when the worker is ready; it fails when the worker can't start.
    drained: future, done when the worker's last request has ended after the order "drain".
    gone: future, done with the exit code when the process has ended.
    """

    def __init__(self, arguments: WorkerArguments):
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(
            target=run_worker, args=(arguments, child_pipe), name=f"nanovllm-http-{arguments.index}", daemon=True
        )
        with child_pipe:
            self._process.start()
        # Kills the worker whenever this process exits, which would otherwise wait for it.
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
        """Send `order` to the worker, unless it has ended."""
        if not self.gone.done():
            try:
                self._pipe.send(order)
            except BrokenPipeError:
                self._on_end()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def _on_report(self) -> None:
        try:
            report: Report | StartFailure = self._pipe.recv()
        except (EOFError, OSError):
            self._on_end()
            return
        match report:
            case "ready":
                self.ready.set_result(None)
            case "drained":
                self.drained.set_result(None)
            case StartFailure(message, expected):
                self.ready.set_exception((SettingsError if expected else RuntimeError)(message))

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()
        # A worker that closed its end of the pipe has ended or is about to end.
        self._process.kill()
        self._process.join()
        self._at_exit.cancel()
        code = self._process.exitcode
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(f"an HTTP worker died while it was starting (exit code {code})"))
        self.gone.set_result(code)


class WorkerPool:
    """All workers of a server. A worker that dies once it serves is replaced; only its own requests fail.

    failed: future, which fails when a replacement can't start; the pool can't be used then.
    """

    def __init__(self, arguments: list[WorkerArguments]):
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arguments = arguments
        self._workers = [WorkerProcess(each) for each in arguments]
        self._replacers: list[asyncio.Task[None]] = []
        self._logger = get_logger("nanovllm")

    async def ready(self) -> None:
        """Wait until all workers are ready. Raises SettingsError or RuntimeError when one can't start."""
        await asyncio.gather(*(worker.ready for worker in self._workers))

    def open(self) -> None:
        """Let all workers serve, and from now on replace those that die."""
        for index, worker in enumerate(self._workers):
            worker.order("open")
            self._replacers.append(asyncio.create_task(self._replace_when_dead(index)))

    async def drain(self) -> None:
        """Refuse new requests, and wait until the running ones have ended."""
        self._stop_replacing()
        for worker in self._workers:
            worker.order("drain")
        for worker in self._workers:
            await asyncio.wait((worker.drained, worker.gone), return_when=asyncio.FIRST_COMPLETED)

    async def close(self, seconds: float) -> None:
        """End all workers; kill those that take longer than `seconds`."""
        self._stop_replacing()
        for worker in self._workers:
            worker.order("close")
        await asyncio.wait([worker.gone for worker in self._workers], timeout=seconds)
        self.kill()

    def kill(self) -> None:
        """Kill all workers."""
        self._stop_replacing()
        for worker in self._workers:
            worker.kill()

    async def _replace_when_dead(self, index: int) -> None:
        try:
            while True:
                # `wait` instead of `await`, which would cancel the future if this task is cancelled.
                await asyncio.wait((self._workers[index].gone,))
                code = self._workers[index].gone.result()
                self._logger.error("HTTP worker died", worker=index, exit_code=code)
                worker = self._workers[index] = WorkerProcess(self._arguments[index])
                await asyncio.wait((worker.ready,))
                worker.ready.result()
                worker.order("open")
        except (SettingsError, RuntimeError) as error:
            self.failed.set_exception(error)

    def _stop_replacing(self) -> None:
        for replacer in self._replacers:
            replacer.cancel()
        self._replacers.clear()
