"""The routes of the server. Every exception becomes an error response."""

import asyncio
from contextlib import aclosing
from typing import cast

import orjson
from hypercorn.typing import ASGIFramework, HTTPScope
from quart import Quart, Response, request
from structlog.contextvars import bind_contextvars
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, RequestEntityTooLarge, RequestTimeout

from nanovllm_core import EngineDeadError
from nanovllm_server.chat.prompt_logprobs import serialize_prompt_logprobs
from nanovllm_server.chat.service import Service
from nanovllm_server.http.body_memory import FIRST_PART_BYTES, MAX_UNCOUNTED_BYTES, BodyMemory, BodyShare
from nanovllm_server.http.cross_origin import CrossOriginPolicy
from nanovllm_server.http.event_stream import ChatStream
from nanovllm_server.http.header_checks import check_content_type, check_key, refuse_ambiguous_request
from nanovllm_server.http.host_check import HostCheck
from nanovllm_server.http.page import read_page
from nanovllm_server.http.status_routes import add_status_routes, json_response
from nanovllm_server.observability.http_exchange import HttpExchange, HttpExchangeMiddleware, get_exchange
from nanovllm_server.observability.request_body import RequestBody
from nanovllm_server.protocol.error import ApiError, internal_error, unavailable
from nanovllm_server.protocol.openapi import openapi_document
from nanovllm_server.protocol.request import ChatRequest, parse_chat_request
from nanovllm_server.protocol.response import Delta, Envelope

CHAT_PATH = "/v1/chat/completions"
BODY_TIMEOUT_S = 60  # Maximum time to read a request's body.
# A thread parses bodies of at least this size, because parsing would block the event loop for milliseconds.
MIN_THREADED_BODY_BYTES = 1 << 17
EVENT_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def create_app(service: Service) -> Quart:
    """Returns the application with all routes."""
    app = Quart(__name__, static_folder=None)
    app.config.update(RESPONSE_TIMEOUT=None)
    # A path with "//" is a 404. The redirect to the path with "/" would name a wrong host.
    app.url_map.merge_slashes = False
    body_memory = BodyMemory(service.body_memory_bytes)
    # Parse one large body at a time: the parsed values may need many times the memory of the body.
    large_body_semaphore = asyncio.Semaphore()

    async def chat_completions() -> Response:
        exchange = get_exchange(cast(HTTPScope, request.scope))
        check_content_type(request.headers.get("Content-Type"), request.headers.get("Content-Encoding"))
        with body_memory.hold(_max_body_bytes(service)) as body_share:
            chat = await _read_request(service, exchange, body_share, large_body_semaphore)
            generation = await service.start_generation(chat, exchange)
            # Free the memory of the request now, because the answer may take long.
            chat = chat.without_contents()
        response_id = f"chatcmpl-{chat.request_id or exchange.request_id}"
        envelope = Envelope(
            response_id,
            service.clock.now(),
            chat.model or service.model_names[0],
            generation.prompt_token_ids.tolist() if chat.return_token_ids else None,
            service.describe_prompt(chat, response_id, generation.num_prompt_tokens),
        )
        if chat.stream:
            stream = ChatStream(
                envelope,
                generation,
                include_usage=chat.include_usage,
                has_continuous_usage=chat.has_continuous_usage,
            )
            await stream.wait_for_first_deltas()
            return Response(stream.events(exchange, service.logger), headers=EVENT_STREAM_HEADERS)
        deltas_by_choice: list[list[Delta]] = [[] for _ in range(chat.n)]
        async with aclosing(generation.stream_deltas()) as delta_batches:
            async for deltas in delta_batches:
                for delta in deltas:
                    deltas_by_choice[delta.index].append(delta)
        body: dict[str, object] = {**envelope.completion(deltas_by_choice, generation.usage)}
        if (prompt_logprobs := generation.prompt_logprobs) is not None:
            token_ids = generation.prompt_token_ids.tolist()
            body["prompt_logprobs"] = await asyncio.to_thread(
                serialize_prompt_logprobs, service.vocabulary, token_ids, prompt_logprobs
            )
        return json_response(body)

    async def handle_error(error: Exception) -> Response:
        api_error = _to_api_error(error, service)
        response = json_response(api_error.body(), api_error.status)
        response.headers.update(api_error.headers)
        return response

    _add_access_checks(app, service)
    _close_connections_while_draining(app, service)
    app.add_url_rule(CHAT_PATH, view_func=chat_completions, methods=["POST"])
    add_status_routes(app, service)
    _add_static_routes(app, service)
    app.register_error_handler(Exception, handle_error)
    middleware = HttpExchangeMiddleware(cast(ASGIFramework, app.asgi_app), service.logger, service.metrics.count_http)
    app.asgi_app = middleware  # pyright: ignore[reportAttributeAccessIssue]
    return app


