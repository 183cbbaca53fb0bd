"""Serves an ASGI application over HTTP/1.1, with modified connection classes of Hypercorn."""

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
# A client that reads nothing for this time is dropped.
WRITE_TIMEOUT_S = 60.0


class Http1Protocol(H11Protocol):
    """HTTP/1.1 only, because Hypercorn never closes idle HTTP/2 connections."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """Ignores requests to change the protocol."""


class HttpConnection(TCPServer):
    """The connection of one client. The connection closes when the client disconnects, not after the idle timeout."""

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
        # Without this flag, the end of a running request would restart the idle timeout.
        self._is_client_gone = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        """Sends the event. Drops the client if the write takes longer than `write_timeout_s`."""
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
    """Serves until `wait_for_stop` returns. Open connections then have `config.graceful_timeout` seconds to end."""
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
    """Whether a disconnect of the client caused `error`."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_disconnect, error.exceptions))
    return isinstance(error, OSError)
