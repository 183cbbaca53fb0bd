"""Runs all ranks of an engine except rank 0, each in a process of its own. Each rank computes a part of one model."""

import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import cast

from nanovllm_core.anonymous_memory import AnonymousMemory
from nanovllm_core.cache.host_memory import CopyBatch
from nanovllm_core.config import ResolvedConfig
from nanovllm_core.engine import progress_bars
from nanovllm_core.engine.parent_watch import FAILURE_EXIT_CODE, exit_with_parent
from nanovllm_core.engine.private_directory import RANKS_PREFIX
from nanovllm_core.errors import ConfigError, EngineDeadError
from nanovllm_core.execution.entry_copier import EntryCopier, make_copier
from nanovllm_core.execution.plan_messages import STOP_MESSAGE, PlanDecoder, PlanPublisher
from nanovllm_core.execution.runner import Runner, start_runner
from nanovllm_core.model import ModelSpec
from nanovllm_core.parallel.group import RankGroup
from nanovllm_core.parallel.plan_ring import PlanRing
from nanovllm_core.stop_signals import ignore_stop_signals
from nanovllm_kernels.openmp_spinning import SpinControl, can_shorten_spins

# `RankProcesses.close` waits this long for ranks to exit after `stop`.
STOP_TIMEOUT_S = 5.0
# If a rank other than rank 0 ends, a running engine waits this long for the thread of rank 0.
FAILED_RANK_TIMEOUT_S = 1.0
# A start that fails waits this long for the thread of rank 0. On a GPU, the thread may wait for another rank for ever.
FAILED_START_TIMEOUT_S = 5.0
# Time for which rank 0 waits, after an error, for the report of a failed rank that may have caused the error.
REPORT_TIMEOUT_S = 4.0
# Rank 0 checks this often whether the other ranks run.
START_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a rank has failed. is_config_error: whether a setting or the checkpoint caused the failure."""

    rank: int
    message: str
    is_config_error: bool

    def to_error(self) -> Exception:
        """The exception for callers of the engine."""
        if self.is_config_error:
            return ConfigError(self.message)
        return EngineDeadError(f"rank {self.rank} {self.message}")


@dataclass(frozen=True, slots=True)
class RankArguments:
    """The arguments of a rank's process.

    rendezvous: file through which the ranks find each other.
    report_pipe: write end of a pipe. Before the process ends, it sends a `RankFailure`, or None after a stop message.
    host_memory: memory for the cache entries of all ranks; None without offloading.
    """

    spec: ModelSpec
    config: ResolvedConfig
    rank: int
    rendezvous: Path
    ring: PlanRing
    report_pipe: Connection
    host_memory: AnonymousMemory | None


class RankProcesses:
    """The processes of ranks 1, 2, ... of an engine, started and watched by the process of rank 0."""

    def __init__(
        self,
        spec: ModelSpec,
        config: ResolvedConfig,
        host_memory: AnonymousMemory | None,
        parent_directory: Path | None = None,
    ):
        """Start the processes. parent_directory: place of their temporary directory; None for the system's."""
        # Only this user may enter the directory.
        self._directory = tempfile.TemporaryDirectory(prefix=RANKS_PREFIX, dir=parent_directory)
        self._config = config
        self._rendezvous = Path(self._directory.name) / "rendezvous"
        num_other_ranks = config.tensor_parallel_size - 1
        self._ring = PlanRing(num_other_ranks)
        self._failure: RankFailure | None = None
        self._failure_event = threading.Event()
        self._is_stop_sent = self._is_closing = False
        self._on_failure: Callable[[], object] | None = None
        self._group: RankGroup | None = None
        # Held while rank 0 joins the other ranks.
        self._join_lock = threading.Lock()
        self._runner: Runner | None = None
        _allow_child_processes()
        self._processes: list[SpawnProcess] = []
        self._report_pipes: list[Connection] = []
        try:
            for rank in range(1, num_other_ranks + 1):
                self._start_process(spec, rank, host_memory)
        except BaseException:
            # The ranks that have started would wait for the others.
            self.close()
            raise
        threading.Thread(target=self._watch, name="nanovllm-ranks", daemon=True).start()

    def _start_process(self, spec: ModelSpec, rank: int, host_memory: AnonymousMemory | None) -> None:
        context = multiprocessing.get_context("spawn")
        read_end, write_end = context.Pipe(duplex=False)
        arguments = RankArguments(spec, self._config, rank, self._rendezvous, self._ring, write_end, host_memory)
        process = context.Process(target=run_rank, args=(arguments,), name=f"nanovllm-rank-{rank}", daemon=True)
        with write_end:
            process.start()
        # A program may exit without `close`. multiprocessing would then wait for ever: the rank ignores SIGTERM.
        Finalize(self, process.kill, exitpriority=0)
        self._processes.append(process)
        self._report_pipes.append(read_end)

    def start_rank_0(self, spec: ModelSpec) -> Runner:
        """Join the other ranks as rank 0 and start the runner.

        Raises the exceptions of `start_runner`, and the failure of a rank that fails before it joins.
        """
        with self._join_lock:
            self._wait_for_processes()
            self._group = RankGroup(0, self._config, self._rendezvous)
        try:
            runner = start_runner(spec, self._config, self._group.context)
        except BaseException:
            self.abandon()
            raise
        # All ranks have connected. Remove the directory now, because it would remain if this process were killed.
        self._directory.cleanup()
        runner.plan_publisher = PlanPublisher(self._ring.open_writer(self.check))
        self._runner = runner
        return runner

    def stop(self) -> None:
        """Tell the other ranks to end, and leave the group. Call on the thread of rank 0, after its last step."""
        if self._runner is not None and self._group is not None:
            self._is_stop_sent = True
            if self._runner.plan_publisher is not None:
                self._runner.plan_publisher.stop()
            self._runner.release_graphs()
            self._group.leave()
            self._group = None

    def abandon(self) -> None:
        """Leave the group after a failure, without waiting for other ranks. Call on the thread of rank 0."""
        if self._group is not None:
            self._group.abandon()
            self._group = None

    def check(self) -> None:
        """Raise the exception of `RankFailure.to_error` if a rank has failed."""
        if self._failure is not None:
            raise self._failure.to_error()

    def wait_for_failure(self) -> None:
        """Wait briefly for a failure, and raise its error. Call after an error that a failed rank may have caused."""
        self._failure_event.wait(REPORT_TIMEOUT_S)
        self.check()

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed, or has ended without a report."""
        return self._failure is not None

    def set_failure_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` on another thread when a rank fails, and now if a rank has already failed (maybe both)."""
        self._on_failure = callback
        if self._failure_event.is_set():
            callback()

    def close(self) -> None:
        """End the processes, by force if they do not end by themselves after `stop`. Remove the directory."""
        self._is_closing = True
        # If another rank were killed while rank 0 connects to it, the thread of rank 0 would wait for two hours.
        # A rank that has failed had already connected, or never will: waiting would not help.
        if not self.has_failed and self._join_lock.acquire(timeout=FAILED_START_TIMEOUT_S):
            self._join_lock.release()
        deadline_s = time.monotonic() + (STOP_TIMEOUT_S if self._is_stop_sent else 0.0)
        for process in self._processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._directory.cleanup()

    def _wait_for_processes(self) -> None:
        """Wait until the other ranks are about to join. If a rank had ended, joining would block this thread."""
        for rank in range(1, len(self._processes) + 1):
            while not _start_marker(self._rendezvous, rank).exists():
                self.check()
                if self._is_closing:
                    raise EngineDeadError("the engine was stopped while it was starting")
                time.sleep(START_POLL_S)

    def _watch(self) -> None:
        """Receive the reports of all ranks, and record the first failure."""
        rank_by_pipe = {pipe: rank for rank, pipe in enumerate(self._report_pipes, 1)}
        while rank_by_pipe:
            for pipe in cast(list[Connection], connection.wait(list(rank_by_pipe))):
                failure = self._receive_report(rank_by_pipe.pop(pipe), pipe)
                if failure is None or self._is_closing or self.has_failed:
                    continue
                self._failure = failure
                self._failure_event.set()
                if (callback := self._on_failure) is not None:
                    callback()

    def _receive_report(self, rank: int, pipe: Connection) -> RankFailure | None:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            # The process ended before or while it sent its report.
            process = self._processes[rank - 1]
            process.join()
            return RankFailure(rank, f"has ended (exit code {process.exitcode})", is_config_error=False)


