"""Ends the thread of an engine's loop, and the processes of the other ranks."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from nanovllm_core.engine.ranks import FAILED_RANK_TIMEOUT_S, RankProcesses


async def raise_cause(steps_future: "asyncio.Future[None]", ranks: RankProcesses | None) -> None:
    """Raise the exception that ended the thread. If a rank's process failed, raise that rank's failure instead."""
    try:
        await steps_future
    except Exception:
        if ranks is not None:
            await asyncio.to_thread(ranks.wait_for_failure)
        raise


async def end_thread(
    steps_future: "asyncio.Future[None]", executor: ThreadPoolExecutor, ranks: RankProcesses | None, *, is_hanging: bool
) -> None:
    """End the thread and the other ranks.

    If a step hangs or a rank has failed, do not wait long for the thread: on a GPU, it may never end.
    """
    timeout_s = None
    if is_hanging or (ranks is not None and ranks.has_failed):
        timeout_s = FAILED_RANK_TIMEOUT_S
        await _close_ranks(ranks)
    await asyncio.wait([steps_future], timeout=timeout_s)
    executor.shutdown(wait=steps_future.done())
    await _close_ranks(ranks)


async def _close_ranks(ranks: RankProcesses | None) -> None:
    if ranks is not None:
        await asyncio.to_thread(ranks.close)
