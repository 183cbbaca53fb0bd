"""Serves an ASGI application over HTTP/1.1 with Hypercorn's connections, which this module changes in three ways.

HTTP/2 is disabled, because no timeout would end its idle connections. A client that stops reading is dropped after
`WRITE_TIMEOUT_S`. A connection is closed as soon as its client disconnects, not after the idle timeout.
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
# Maximum time for which a write may wait for the client to read.
WRITE_TIMEOUT_S = 60.0


class Http1Protocol(H11Protocol):
    """HTTP/1.1 without upgrades to other protocols."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """Ignores requests to upgrade; an HTTP/2 preface is treated as a request."""


class HttpConnection(TCPServer):
    """The connection of one client. write_timeout_s: maximum time for which a write may wait for the client."""

    write_timeout_s = WRITE_TIMEOUT_S
    _is_client_gone = False

    async def _read_data(self) -> None:
        protocol_wrapper = self.protocol
        protocol_wrapper.protocol = Http1Protocol(
            protocol_wrapper.app,
            protocol_wrapper.config,
            protocol_wrapper.context,
            protocol_wrapper.task_group,
            protocol_wrapper.state,
            protocol_wrapper.ssl,
            protocol_wrapper.client,
            protocol_wrapper.server,
            protocol_wrapper.send,
        )
        await super()._read_data()
        # Each request of this connection that still ends would restart the idle timeout.
        self._is_client_gone = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        """Sends the event; drops the client if the write takes too long."""
        if self._is_client_gone and isinstance(event, Updated):
            return
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        try:
            async with asyncio.timeout(self.write_timeout_s):
                await super().protocol_send(event)
        except TimeoutError:
            self.writer.transport.abort()
            await self.protocol.handle(Closed())


async def serve(
    app: ASGIFramework,
    listener: socket.socket,
    config: Config,
    wait_for_stop: Callable[[], Awaitable[None]],
    *,
    write_timeout_s: float = WRITE_TIMEOUT_S,
) -> None:
    """Serves until `wait_for_stop` returns. Then accepts no new connections, and closes open connections.

    Open connections have `config.graceful_timeout` seconds to end.
    """
    loop = asyncio.get_running_loop()
    context = WorkerContext(None)
    tasks: set[asyncio.Task[None]] = set()
    app_wrapper = ASGIWrapper(app)

    async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = HttpConnection(app_wrapper, loop, config, context, {}, reader, writer)
        connection.write_timeout_s = write_timeout_s
        await connection

    def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = loop.create_task(serve_connection(reader, writer))
        tasks.add(task)
        task.add_done_callback(on_end)

    def on_end(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not _is_disconnect(error):
            loop.call_exception_handler({"message": "a connection failed", "exception": error, "task": task})

    server = await asyncio.start_server(on_connect, sock=listener, backlog=BACKLOG)
    try:
        await wait_for_stop()
    finally:
        await context.terminated.set()
        server.close()
        if tasks:
            await asyncio.wait(tasks, timeout=config.graceful_timeout)
        for task in tuple(tasks):
            task.cancel()


def _is_disconnect(error: BaseException) -> bool:
    """Whether `error` only means that the client disconnected."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_disconnect, error.exceptions))
    return isinstance(error, OSError)
