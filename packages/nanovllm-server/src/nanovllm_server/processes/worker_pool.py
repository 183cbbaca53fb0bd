"""Starts the workers' processes, sends them orders, and replaces workers that are dead or do not respond."""

import asyncio
import multiprocessing
from multiprocessing.util import Finalize

from nanovllm_server.observability.logs import get_logger
from nanovllm_server.processes.worker_main import run_worker
from nanovllm_server.processes.worker_protocol import StartFailure, WorkerArguments, WorkerOrder, WorkerReport
from nanovllm_server.settings import SettingsError

MAX_HEARTBEAT_INTERVAL_S = 1.0  # maximum time between two checks of a worker
# Maximum time from a replacement's start until the replacement can serve.
START_TIMEOUT_S = 120.0
# If a worker ran for at least this time before it died, the replacement starts without a delay.
STABLE_RUN_S = 60.0
FIRST_BACKOFF_S = 0.5  # delay of the first replacement; each further delay is twice the last, up to MAX_BACKOFF_S
MAX_BACKOFF_S = 30.0


class WorkerProcess:
    """One worker's process.

    is_open: whether the worker got the order "open". Until then, the worker does not follow other orders.
    has_answered: whether the worker's event loop has answered the last `ask_if_alive`.
    ready: done when the worker can serve; has an exception if the worker can't start.
    drained: done when the worker's last request has ended after the order "drain".
    exited: done when the process has ended; the result is the exit code.
    """

    def __init__(self, arguments: WorkerArguments):
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(
            target=run_worker, args=(arguments, child_pipe), name=f"nanovllm-http-{arguments.index}", daemon=True
        )
        with child_pipe:
            self._process.start()
        # Kills the worker when the parent exits. multiprocessing would otherwise wait for the worker.
        self._exit_finalizer = Finalize(None, self._process.kill, exitpriority=0)
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.drained: asyncio.Future[None] = self._loop.create_future()
        self.exited: asyncio.Future[int | None] = self._loop.create_future()
        self.is_open = False
        self.has_answered = True
        self._loop.add_reader(self._pipe.fileno(), self._on_report)

    def send_order(self, order: WorkerOrder) -> None:
        """Sends `order` to the worker, unless the worker has ended."""
        if not self.exited.done():
            try:
                self._pipe.send(order)
            except BrokenPipeError:
                self._on_exit()

    def open(self) -> None:
        """Lets the worker serve."""
        self.is_open = True
        self.send_order("open")

    def ask_if_alive(self) -> None:
        """Asks the worker's event loop to answer. Requires `has_answered`: unanswered orders may fill the pipe."""
        self.has_answered = False
        self.send_order("report_alive")

    def kill(self) -> None:
        """Kills the process."""
        self._process.kill()

    def _on_report(self) -> None:
        try:
            report: WorkerReport | StartFailure = self._pipe.recv()
        except (EOFError, OSError):
            self._on_exit()
            return
        match report:
            case "ready":
                self.ready.set_result(None)
            case "drained":
                self.drained.set_result(None)
            case "alive":
                self.has_answered = True
            case StartFailure(message, is_user_error):
                self.ready.set_exception((SettingsError if is_user_error else RuntimeError)(message))

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()
        # The worker has closed the pipe, and therefore has ended or is about to end.
        self._process.kill()
        self._process.join()
        self._exit_finalizer.cancel()
        exit_code = self._process.exitcode
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(f"an HTTP worker died while it was starting (exit code {exit_code})"))
        if not self.ready.cancelled():
            # asyncio logs an exception that nothing retrieves. While the server stops, nothing waits for `ready`.
            self.ready.exception()
        self.exited.set_result(exit_code)


