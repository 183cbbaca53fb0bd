"""Serves an ASGI application over HTTP/1.1 on one socket, and lets no connection stay for nothing.

Hypercorn's connections, with three differences. They speak no HTTP/2, which nobody needs without TLS, and whose idle
connections no timeout would end. A reader that takes nothing for a while is dropped, with all that waits for it. And
what a client that left had open is closed then, not when it would have been idle for long enough.
This room must not know the application.
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
# Since its last byte left for the kernel.
STALLED_S = 60.0


class PlainHttp(H11Protocol):
    """HTTP/1.1, whatever else is proposed."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """Go on as we are: who proposes an upgrade must be content without, and a preface is a request like others."""


class Connection(TCPServer):
    """One client's. stalled_s: how long what is sent may wait for its reader."""

    stalled_s = STALLED_S
    _left = False

    async def _read_data(self) -> None:
        made = self.protocol
        made.protocol = PlainHttp(
            made.app,
            made.config,
            made.context,
            made.task_group,
            made.state,
            made.ssl,
            made.client,
            made.server,
            made.send,
        )
        await super()._read_data()
        # Its requests may be ending yet, and each would have it wait for another one.
        self._left = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        """Send it, or drop the client."""
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
    """Serve until `stop` returns; then nobody comes in, and who is there has `config.graceful_timeout` seconds."""
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
    """Whether `error` says no more than that the connection broke, which is nobody's."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_break, error.exceptions))
    return isinstance(error, OSError)
