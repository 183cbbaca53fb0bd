"""Measures times without the share of the CPU that other programs take."""

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


async def measure_own_time(measure: Callable[[], Awaitable[float]]) -> float:
    """Returns the seconds from `measure`, reduced by the share of the CPU that other programs took.

    Other programs are all processes except this process and its descendants.
    """
    begin_s, begin_busy_s, begin_own_s = time.monotonic(), _read_busy_s(), _read_own_s()
    seconds = await measure()
    duration_s = time.monotonic() - begin_s
    other_s = (_read_busy_s() - begin_busy_s) - (_read_own_s() - begin_own_s)
    other_share = other_s / (duration_s * (os.cpu_count() or 1))
    return seconds * (1 - min(max(other_share, 0.0), 1.0))


def _read_busy_s() -> float:
    user, nice, system, _idle, _iowait, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    return _TICK_S * sum(map(int, (user, nice, system, irq, softirq, steal)))


def _read_own_s() -> float:
    pids, ticks = [os.getpid()], 0
    for pid in pids:
        try:
            # After the name in parentheses, the fields at 11 to 14 are utime, stime, cutime and cstime.
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
        # A process may end meanwhile. Its CPU time is then part of the parent's.
        except (FileNotFoundError, ProcessLookupError):
            continue
    return _TICK_S * ticks
