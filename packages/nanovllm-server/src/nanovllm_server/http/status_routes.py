"""The routes that report the state of the server, and the routes for administrators."""

from collections.abc import Mapping

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Quart, Response, request

from nanovllm_server import __version__
from nanovllm_server.chat.service import Service
from nanovllm_server.http.header_checks import check_key
from nanovllm_server.protocol.bodies import Health, Load, Version
from nanovllm_server.protocol.response import model_body, models_body


def add_status_routes(app: Quart, service: Service) -> None:
    """Adds the routes to the application."""
    created_s = service.clock.now()
    max_model_len = service.engine.info.max_model_len

    async def models() -> Response:
        return json_response(models_body(service.model_names, created_s, max_model_len))

    async def model(name: str) -> Response:
        service.require_model(name)
        return json_response(model_body(name, service.model_names, created_s, max_model_len))

    async def health() -> Response:
        return _health_response(service.engine_failure())

    async def ready() -> Response:
        return _health_response(service.unavailable_reason())

    async def load() -> Response:
        body: Load = {"server_load": service.admission.num_active}
        return json_response(body)

    async def version() -> Response:
        body: Version = {"version": __version__}
        return json_response(body)

    async def metrics() -> Response:
        return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    if service.admin_api_key is not None:
        _add_admin_routes(app, service, service.admin_api_key)
    app.add_url_rule("/v1/models", view_func=models, methods=["GET"])
    # Names of models may contain slashes.
    app.add_url_rule("/v1/models/<path:name>", view_func=model, methods=["GET"])
    app.add_url_rule("/health", view_func=health, methods=["GET"])
    app.add_url_rule("/ping", endpoint="ping", view_func=health, methods=["GET"])
    app.add_url_rule("/ready", view_func=ready, methods=["GET"])
    app.add_url_rule("/load", view_func=load, methods=["GET"])
    app.add_url_rule("/version", view_func=version, methods=["GET"])
    app.add_url_rule("/metrics", view_func=metrics, methods=["GET"])


def _add_admin_routes(app: Quart, service: Service, admin_api_key: str) -> None:
    async def reset_prefix_cache() -> Response:
        check_key((admin_api_key,), request.headers.get("Authorization"))
        await service.engine.reset_prefix_cache()
        return Response(b"", 200)

    app.add_url_rule("/reset_prefix_cache", view_func=reset_prefix_cache, methods=["POST"])


def json_response(body: Mapping[str, object], status: int = 200) -> Response:
    """Returns a response with `body` as JSON."""
    return Response(orjson.dumps(body), status, content_type="application/json")


def _health_response(reason: str | None) -> Response:
    body: Health = {"status": "ok"} if reason is None else {"status": "unavailable", "reason": reason}
    return json_response(body, 200 if reason is None else 503)
