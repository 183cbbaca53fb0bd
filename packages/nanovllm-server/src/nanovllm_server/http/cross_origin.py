"""Lets browser applications of other origins use the server (https://fetch.spec.whatwg.org/#http-cors-protocol)."""

import re
from collections.abc import Sequence

from werkzeug.datastructures import Headers

ANY_ORIGIN = "*"
ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[^/?#@:*\s]+)(?::(?P<port>\d+))?")
DEFAULT_PORTS = {"http": "80", "https": "443"}
# Time for which browsers may cache the response to a preflight request.
PREFLIGHT_AGE_S = 600
# Request headers that pages may send if the preflight request names no headers.
DEFAULT_ALLOWED_HEADERS = "Authorization, Content-Type"
# Response headers that pages may read.
EXPOSED_HEADERS = "Retry-After, X-Request-Id, X-Should-Retry"


class CrossOriginPolicy:
    """Allows pages of the given origins to read this server's answers. origins: `*` allows all origins."""

    def __init__(self, origins: Sequence[str]):
        self._allowed_origins = frozenset(origins)

    def preflight_headers(self, method: str, request_headers: Headers) -> dict[str, str] | None:
        """Returns the headers of the response to an allowed preflight request; None for all other requests."""
        cors_headers = self.response_headers(request_headers)
        is_preflight = method == "OPTIONS" and "Access-Control-Request-Method" in request_headers
        if not is_preflight or "Access-Control-Allow-Origin" not in cors_headers:
            return None
        return cors_headers | {
            "Access-Control-Allow-Methods": "GET, POST",
            # Allow every header that the page asks for, because client libraries send headers of their own.
            "Access-Control-Allow-Headers": request_headers.get(
                "Access-Control-Request-Headers", DEFAULT_ALLOWED_HEADERS
            ),
            "Access-Control-Max-Age": str(PREFLIGHT_AGE_S),
        }

    def response_headers(self, request_headers: Headers) -> dict[str, str]:
        """Returns the CORS headers of the response to a request with `request_headers`."""
        if not self._allowed_origins:
            return {}
        origin = request_headers.get("Origin", "")
        if origin not in self._allowed_origins and not (origin and ANY_ORIGIN in self._allowed_origins):
            return {"Vary": "Origin"}
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": EXPOSED_HEADERS,
        }


def parse_allowed_origins(values: Sequence[str]) -> tuple[str, ...]:
    """Splits values at commas, and returns origins as browsers write them. Raises ValueError for an invalid origin."""
    return tuple(_parse_origin(origin) for value in values for origin in map(str.strip, value.split(",")) if origin)


def _parse_origin(text: str) -> str:
    if text in (ANY_ORIGIN, "null"):
        return text
    match = ORIGIN.fullmatch(text.lower().removesuffix("/"))
    if match is None:
        raise ValueError(f"{text} is not an origin: give a scheme, a host and maybe a port, as in https://example.com")
    scheme, host, port = match.group("scheme", "host", "port")
    return f"{scheme}://{host}" if port in (None, DEFAULT_PORTS.get(scheme)) else f"{scheme}://{host}:{port}"
