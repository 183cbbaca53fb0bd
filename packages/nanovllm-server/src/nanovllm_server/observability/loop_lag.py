"""Measures the lag of an event loop: how late the loop runs tasks."""

import asyncio
import time
from collections.abc import Callable

LAG_INTERVAL_S = 0.25  # time between measurements


async def measure_loop_lag(observe: Callable[[float], None]) -> None:
    """Calls `observe` four times a second, with the seconds by which this task woke up too late."""
    while True:
        planned_wake_s = time.monotonic() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        observe(max(time.monotonic() - planned_wake_s, 0.0))
