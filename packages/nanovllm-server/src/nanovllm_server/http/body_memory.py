"""Limits the memory of request bodies in a worker. Each request waits for memory before the server reads its body."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from nanovllm_server.protocol.error import unavailable

# Smaller bodies do not count toward the limit: small requests must not wait for large bodies that arrive slowly.
MIN_COUNTED_BYTES = 64 << 10
MAX_WAIT_S = 10.0  # A request that waits longer for memory is refused.


class BodyShare:
    """The part of a `BodyMemory` that one request holds."""

    def __init__(self, memory: "BodyMemory", num_bytes: int):
        self._memory = memory
        self._num_bytes = num_bytes

    def shrink(self, num_bytes: int) -> None:
        """Gives back all but `num_bytes`."""
        if num_bytes < self._num_bytes:
            self._memory.give_back(self._num_bytes - num_bytes)
            self._num_bytes = num_bytes


class BodyMemory:
    """Limits the bytes of bodies in this worker. Requests get memory in the order of arrival. Not thread-safe."""

    def __init__(self, num_bytes: int):
        self.num_free_bytes = num_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncGenerator[BodyShare]:
        """Holds `num_bytes` in an `async with` block. Raises ApiError (503) after waiting for `MAX_WAIT_S`."""
        if num_bytes < MIN_COUNTED_BYTES:
            num_bytes = 0
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await self._take(num_bytes)
        except TimeoutError as error:
            raise unavailable("too many large requests arrive at once: try again later", "body_memory_full") from error
        share = BodyShare(self, num_bytes)
        try:
            yield share
        finally:
            share.shrink(0)

    def give_back(self, num_bytes: int) -> None:
        """Frees `num_bytes`, and grants free bytes to waiting requests."""
        self.num_free_bytes += num_bytes
        self._grant_to_waiting()

    async def _take(self, num_bytes: int) -> None:
        if num_bytes == 0 or (not self._waiting and num_bytes <= self.num_free_bytes):
            self.num_free_bytes -= num_bytes
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (num_bytes, granted)
        self._waiting.append(waiter)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                # `_grant_to_waiting` granted the bytes just before the cancellation.
                self.give_back(num_bytes)
            else:
                self._waiting.remove(waiter)
                self._grant_to_waiting()
            raise

    def _grant_to_waiting(self) -> None:
        while self._waiting and self._waiting[0][0] <= self.num_free_bytes:
            num_bytes, granted = self._waiting.popleft()
            self.num_free_bytes -= num_bytes
            granted.set_result(None)