class WorkerPool:
    """All workers of a server.

    timeout_s: a worker whose event loop does not respond for this time is killed and replaced.
    failed: gets an exception if a dead worker's replacement can't start, or is not ready within `START_TIMEOUT_S`.
    """

    def __init__(self, arguments: list[WorkerArguments], timeout_s: float):
        self._timeout_s = timeout_s
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arguments = arguments
        self._workers = [WorkerProcess(worker_arguments) for worker_arguments in arguments]
        self._replace_tasks: list[asyncio.Task[None]] = []
        self._logger = get_logger("nanovllm")

    async def wait_until_ready(self) -> None:
        """Waits until all workers are ready. Raises SettingsError or RuntimeError when a worker can't start."""
        await asyncio.gather(*(worker.ready for worker in self._workers))

    def open(self) -> None:
        """Lets all workers serve. Replaces workers that die or stop responding from now on."""
        for index, worker in enumerate(self._workers):
            worker.open()
            self._replace_tasks.append(asyncio.create_task(self._replace_when_dead(index)))

    async def drain(self) -> None:
        """Makes workers refuse new requests, and waits until the running requests have ended."""
        self._stop_replacing()
        for worker in self._workers:
            if worker.is_open:
                worker.send_order("drain")
            else:
                # A replacement that still starts has no requests.
                worker.kill()
        for worker in self._workers:
            await asyncio.wait((worker.drained, worker.exited), return_when=asyncio.FIRST_COMPLETED)

    async def close(self, timeout_s: float) -> None:
        """Ends all workers. Kills workers that take longer than `timeout_s`."""
        self._stop_replacing()
        for worker in self._workers:
            worker.send_order("close")
        await asyncio.wait([worker.exited for worker in self._workers], timeout=timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kills all workers."""
        self._stop_replacing()
        for worker in self._workers:
            worker.kill()

    async def _replace_when_dead(self, index: int) -> None:
        loop = asyncio.get_running_loop()
        backoff_s = 0.0
        try:
            while True:
                begin_s = loop.time()
                await self._watch(index)
                exit_code = self._workers[index].exited.result()
                backoff_s = 0.0 if loop.time() - begin_s >= STABLE_RUN_S else compute_replacement_delay_s(backoff_s)
                self._logger.error("HTTP worker died", worker=index, exit_code=exit_code, replaced_after_s=backoff_s)
                await asyncio.sleep(backoff_s)
                worker = self._workers[index] = WorkerProcess(self._arguments[index])
                await self._wait_for_replacement(index)
                worker.open()
        except (SettingsError, RuntimeError, OSError) as error:
            if not self.failed.done():
                self.failed.set_exception(error)

    async def _wait_for_replacement(self, index: int) -> None:
        """Waits until a worker is ready. Raises SettingsError or RuntimeError if the worker fails or is too slow."""
        worker = self._workers[index]
        # Unlike `await`, `wait` does not cancel the future when this task is cancelled.
        if not (await asyncio.wait((worker.ready,), timeout=START_TIMEOUT_S))[0]:
            worker.kill()
            # The kill sets an exception on `ready` that names only the exit code: raise a clearer exception.
            await asyncio.wait((worker.ready,))
            raise RuntimeError(f"the replacement of HTTP worker {index} was not ready after {START_TIMEOUT_S:g} s")
        worker.ready.result()

    async def _watch(self, index: int) -> None:
        """Waits until the worker has ended. Kills the worker if its event loop does not respond."""
        worker = self._workers[index]
        interval_s = min(MAX_HEARTBEAT_INTERVAL_S, self._timeout_s / 4)
        num_missed_intervals = 0
        worker.ask_if_alive()
        while not (await asyncio.wait((worker.exited,), timeout=interval_s))[0]:
            if worker.has_answered:
                num_missed_intervals = 0
                worker.ask_if_alive()
                continue
            # Count intervals instead of time: after a machine was suspended, its workers must not count as dead.
            num_missed_intervals += 1
            if num_missed_intervals * interval_s >= self._timeout_s:
                self._logger.error("HTTP worker does not respond", worker=index, seconds=self._timeout_s)
                worker.kill()
                await asyncio.wait((worker.exited,))
                return

    def _stop_replacing(self) -> None:
        for task in self._replace_tasks:
            task.cancel()
        self._replace_tasks.clear()


def compute_replacement_delay_s(last_backoff_s: float) -> float:
    """Returns the delay before replacing a worker that died early. last_backoff_s: the last delay; 0 if none."""
    return min(2 * last_backoff_s, MAX_BACKOFF_S) if last_backoff_s else FIRST_BACKOFF_S
