"""Limits the memory of request bodies in a worker. A request gets memory in steps, while its body arrives."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from nanovllm_server.protocol.error import unavailable

# Bodies up to this size do not count: small requests must not wait for large bodies that arrive slowly.
MAX_UNCOUNTED_BYTES = 64 << 10
# If Content-Length shows that a body counts, the body takes memory as soon as this part has arrived.
FIRST_PART_BYTES = 8 << 10
MAX_WAIT_S = 10.0  # A request that waits longer for memory is refused.


class BodyShare:
    """The part of a `BodyMemory` that one request holds. `BodyMemory` writes the attributes.

    num_bytes: memory that the request holds now.
    max_bytes: memory that the request may hold at most.
    wanted_bytes: memory for which the request waits; None if it does not wait.
    """

    def __init__(self, memory: "BodyMemory", max_bytes: int):
        self._memory = memory
        self.num_bytes = 0
        self.max_bytes = max_bytes
        self.wanted_bytes: int | None = None
        self.granted = asyncio.Event()

    async def grow(self, num_bytes: int) -> None:
        """Waits until the request holds `num_bytes`. Raises ApiError (503) after waiting for `MAX_WAIT_S`."""
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await self._memory.grow(self, num_bytes)
        except TimeoutError as error:
            raise unavailable("too many large requests arrive at once: try again later", "body_memory_full") from error

    def shrink(self, num_bytes: int) -> None:
        """Gives back all but `num_bytes`. Afterwards, the share can't grow."""
        self._memory.shrink(self, num_bytes)


class BodyMemory:
    """Limits the bytes of bodies in this worker. Requests get memory in the order of arrival. Not thread-safe.

    A body gets memory only if each body then fits once all earlier bodies have ended. Waiting bodies therefore never
    block each other. A stalled body holds at most about twice the bytes that have arrived.
    """

    def __init__(self, num_bytes: int):
        self.num_free_bytes = num_bytes
        # Shares that hold memory or wait for memory, in the order in which they first asked for memory.
        self._shares: list[BodyShare] = []

    @contextmanager
    def hold(self, max_bytes: int) -> Generator[BodyShare]:
        """Gives a share, at first empty, for the duration of a `with` block. max_bytes: maximum size of the share."""
        share = BodyShare(self, max_bytes)
        try:
            yield share
        finally:
            self.shrink(share, 0)

    async def grow(self, share: BodyShare, num_bytes: int) -> None:
        """Waits until `share` holds `num_bytes`. After a cancellation, the `with` block of `hold` must end."""
        if share not in self._shares:
            self._shares.append(share)
        share.wanted_bytes = num_bytes
        share.granted.clear()
        self._grant_to_waiting()
        try:
            await share.granted.wait()
        finally:
            share.wanted_bytes = None

    def shrink(self, share: BodyShare, num_bytes: int) -> None:
        """Takes all but `num_bytes` from `share`, and grants free bytes to waiting requests."""
        share.max_bytes = num_bytes = min(share.num_bytes, num_bytes)
        self.num_free_bytes += share.num_bytes - num_bytes
        share.num_bytes = num_bytes
        if num_bytes == 0 and share in self._shares:
            self._shares.remove(share)
        self._grant_to_waiting()

    def _grant_to_waiting(self) -> None:
        for share in self._shares:
            if share.wanted_bytes is not None:
                if not self._can_grow(share, share.wanted_bytes):
                    return
                self.num_free_bytes -= share.wanted_bytes - share.num_bytes
                share.num_bytes, share.wanted_bytes = share.wanted_bytes, None
                share.granted.set()

    def _can_grow(self, growing_share: BodyShare, num_bytes: int) -> bool:
        """Returns whether each body would still fit once all earlier bodies have given their memory back."""
        num_free_bytes = self.num_free_bytes - (num_bytes - growing_share.num_bytes)
        for share in self._shares:
            num_held_bytes = num_bytes if share is growing_share else share.num_bytes
            if share.max_bytes - num_held_bytes > num_free_bytes:
                return False
            num_free_bytes += num_held_bytes
        return True
