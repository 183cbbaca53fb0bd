"""ASGI middleware around the web framework: assigns request ids, logs exchanges, releases resources."""

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
from nanovllm_server.observability.request_body import RequestBody

# Status in logs and metrics if the client disconnected before the end of the response.
CLIENT_DISCONNECTED_STATUS = 499
# Requests to these paths are logged at level debug.
QUIET_PATHS = ("/health", "/ready", "/ping", "/load", "/metrics")
# If a response is complete before the whole request has arrived, the last part of the response waits at most this time
# for the rest of the request.
LINGER_S = 10.0
MAX_LOGGED_PATH_BYTES = 200  # the log cuts longer paths
MAX_REQUEST_ID_BYTES = 256  # longer ids of clients are replaced
VALID_HOST_HEADER = b"localhost"  # replaces the client's header for the web framework
SCOPE_KEY = "nanovllm.exchange"  # key of the HttpExchange in the ASGI scope
REQUEST_ID_HEADER = b"x-request-id"


class HttpExchange:
    """One HTTP request and its response.

    host: value of the Host header; None without the header.
    has_generated_id: whether the server generated `request_id`, because the client sent no valid id.
    key_digest: digest of the API key; "" if the server needs no key.
    is_chunked: whether the request has a Transfer-Encoding header. If True, the response closes the connection.
    arrival: when the exchange began, in seconds of `time.monotonic`.
    status: status code of the response; None before the response starts.
    log_fields: additional fields of the log line that describes the exchange.
    on_end_callbacks: called in reverse order when the exchange ends.
    """

    def __init__(self, request_id: str | None, path: str, *, host: str | None = None, is_chunked: bool = False):
        self.has_generated_id = request_id is None
        self.request_id = request_id or uuid.uuid4().hex
        self.path = path
        self.key_digest = ""
        self.host = host
        self.is_chunked = is_chunked
        self.arrival = time.monotonic()
        self.status: int | None = None
        self.log_fields: dict[str, object] = {}
        self.on_end_callbacks: list[Callable[[], None]] = []
        self.is_response_complete = False
        self.body = RequestBody()


class HttpExchangeMiddleware:
    """Wraps an ASGI application. count_exchange: called with path and status when an exchange ends."""

    def __init__(self, app: ASGIFramework, logger: Logger, count_exchange: Callable[[str, int], None]):
        self._app = app
        self._logger = logger
        self._count_exchange = count_exchange

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Runs one exchange."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        exchange = HttpExchange(
            _client_request_id(scope),
            scope["path"],
            host=headers[b"host"].decode("latin-1") if b"host" in headers else None,
            is_chunked=b"transfer-encoding" in headers,
        )
        # Hide the Host header, because the web framework fails with invalid values.
        scope["headers"] = [(name, VALID_HOST_HEADER if name == b"host" else value) for name, value in scope["headers"]]
        if not scope["path"].startswith("/"):
            # The web framework also fails with paths that do not begin with a slash.
            scope["path"] = "/"
        cast(dict[str, object], scope)[SCOPE_KEY] = exchange
        # Adds the request id to all log lines of this task, which handles only this exchange.
        bind_contextvars(request_id=exchange.request_id)

        async def receive_and_track() -> ASGIReceiveEvent:
            # The application gets the body from `exchange.body`. The web framework gets events with an empty body.
            await exchange.body.wait_until_wanted()
            event = await receive()
            exchange.body.add(event)
            return {**event, "body": b""} if event["type"] == "http.request" else event

        async def send_and_track(event: ASGISendEvent) -> None:
            if event["type"] == "http.response.start":
                exchange.status = event["status"]
                exchange.body.discard()
                event = _with_headers(event, exchange)
            elif event["type"] == "http.response.body" and not event.get("more_body", False):
                exchange.is_response_complete = True
                if not exchange.body.received.is_set():
                    await _wait_for_body(exchange)
            await send(event)

        try:
            await self._app(scope, receive_and_track, send_and_track)
        finally:
            for callback in reversed(exchange.on_end_callbacks):
                callback()
            self._log_and_count(scope, exchange)

    def _log_and_count(self, scope: HTTPScope, exchange: HttpExchange) -> None:
        status = CLIENT_DISCONNECTED_STATUS
        if exchange.is_response_complete and exchange.status is not None:
            status = exchange.status
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
    """Returns the exchange of a scope that passed through the middleware."""
    return cast(HttpExchange, cast(dict[str, object], scope)[SCOPE_KEY])


async def _wait_for_body(exchange: HttpExchange) -> None:
    # If the server closes a connection while the request still arrives, the client may lose the response.
    try:
        await asyncio.wait_for(exchange.body.received.wait(), LINGER_S)
    except TimeoutError:
        exchange.log_fields["lingered"] = True


def _client_request_id(scope: HTTPScope) -> str | None:
    for name, value in scope["headers"]:
        if name.lower() == REQUEST_ID_HEADER and 0 < len(value) <= MAX_REQUEST_ID_BYTES:
            text = value.decode("latin-1")
            if text.isascii() and text.isprintable():
                return text
    return None


def _with_headers(event: HTTPResponseStartEvent, exchange: HttpExchange) -> HTTPResponseStartEvent:
    headers = [*event["headers"], (REQUEST_ID_HEADER, exchange.request_id.encode())]
    if exchange.is_chunked:
        # Closing the connection prevents request smuggling: a proxy may find a different end of a chunked body.
        headers.append((b"connection", b"close"))
    return {**event, "headers": headers}
