"""Checks the first line and the headers of a request before the server reads the body."""

import hashlib
import hmac
from collections.abc import Container, Sequence

from werkzeug.http import parse_options_header

from nanovllm_server.protocol.error import ApiError


def refuse_ambiguous_request(raw_path: bytes, headers: Container[str]) -> None:
    """Refuses requests that a proxy and this server may read differently. Raises ApiError (400)."""
    if not raw_path.startswith(b"/"):
        raise _invalid_http("the first line must have a path, such as /v1/chat/completions, instead of a URL")
    if "Transfer-Encoding" in headers and "Content-Length" in headers:
        raise _invalid_http("send Content-Length or Transfer-Encoding, not both")


def _invalid_http(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_http", headers={"Connection": "close"})


def check_key(api_keys: Sequence[str], authorization: str | None) -> str:
    """Checks the Authorization header. Raises ApiError (401). Returns the key's digest; "" if `api_keys` is empty."""
    if not api_keys:
        return ""
    scheme, _, key = (authorization or "").partition(" ")
    # Compare with all keys in constant time, because the duration must reveal nothing about the keys.
    digest = _digest(key.strip())
    matches = [hmac.compare_digest(digest, _digest(api_key)) for api_key in api_keys]
    if scheme.lower() != "bearer" or not any(matches):
        # Some clients search the message for OpenAI's wording.
        message = "Incorrect API key provided" if authorization else "an API key is needed"
        raise ApiError(
            401,
            f"{message}: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return digest.hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def check_content_type(content_type: str | None, content_encoding: str | None) -> None:
    """Requires the body to be uncompressed JSON in UTF-8. Raises ApiError (415)."""
    media_type, parameters = parse_options_header(content_type)
    media_type = media_type.lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        received = f'"{content_type[:80]}"' if content_type else "missing"
        raise _unsupported_media_type(f"Content-Type must be application/json, but is {received}")
    charset = parameters.get("charset", "utf-8").strip("'").lower()
    if charset not in ("utf-8", "utf8"):
        raise _unsupported_media_type(f"the body must be UTF-8, but Content-Type says charset={charset[:40]}")
    if content_encoding not in (None, "", "identity"):
        raise _unsupported_media_type(f"Content-Encoding must be absent or identity, but is {content_encoding[:40]}")


def _unsupported_media_type(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")
