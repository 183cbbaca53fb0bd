"""The routes of the server, and the conversion of every exception to an error response."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from typing import cast

import orjson
from hypercorn.typing import ASGIFramework, HTTPScope
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Quart, Response, request
from structlog.contextvars import bind_contextvars
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, RequestEntityTooLarge

from nanovllm_core import EngineDeadError
from nanovllm_server.chat.prompt_logprobs import write_prompt_logprobs
from nanovllm_server.chat.service import Service
from nanovllm_server.http.event_stream import ChatStream
from nanovllm_server.http.header_checks import check_content, check_key
from nanovllm_server.http.page import read_page
from nanovllm_server.observability.exchange import Exchange, ExchangeLayer, exchange_of
from nanovllm_server.protocol.bodies import Health
from nanovllm_server.protocol.error import ApiError, internal_error, unavailable
from nanovllm_server.protocol.openapi import document
from nanovllm_server.protocol.request import ChatRequest, parse_chat_request
from nanovllm_server.protocol.response import Delta, Envelope, models_body

BODY_TIMEOUT_S = 60
# Bytes from which a body is parsed in a thread: parsing takes milliseconds, which would delay other requests.
LARGE_BODY = 1 << 17
EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def create_app(service: Service) -> Quart:
    """Returns the application that serves `service`."""
    app = Quart(__name__, static_folder=None)
    app.config.update(MAX_CONTENT_LENGTH=service.max_body_bytes, BODY_TIMEOUT=BODY_TIMEOUT_S, RESPONSE_TIMEOUT=None)
    created = service.clock.now()

    async def check_access() -> None:
        if request.path.startswith("/v1/"):
            check_key(service.api_keys, request.headers.get("Authorization"))

    async def chat_completions() -> Response:
        exchange = exchange_of(cast(HTTPScope, request.scope))
        chat = await _read(service, exchange)
        generation = await service.begin(chat, exchange)
        envelope = Envelope(
            f"chatcmpl-{chat.request_id or exchange.request_id}",
            service.clock.now(),
            chat.model,
            generation.prompt_token_ids.tolist() if chat.return_token_ids else None,
        )
        if chat.stream:
            stream = ChatStream(envelope, generation, include_usage=chat.include_usage)
            await stream.begin()
            return Response(stream.events(exchange, service.logger), headers=EVENT_STREAM)
        choices: list[list[Delta]] = [[] for _ in range(chat.n)]
        async with aclosing(generation.deltas()) as batches:
            async for deltas in batches:
                for delta in deltas:
                    choices[delta.index].append(delta)
        body: dict[str, object] = {**envelope.completion(choices, generation.usage)}
        if (prompt_logprobs := generation.prompt_logprobs) is not None:
            arguments = service.vocabulary, generation.prompt_token_ids.tolist(), prompt_logprobs
            body["prompt_logprobs"] = await asyncio.to_thread(write_prompt_logprobs, *arguments)
        return _json(body)

    async def models() -> Response:
        return _json(models_body(service.names, created, service.engine.info.max_model_len))

    async def health() -> Response:
        reason = service.unhealthy()
        body: Health = {"status": "ok"} if reason is None else {"status": "unavailable", "reason": reason}
        return _json(body, 200 if reason is None else 503)

    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def refuse(error: Exception) -> Response:
        return _refusal(_as_api_error(error, service))

    app.before_request(check_access)
    app.add_url_rule("/v1/chat/completions", view_func=chat_completions, methods=["POST"])
    app.add_url_rule("/v1/models", view_func=models, methods=["GET"])
    app.add_url_rule("/health", view_func=health, methods=["GET"])
    app.add_url_rule("/metrics", view_func=metrics, methods=["GET"])
    _add_documents(app, service)
    app.register_error_handler(Exception, refuse)
    layer = ExchangeLayer(cast(ASGIFramework, app.asgi_app), service.logger, service.metrics.count_http)
    app.asgi_app = layer  # pyright: ignore[reportAttributeAccessIssue]
    return app


def _add_documents(app: Quart, service: Service) -> None:
    """Adds routes to the two documents that never change."""
    needs_key = bool(service.api_keys)
    description = orjson.dumps(document(service.names, service.limits, service.defaults, needs_key=needs_key))
    html, page_headers = read_page()

    async def openapi() -> Response:
        return Response(description, content_type="application/json")

    async def page() -> Response:
        return Response(html, headers=page_headers)

    app.add_url_rule("/openapi.json", view_func=openapi, methods=["GET"])
    app.add_url_rule("/", view_func=page, methods=["GET"])


async def _read(service: Service, exchange: Exchange) -> ChatRequest:
    check_content(request.headers.get("Content-Type"), request.headers.get("Content-Encoding"))
    data = await request.get_data(cache=False, as_text=False, parse_form_data=False)
    if len(data) < LARGE_BODY:
        chat = parse_chat_request(data, service.limits, service.defaults)
    else:
        chat = await asyncio.to_thread(parse_chat_request, data, service.limits, service.defaults)
    if exchange.has_own_id and chat.request_id is not None:
        exchange.request_id = chat.request_id
        bind_contextvars(request_id=chat.request_id)
    return chat


def _json(body: Mapping[str, object], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, content_type="application/json")


def _refusal(error: ApiError) -> Response:
    response = _json(error.body(), error.status)
    response.headers.update(error.headers)
    return response


def _as_api_error(error: Exception, service: Service) -> ApiError:
    match error:
        case ApiError():
            return error
        case EngineDeadError():
            return unavailable(f"the engine is dead: {error}", "engine_dead")
        case RequestEntityTooLarge():
            return ApiError(413, f"the body may have at most {service.max_body_bytes} bytes", code="request_too_large")
        case MethodNotAllowed():
            allowed = ", ".join(sorted(error.valid_methods or ()))
            message = f"{request.method} is not allowed on {request.path}: use {allowed}"
            return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
        case NotFound():
            return ApiError(404, f"the path {request.path[:200]} does not exist", code="not_found")
        case HTTPException():
            return ApiError(error.code or 500, error.description or error.name)
        case _:
            request_id = exchange_of(cast(HTTPScope, request.scope)).request_id
            service.logger.error("internal error", request_id=request_id, exc_info=error)
            return internal_error(request_id)
