"""Reads the body of a request. The web framework's class would read the body before the server checks the headers."""

import asyncio

from hypercorn.typing import ASGIReceiveEvent
from werkzeug.exceptions import RequestEntityTooLarge


class RequestBody:
    """A request's body. The server reads no part of the body until the application calls `read` or `discard`.

    received: event, set when the request is complete or the client has disconnected.
    """

    def __init__(self) -> None:
        self.received = asyncio.Event()
        self._data = bytearray()
        self._max_bytes = 0  # 0: discard the body
        # Set when the application calls `read` or `discard`.
        self._read_or_discard_called = asyncio.Event()
        self._is_too_large = False
        # Set when the body is complete or too large.
        self._reading_ended = asyncio.Event()

    async def read(self, max_bytes: int) -> bytearray:
        """Reads the body. Raises RequestEntityTooLarge if the body has more than `max_bytes`."""
        self._max_bytes = max_bytes
        self._read_or_discard_called.set()
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
        self._read_or_discard_called.set()

    async def wait_until_read_or_discarded(self) -> None:
        """Waits until the application calls `read` or `discard`. Await this before each read from the connection."""
        await self._read_or_discard_called.wait()

    def add(self, event: ASGIReceiveEvent) -> None:
        """Handles a received event: a part of the body, or the client's disconnect."""
        if event["type"] != "http.request":
            # `_reading_ended` stays unset: when the client has disconnected, the web framework cancels the application.
            self.received.set()
            return
        if self._max_bytes:
            self._data += event.get("body", b"")
            if len(self._data) > self._max_bytes:
                self._is_too_large = True
                self._reading_ended.set()
                self.discard()
        if not event.get("more_body", False):
            self.received.set()
            self._reading_ended.set()
