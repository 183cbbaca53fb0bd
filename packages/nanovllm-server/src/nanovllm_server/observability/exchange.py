"""The ASGI layer around every HTTP exchange: assigns the id, logs and counts the end, and releases resources.

It lies below the web framework, because only there it sees every end: answered, failed, or left by the client (499).
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

CLIENT_LEFT = 499
QUIET_PATHS = ("/health", "/metrics")
LINGER_S = 10.0
MAX_PATH_SHOWN = 200
MAX_ID_LENGTH = 256
HOST = b"localhost"
SCOPE_KEY = "nanovllm.exchange"
REQUEST_ID_HEADER = b"x-request-id"


class Exchange:
    """One request and its response.

    has_own_id: the server made the id, because the client sent none.
    facts: further fields of the log line.
    on_end: functions that are called at the end, the last one first.
    """

    def __init__(self, request_id: str | None, path: str):
        self.has_own_id = request_id is None
        self.request_id = request_id or uuid.uuid4().hex
        self.path = path
        self.arrival = time.monotonic()
        self.status: int | None = None
        self.facts: dict[str, object] = {}
        self.on_end: list[Callable[[], None]] = []
        self.answered = False
        self.body_received = asyncio.Event()


class ExchangeLayer:
    """Wraps an ASGI application. count: called with path and status at the end of every exchange."""

    def __init__(self, app: ASGIFramework, logger: Logger, count: Callable[[str, int], None]):
        self._app = app
        self._logger = logger
        self._count = count

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Runs one exchange. Refuses websockets."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000, "reason": None})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # No route depends on the Host header, and the web framework fails with invalid ones.
        scope["headers"] = [(name, HOST if name == b"host" else value) for name, value in scope["headers"]]
        exchange = Exchange(_request_id(scope), scope["path"])
        cast(dict[str, object], scope)[SCOPE_KEY] = exchange
        # Adds the id to all log lines of this task, which ends with the exchange.
        bind_contextvars(request_id=exchange.request_id)

        async def receive_and_note() -> ASGIReceiveEvent:
            event = await receive()
            if event["type"] != "http.request" or not event.get("more_body", False):
                exchange.body_received.set()
            return event

        async def send_and_note(event: ASGISendEvent) -> None:
            if event["type"] == "http.response.start":
                exchange.status = event["status"]
                event = _with_request_id(event, exchange.request_id)
            elif event["type"] == "http.response.body" and not event.get("more_body", False):
                exchange.answered = True
                if not exchange.body_received.is_set():
                    await _linger(exchange)
            await send(event)

        try:
            await self._app(scope, receive_and_note, send_and_note)
        finally:
            for function in reversed(exchange.on_end):
                function()
            self._note(scope, exchange)

    def _note(self, scope: HTTPScope, exchange: Exchange) -> None:
        status = exchange.status if exchange.answered and exchange.status is not None else CLIENT_LEFT
        self._count(exchange.path, status)
        log = self._logger.debug if exchange.path in QUIET_PATHS else self._logger.info
        log(
            "request",
            method=scope["method"],
            path=scope["raw_path"][:MAX_PATH_SHOWN].decode("latin-1"),
            status=status,
            seconds=round(time.monotonic() - exchange.arrival, 4),
            request_id=exchange.request_id,
            **exchange.facts,
        )


def exchange_of(scope: HTTPScope) -> Exchange:
    """The exchange that `scope` belongs to."""
    return cast(Exchange, cast(dict[str, object], scope)[SCOPE_KEY])


async def _linger(exchange: Exchange) -> None:
    # To close a connection while its request still arrives would reset it, and the client might lose the response.
    # The response is complete except for its end: wait for the rest of the request, which is discarded.
    try:
        await asyncio.wait_for(exchange.body_received.wait(), LINGER_S)
    except TimeoutError:
        exchange.facts["lingered"] = True


def _request_id(scope: HTTPScope) -> str | None:
    for name, value in scope["headers"]:
        if name.lower() == REQUEST_ID_HEADER and 0 < len(value) <= MAX_ID_LENGTH:
            text = value.decode("latin-1")
            if text.isascii() and text.isprintable():
                return text
    return None


def _with_request_id(event: HTTPResponseStartEvent, request_id: str) -> HTTPResponseStartEvent:
    return {**event, "headers": [*event["headers"], (REQUEST_ID_HEADER, request_id.encode())]}
