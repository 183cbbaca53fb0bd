"""Shortens the spinning of torch's threads at barriers while other processes need the cores.

GCC's OpenMP runtime spins for milliseconds at each barrier. If another process uses a core, one of torch's threads may
reach a barrier one time slice late. The other threads spin until then. A decode step has hundreds of barriers.
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
from pathlib import Path

import torch

SAMPLE_INTERVAL_S = 0.2
# Spins become short if other processes use more than this number of the cores that torch's threads need.
MIN_MISSING_CORES_TO_SHORTEN = 0.4
# Spins become long again if other processes use less than this number of these cores.
MAX_MISSING_CORES_TO_LENGTHEN = 0.2
# Environment variables by which a user chooses how threads wait.
WAIT_POLICY_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
PROC_STAT = Path("/proc/stat")


def can_shorten_spins() -> bool:
    """Whether this process's threads spin at barriers, and the user has not chosen how threads wait."""
    return (
        sys.platform == "linux"
        and torch.get_num_threads() > 1
        and not any(name in os.environ for name in WAIT_POLICY_VARIABLES)
        and hasattr(ctypes.CDLL(None), "GOMP_parallel")
        and PROC_STAT.exists()
    )


class ShortSpins(contextlib.AbstractContextManager["ShortSpins"]):
    """Limits spinning to microseconds per barrier, from construction until `__exit__`. Threads that wait longer sleep.

    GCC's runtime spins briefly if it has more threads than the process has cores (GCC's manual, GOMP_SPINCOUNT). This
    object makes the runtime start additional threads, which sleep until `__exit__`.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._hold_additional_threads, name="nanovllm-spins", daemon=True)
        self._thread.start()
        self._has_started.wait()

    def __exit__(self, *_: object) -> None:
        # When `_thread` ends, the runtime ends the additional threads.
        self._stop.set()
        self._thread.join()

    def _hold_additional_threads(self) -> None:
        library = ctypes.CDLL(None)
        num_additional_threads = len(os.sched_getaffinity(0)) - torch.get_num_threads() + 1
        # The runtime requires a function to call. The call is free(NULL), which does nothing.
        no_op = ctypes.cast(library.free, ctypes.c_void_p)
        library.GOMP_parallel(no_op, None, ctypes.c_uint(max(num_additional_threads, 1) + 1), ctypes.c_uint(0))
        self._has_started.set()
        self._stop.wait()


class SpinControl:
    """Shortens spinning while other processes need the cores, from construction until `close`.

    A thread samples the use of the cores even during a step, because one step with long spins can take seconds.
    is_on: if False, nothing is sampled and spinning never changes.
    """

    def __init__(self, *, is_on: bool = True) -> None:
        self._short_spins: ShortSpins | None = None
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        if is_on:
            self._watcher = threading.Thread(target=self._watch, name="nanovllm-spin-control", daemon=True)
            self._watcher.start()

    @property
    def is_short(self) -> bool:
        """Whether threads currently spin for microseconds only."""
        return self._short_spins is not None

    def _watch(self) -> None:
        previous = _sample_cpu_use()
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            current = _sample_cpu_use()
            window_s, other_processes_s = (later - earlier for later, earlier in zip(current, previous, strict=True))
            previous = current
            self.adapt(other_processes_s / window_s)

    def adapt(self, num_other_busy_cores: float) -> None:
        """Shorten or restore spinning. num_other_busy_cores: number of cores that other processes use."""
        num_missing_cores = num_other_busy_cores - (len(os.sched_getaffinity(0)) - torch.get_num_threads())
        if self._short_spins is None and num_missing_cores > MIN_MISSING_CORES_TO_SHORTEN:
            self._short_spins = ShortSpins()
        elif self._short_spins is not None and num_missing_cores < MAX_MISSING_CORES_TO_LENGTHEN:
            self._restore_long_spins()

    def close(self) -> None:
        """Stop sampling and restore the runtime's spinning."""
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
        self._restore_long_spins()

    def _restore_long_spins(self) -> None:
        if self._short_spins is not None:
            self._short_spins.__exit__()
            self._short_spins = None


def _sample_cpu_use() -> tuple[float, float]:
    """Return the current time and the CPU time of other processes on this process's cores, in seconds."""
    return time.monotonic(), _read_busy_seconds() - time.process_time()


def _read_busy_seconds() -> float:
    """Return the seconds for which this process's cores have been busy."""
    # Low-priority processes hardly delay a process with normal priority. The time of low-priority processes therefore
    # counts only if this process has low priority too.
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    counts_low_priority = os.getpriority(os.PRIO_PROCESS, 0) > 0
    ticks = 0
    for line in PROC_STAT.read_text().splitlines():
        core_name, *fields = line.split()
        if core_name in cores:
            user, low_priority, system, _idle, _waiting, interrupts, soft_interrupts = map(int, fields[:7])
            ticks += user + system + interrupts + soft_interrupts + (low_priority if counts_low_priority else 0)
    return ticks / os.sysconf("SC_CLK_TCK")