def _close_connections_while_draining(app: Quart, service: Service) -> None:
    """While the server drains, makes each 503 the last response of its connection."""

    async def close_connection(response: Response) -> Response:
        # On a new connection, a proxy can send the client's next request to another server.
        if response.status_code == 503 and service.admission.shutdown_reason is not None:
            response.headers["Connection"] = "close"
        return response

    app.after_request(close_connection)


def _add_access_checks(app: Quart, service: Service) -> None:
    """Makes the application check the headers of every request before the route reads the body."""
    host_check = HostCheck(service.allowed_hosts)
    origin_policy = CrossOriginPolicy(service.allowed_origins)

    async def check_access() -> Response | None:
        exchange = get_exchange(cast(HTTPScope, request.scope))
        refuse_ambiguous_request(request.scope["raw_path"], request.headers)
        host_check.check(exchange.host)
        if (headers := origin_policy.preflight_headers(request.method, request.headers)) is not None:
            return Response(b"", 204, headers=headers)
        if request.path.startswith("/v1/"):
            exchange.key_digest = check_key(service.api_keys, request.headers.get("Authorization"))
        return None

    async def add_origin_headers(response: Response) -> Response:
        response.headers.update(origin_policy.response_headers(request.headers))
        return response

    app.before_request(check_access)
    app.after_request(add_origin_headers)


def _add_static_routes(app: Quart, service: Service) -> None:
    """Adds the routes whose contents never change: `/openapi.json` and the chat page."""
    document = openapi_document(service.model_names, service.limits, service.defaults, needs_key=bool(service.api_keys))
    openapi_json = orjson.dumps(document)
    page_html, page_headers = read_page()

    async def openapi() -> Response:
        return Response(openapi_json, content_type="application/json")

    async def page() -> Response:
        return Response(page_html, headers=page_headers)

    app.add_url_rule("/openapi.json", view_func=openapi, methods=["GET"])
    app.add_url_rule("/", view_func=page, methods=["GET"])


def _max_body_bytes(service: Service) -> int:
    """Returns the maximum size of the request's body. Raises RequestEntityTooLarge."""
    if request.content_length is None:
        return service.max_body_bytes
    if request.content_length > service.max_body_bytes:
        raise RequestEntityTooLarge
    return request.content_length


async def _receive_body(body: RequestBody, share: BodyShare, max_bytes: int) -> bytearray:
    """Receives the body. While the body arrives, `share` grows up to twice the size of the received part.

    Raises RequestEntityTooLarge, RequestTimeout, ApiError (503).
    """
    loop = asyncio.get_running_loop()
    remaining_s = float(BODY_TIMEOUT_S)
    # Without Content-Length, a body is small until more has arrived.
    num_bytes = MAX_UNCOUNTED_BYTES if request.content_length is None else FIRST_PART_BYTES
    while True:
        start_s = loop.time()
        try:
            async with asyncio.timeout(remaining_s):
                if max(num_bytes, MAX_UNCOUNTED_BYTES) >= share.max_bytes or await body.read_start(num_bytes):
                    return await body.read(max_bytes)
        except TimeoutError as error:
            raise RequestTimeout from error
        # The time in which the body waits for memory does not count.
        remaining_s -= loop.time() - start_s
        num_bytes = min(2 * num_bytes, share.max_bytes)
        await share.grow(num_bytes)


async def _read_request(
    service: Service, exchange: HttpExchange, body_share: BodyShare, large_body_semaphore: asyncio.Semaphore
) -> ChatRequest:
    data = await _receive_body(exchange.body, body_share, service.max_body_bytes)
    body_share.shrink(len(data))
    if len(data) < MIN_THREADED_BODY_BYTES:
        chat = parse_chat_request(data, service.limits, service.defaults)
    else:
        async with large_body_semaphore:
            chat = await asyncio.to_thread(parse_chat_request, data, service.limits, service.defaults)
    if exchange.has_generated_id and chat.request_id is not None:
        exchange.request_id = chat.request_id
        bind_contextvars(request_id=chat.request_id)
    return chat


def _to_api_error(error: Exception, service: Service) -> ApiError:
    match error:
        case ApiError():
            return error
        case EngineDeadError():
            return unavailable(f"the engine is dead: {error}", "engine_dead")
        case RequestEntityTooLarge():
            return ApiError(413, f"the body may have at most {service.max_body_bytes} bytes", code="request_too_large")
        case MethodNotAllowed():
            allowed_methods = ", ".join(sorted(error.valid_methods or ()))
            message = f"{request.method} is not allowed on {request.path}: use {allowed_methods}"
            return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed_methods})
        case NotFound():
            message = f"the path {request.path[:200]} does not exist; the API of this server is {CHAT_PATH}"
            return ApiError(404, message, code="not_found")
        case HTTPException():
            return ApiError(error.code or 500, error.description or error.name)
        case _:
            request_id = get_exchange(cast(HTTPScope, request.scope)).request_id
            service.logger.error("internal error", request_id=request_id, exc_info=error)
            return internal_error(request_id)
