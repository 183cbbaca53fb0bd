"""ASGI middleware around every HTTP exchange: assigns the request id, logs and counts the end, releases resources.

The middleware wraps the web framework: only there each end is visible (answered, failed, or client disconnected).
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import cast

from hypercorn.typing import (
    ASGIFramework,
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
    HTTPResponseStartEvent,
    HTTPScope,
    Scope,
)
from structlog.contextvars import bind_contextvars

from nanovllm_server.observability.logs import Logger

# Status in logs and metrics of an exchange whose client disconnected before the end of the response.
CLIENT_DISCONNECTED = 499
# Requests to these paths are logged at level debug.
QUIET_PATHS = ("/health", "/metrics")
# Maximum time to wait for the rest of a request before the end of its response.
LINGER_S = 10.0
MAX_LOGGED_PATH_BYTES = 200
MAX_REQUEST_ID_BYTES = 256
HOST_HEADER_VALUE = b"localhost"
SCOPE_KEY = "nanovllm.exchange"
REQUEST_ID_HEADER = b"x-request-id"


class HttpExchange:
    """One HTTP request and its response.

    has_generated_id: the server generated the request id, because the client sent no id.
    arrival: time of `time.monotonic`.
    status: status code of the response; None before the response starts.
    log_fields: additional fields of the log line.
    on_end_callbacks: functions that are called when the exchange ends, in reverse order.
    body_received: set when the whole request has been received, or the client has disconnected.
    """

    def __init__(self, request_id: str | None, path: str):
        self.has_generated_id = request_id is None
        self.request_id = request_id or uuid.uuid4().hex
        self.path = path
        self.arrival = time.monotonic()
        self.status: int | None = None
        self.log_fields: dict[str, object] = {}
        self.on_end_callbacks: list[Callable[[], None]] = []
        self.is_response_complete = False
        self.body_received = asyncio.Event()


class HttpExchangeMiddleware:
    """Wraps an ASGI application.

    count_exchange: called with path and status when an exchange ends.
    """

    def __init__(self, app: ASGIFramework, logger: Logger, count_exchange: Callable[[str, int], None]):
        self._app = app
        self._logger = logger
        self._count_exchange = count_exchange

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Runs one exchange. Refuses websockets."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000, "reason": None})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # No route depends on the Host header, and the web framework fails with invalid Host headers.
        scope["headers"] = [(name, HOST_HEADER_VALUE if name == b"host" else value) for name, value in scope["headers"]]
        exchange = HttpExchange(_client_request_id(scope), scope["path"])
        cast(dict[str, object], scope)[SCOPE_KEY] = exchange
        # Adds the request id to all log lines of this task. The task ends with the exchange.
        bind_contextvars(request_id=exchange.request_id)

        async def receive_and_track() -> ASGIReceiveEvent:
            event = await receive()
            if event["type"] != "http.request" or not event.get("more_body", False):
                exchange.body_received.set()
            return event

        async def send_and_track(event: ASGISendEvent) -> None:
            if event["type"] == "http.response.start":
                exchange.status = event["status"]
                event = _with_request_id(event, exchange.request_id)
            elif event["type"] == "http.response.body" and not event.get("more_body", False):
                exchange.is_response_complete = True
                if not exchange.body_received.is_set():
                    await _wait_for_body(exchange)
            await send(event)

        try:
            await self._app(scope, receive_and_track, send_and_track)
        finally:
            for callback in reversed(exchange.on_end_callbacks):
                callback()
            self._log_and_count(scope, exchange)

    def _log_and_count(self, scope: HTTPScope, exchange: HttpExchange) -> None:
        status = (
            exchange.status if exchange.is_response_complete and exchange.status is not None else CLIENT_DISCONNECTED
        )
        self._count_exchange(exchange.path, status)
        write_log = self._logger.debug if exchange.path in QUIET_PATHS else self._logger.info
        write_log(
            "request",
            method=scope["method"],
            path=scope["raw_path"][:MAX_LOGGED_PATH_BYTES].decode("latin-1"),
            status=status,
            seconds=round(time.monotonic() - exchange.arrival, 4),
            request_id=exchange.request_id,
            **exchange.log_fields,
        )


def get_exchange(scope: HTTPScope) -> HttpExchange:
    """Returns the exchange that `scope` belongs to."""
    return cast(HttpExchange, cast(dict[str, object], scope)[SCOPE_KEY])


async def _wait_for_body(exchange: HttpExchange) -> None:
    # Closing a connection while its request still arrives would reset it, and the client might lose the response.
    # The response is complete except for its end, so wait for the rest of the request and discard it.
    try:
        await asyncio.wait_for(exchange.body_received.wait(), LINGER_S)
    except TimeoutError:
        exchange.log_fields["lingered"] = True


def _client_request_id(scope: HTTPScope) -> str | None:
    for name, value in scope["headers"]:
        if name.lower() == REQUEST_ID_HEADER and 0 < len(value) <= MAX_REQUEST_ID_BYTES:
            text = value.decode("latin-1")
            if text.isascii() and text.isprintable():
                return text
    return None


def _with_request_id(event: HTTPResponseStartEvent, request_id: str) -> HTTPResponseStartEvent:
    return {**event, "headers": [*event["headers"], (REQUEST_ID_HEADER, request_id.encode())]}
