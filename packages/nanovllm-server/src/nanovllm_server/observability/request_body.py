"""Reads the body of a request. The web framework's class would read the body before the server checks the headers."""

import asyncio
import sys

from hypercorn.typing import ASGIReceiveEvent
from werkzeug.exceptions import RequestEntityTooLarge


class RequestBody:
    """A request's body. The server reads no part of the body until the application calls one of the methods below.

    received: event, set when the request is complete or the client has disconnected.
    """

    def __init__(self) -> None:
        self.received = asyncio.Event()
        self._data = bytearray()
        self._max_bytes = 0  # 0: discard the body
        # `read_start` stops at this number of bytes.
        self._start_bytes = sys.maxsize
        self._start_ended = asyncio.Event()
        # Set while the server should read from the connection.
        self._is_wanted = asyncio.Event()
        self._is_too_large = False
        # Set when the body is complete or too large.
        self._reading_ended = asyncio.Event()

    async def read_start(self, num_bytes: int) -> bool:
        """Reads until `num_bytes` or the whole body have arrived. Returns whether the body is complete.

        Afterwards, call `read_start` with a larger number, or `read`.
        """
        self._max_bytes, self._start_bytes = sys.maxsize, num_bytes
        if not self._reading_ended.is_set():
            self._start_ended.clear()
        self._is_wanted.set()
        self._check_size()
        await self._start_ended.wait()
        return self._reading_ended.is_set()

    async def read(self, max_bytes: int) -> bytearray:
        """Reads the body. Raises RequestEntityTooLarge if the body has more than `max_bytes`."""
        self._max_bytes, self._start_bytes = max_bytes, sys.maxsize
        self._check_size()
        self._is_wanted.set()
        try:
            await self._reading_ended.wait()
            if self._is_too_large:
                raise RequestEntityTooLarge
            return self._data
        finally:
            self.discard()

    def discard(self) -> None:
        """Discards the received part and all later parts."""
        self._data = bytearray()
        self._max_bytes = 0
        self._is_wanted.set()

    async def wait_until_wanted(self) -> None:
        """Waits until the application wants more of the body. Await this before each read from the connection."""
        await self._is_wanted.wait()

    def add(self, event: ASGIReceiveEvent) -> None:
        """Handles a received event: a part of the body, or the client's disconnect."""
        if event["type"] != "http.request":
            # `_reading_ended` stays unset: when the client has disconnected, the web framework cancels the application.
            self.received.set()
            return
        if self._max_bytes:
            self._data += event.get("body", b"")
            self._check_size()
        if not event.get("more_body", False):
            self.received.set()
            self._reading_ended.set()
            self._start_ended.set()

    def _check_size(self) -> None:
        if len(self._data) > self._max_bytes:
            self._is_too_large = True
            self._reading_ended.set()
            self.discard()
        elif len(self._data) >= self._start_bytes:
            self._is_wanted.clear()
            self._start_ended.set()
