"""Measures how late an event loop runs its tasks."""

import asyncio
import time
from collections.abc import Callable

LAG_INTERVAL_S = 0.25


async def measure_loop_lag(observe: Callable[[float], None]) -> None:
    """Calls `observe` four times a second with the seconds by which the event loop resumed this task too late."""
    while True:
        planned = time.monotonic() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        observe(max(time.monotonic() - planned, 0.0))
