"""Serves an ASGI application over HTTP/1.1 with Hypercorn's connections, which it changes in three ways.

No HTTP/2 (no timeout would end idle connections). A client that stops reading is dropped after `STALLED_S`.
A connection whose client left is closed at once, not after the idle timeout.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import h11
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.typing import ASGIFramework

BACKLOG = 2048
# Longest time for which a write may wait for the client.
STALLED_S = 60.0


class PlainHttp(H11Protocol):
    """HTTP/1.1 without upgrades to other protocols."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """Ignores proposals to upgrade; an HTTP/2 preface is treated as a request."""


class Connection(TCPServer):
    """The connection of one client. stalled_s: longest time for which a write may wait for the client."""

    stalled_s = STALLED_S
    _left = False

    async def _read_data(self) -> None:
        wrapper = self.protocol
        wrapper.protocol = PlainHttp(
            wrapper.app,
            wrapper.config,
            wrapper.context,
            wrapper.task_group,
            wrapper.state,
            wrapper.ssl,
            wrapper.client,
            wrapper.server,
            wrapper.send,
        )
        await super()._read_data()
        # Requests of this connection may still end; each would start the wait for another request again.
        self._left = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        """Sends the event; drops the client if it takes too long."""
        if self._left and isinstance(event, Updated):
            return
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        try:
            async with asyncio.timeout(self.stalled_s):
                await super().protocol_send(event)
        except TimeoutError:
            self.writer.transport.abort()
            await self.protocol.handle(Closed())


async def serve(
    app: ASGIFramework,
    listener: socket.socket,
    config: Config,
    stop: Callable[[], Awaitable[None]],
    *,
    stalled_s: float = STALLED_S,
) -> None:
    """Serves until `stop` returns. Then accepts no connection, and ends open ones after `config.graceful_timeout` s."""
    loop = asyncio.get_running_loop()
    context = WorkerContext(None)
    tasks: set[asyncio.Task[None]] = set()
    wrapper = ASGIWrapper(app)

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(wrapper, loop, config, context, {}, reader, writer)
        connection.stalled_s = stalled_s
        await connection

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = loop.create_task(serve_one(reader, writer))
        tasks.add(task)
        task.add_done_callback(ended)

    def ended(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not _is_break(error):
            loop.call_exception_handler({"message": "a connection failed", "exception": error, "task": task})

    server = await asyncio.start_server(connected, sock=listener, backlog=BACKLOG)
    try:
        await stop()
    finally:
        await context.terminated.set()
        server.close()
        if tasks:
            await asyncio.wait(tasks, timeout=config.graceful_timeout)
        for task in tuple(tasks):
            task.cancel()


def _is_break(error: BaseException) -> bool:
    """Whether `error` only means that the connection broke."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_break, error.exceptions))
    return isinstance(error, OSError)
