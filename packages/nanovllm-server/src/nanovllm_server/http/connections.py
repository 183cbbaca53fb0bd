"""Serves an ASGI application over HTTP/1.1, with modified connection classes of Hypercorn."""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import h11
import orjson
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import EventWrapper, WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.typing import ASGIFramework

from nanovllm_server.protocol.error import ApiError
from nanovllm_server.settings import BACKLOG

# A client that reads nothing for this time is dropped.
WRITE_TIMEOUT_S = 60.0
# Maximum number of bytes read from a connection at once. The default of event loops, 256 KiB, would take too much
# memory for a thousand connections.
MAX_READ_BYTES = 8 << 10
# A line feed without a carriage return, or a header that continues on the next line.
AMBIGUOUS_LINE = re.compile(rb"(?<!\r)\n|\n[ \t]")
INVALID_HTTP_MESSAGE_BY_STATUS = {
    400: "the request is not valid HTTP/1.1: check its first line, its headers and the framing of its body",
    431: "the first line and the headers of the request are too long",
    501: "Transfer-Encoding must be chunked",
}


class StrictConnection(h11.Connection):
    """Refuses request heads (first line and headers) that h11 accepts, but that a proxy may read differently."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Returns the next event. Raises RemoteProtocolError for invalid HTTP."""
        if self.their_state is h11.IDLE:
            received, _ = self.trailing_data
            head_end = received.find(b"\r\n\r\n")
            if AMBIGUOUS_LINE.search(received, 0, len(received) if head_end < 0 else head_end):
                raise h11.RemoteProtocolError("a line of the head does not end with CRLF, or is folded")
        return super().next_event()


class ReadGate(EventWrapper):
    """An event that lets a paused connection handle further data, or learn that the client has disconnected.

    Hypercorn pauses a connection during a response if data follows the request, or if the request has the header
    Upgrade. A paused connection reads nothing, not even the end of the data.
    """

    _is_client_gone = False

    def report_disconnect(self) -> None:
        """Makes current and later calls of `wait` raise ConnectionResetError."""
        self._is_client_gone = True
        self._event.set()

    async def wait(self) -> None:
        """Waits until the event is set. Raises ConnectionResetError if the client disconnects."""
        if not self._is_client_gone:
            await super().wait()
        if self._is_client_gone:
            raise ConnectionResetError


class Http1Protocol(H11Protocol):
    """Supports only HTTP/1.1, because Hypercorn never closes idle HTTP/2 connections."""

    def __init__(self, read_gate: ReadGate, *arguments: Any):
        super().__init__(*arguments)
        self.can_read = read_gate
        max_head_bytes = self.config.h11_max_incomplete_size
        self.connection = StrictConnection(h11.SERVER, max_incomplete_event_size=max_head_bytes)

    async def _check_protocol(self, event: h11.Request) -> None:
        """Ignores requests to change to HTTP/2."""

    async def _create_stream(self, request: h11.Request) -> None:
        """Ignores requests to change to WebSocket. Hypercorn never closes the connections of refused WebSockets."""
        headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
        if len(headers) < len(request.headers):
            request = h11.Request(
                method=request.method, target=request.target, headers=headers, http_version=request.http_version
            )
        await super()._create_stream(request)

    async def _send_error_response(self, status_code: int) -> None:
        """Sends an error for invalid HTTP. Hypercorn closes the connection afterwards."""
        message = INVALID_HTTP_MESSAGE_BY_STATUS.get(status_code, INVALID_HTTP_MESSAGE_BY_STATUS[400])
        body = orjson.dumps(ApiError(status_code, message, code="invalid_http").body())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        for event in (h11.Response(status_code=status_code, headers=headers), h11.Data(body), h11.EndOfMessage()):
            await self._send_h11_event(event)


class SmallReadProtocol(asyncio.BufferedProtocol):
    """Passes received data to a stream in parts of at most `MAX_READ_BYTES`. Reports a disconnect to `read_gate`."""

    # All connections can share one buffer: the event loop calls `buffer_updated` right after filling the buffer.
    _buffer = memoryview(bytearray(MAX_READ_BYTES))

    def __init__(self, read_gate: ReadGate, on_connect: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]):
        self._read_gate = read_gate
        # A `StreamReader` pauses its connection above 2 * `limit` bytes.
        reader = asyncio.StreamReader(limit=MAX_READ_BYTES // 4)
        self._stream = asyncio.StreamReaderProtocol(reader, on_connect)
        self.pause_writing = self._stream.pause_writing
        self.resume_writing = self._stream.resume_writing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._stream.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Called by the event loop."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the event loop."""
        self._stream.data_received(bytes(self._buffer[:nbytes]))

    def eof_received(self) -> bool | None:
        """Called by the event loop."""
        self._read_gate.report_disconnect()
        return self._stream.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._read_gate.report_disconnect()
        self._stream.connection_lost(exc)


class HttpConnection(TCPServer):
    """Serves one client. Closes the connection when the client disconnects, without waiting for the idle timeout."""

    write_timeout_s = WRITE_TIMEOUT_S
    _has_stopped_reading = False

    def __init__(self, read_gate: ReadGate, *arguments: Any):
        super().__init__(*arguments)
        self._read_gate = read_gate

    async def _read_data(self) -> None:
        protocol_wrapper = self.protocol
        protocol_wrapper.protocol = Http1Protocol(
            self._read_gate,
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
        try:
            await super()._read_data()
        except ConnectionResetError:
            await protocol_wrapper.handle(Closed())
        # Without this flag, the end of a running request would restart the idle timeout.
        self._has_stopped_reading = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        """Sends the event. Drops the client if the write takes longer than `write_timeout_s`."""
        if self._has_stopped_reading and isinstance(event, Updated):
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

    async def serve_connection(read_gate: ReadGate, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = HttpConnection(read_gate, app_wrapper, loop, config, context, {}, reader, writer)
        connection.write_timeout_s = write_timeout_s
        await connection

    def on_connect(read_gate: ReadGate, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = loop.create_task(serve_connection(read_gate, reader, writer))
        tasks.add(task)
        task.add_done_callback(on_end)

    def on_end(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not _is_disconnect(error):
            loop.call_exception_handler({"message": "a connection failed", "exception": error, "task": task})

    def make_protocol() -> SmallReadProtocol:
        read_gate = ReadGate()
        return SmallReadProtocol(read_gate, partial(on_connect, read_gate))

    server = await loop.create_server(make_protocol, sock=listener, backlog=BACKLOG)
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
    """Returns whether a disconnect of the client caused `error`."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_disconnect, error.exceptions))
    return isinstance(error, OSError)
