"""Measures how late an event loop runs its tasks."""

import asyncio
import time
from collections.abc import Callable

LAG_INTERVAL_S = 0.25  # time between measurements


async def measure_loop_lag(observe: Callable[[float], None]) -> None:
    """Four times a second, calls `observe` with the delay in seconds of this task's wake-up."""
    while True:
        planned_wake_s = time.monotonic() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        observe(max(time.monotonic() - planned_wake_s, 0.0))