def _start_marker(rendezvous: Path, rank: int) -> Path:
    """The file that a rank creates just before it joins the others."""
    return rendezvous.with_name(f"rank-{rank}-runs")


def run_rank(arguments: RankArguments) -> None:
    """Launch the steps that rank 0 plans, until rank 0 sends a stop message or the process of rank 0 ends."""
    ignore_stop_signals()
    exit_with_parent()
    progress_bars.use_thread_lock()
    # Progress bars are shown only on a terminal. Rank 0 shows them.
    sys.stderr.isatty = lambda: False
    failure = _build_and_follow(arguments)
    arguments.report_pipe.send(failure)
    exit_code = 0 if failure is None else FAILURE_EXIT_CODE
    if arguments.config.device == "cuda":
        # A normal exit could wait for NCCL's threads.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def _build_and_follow(arguments: RankArguments) -> RankFailure | None:
    """Join the ranks, build the model and follow rank 0 until the stop message. Returns the failure, if any."""
    has_started = False
    try:
        spin_control = SpinControl(is_on=arguments.config.device == "cpu" and can_shorten_spins())
        _start_marker(arguments.rendezvous, arguments.rank).touch()
        group = RankGroup(arguments.rank, arguments.config, arguments.rendezvous)
        runner = start_runner(arguments.spec, arguments.config, group.context)
        copier = make_copier(runner.cache, arguments.config, arguments.host_memory, group.context)
        has_started = True
        follow_plans(runner, copier, arguments)
        if copier is not None:
            copier.close()
        runner.release_graphs()
        group.leave()
        spin_control.close()
    except Exception as error:  # noqa: BLE001 (rank 0 raises the error)
        if isinstance(error, ValueError) and not has_started:
            # The caller gets this error, so a traceback would not add anything.
            return RankFailure(arguments.rank, _join_lines(str(error)), is_config_error=True)
        traceback.print_exc()
        message = _join_lines(f"failed: {type(error).__name__}: {error}")
        return RankFailure(arguments.rank, message, is_config_error=False)
    return None


def _join_lines(message: str) -> str:
    return " ".join(message.split())


def follow_plans(runner: Runner, copier: EntryCopier | None, arguments: RankArguments) -> None:
    """Launch the steps and copies that rank 0 plans, until rank 0 sends a stop message."""
    # On a GPU the reader spins, so that the rank launches steps without delay. On a CPU the ranks need all cores.
    reader = arguments.ring.open_reader(arguments.rank - 1, spins=runner.is_asynchronous)
    decoder = PlanDecoder()
    while (payload := reader.read()) != STOP_MESSAGE:
        message = decoder.decode(payload)
        if not isinstance(message, CopyBatch):
            runner.launch(*message)
        elif copier is not None:
            copier.launch(message)


def _allow_child_processes() -> None:
    """Let this process start processes even if it is daemonic, as an engine's process is.

    multiprocessing forbids this because the child processes could outlive their parent. Ranks end with their parent.
    """
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # noqa: SLF001
