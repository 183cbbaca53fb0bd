"""Checks of a request's headers, before its body is read: API key and content type."""

import hashlib
import hmac
from collections.abc import Sequence

from nanovllm_server.protocol.error import ApiError


def check_key(api_keys: Sequence[str], authorization: str | None) -> None:
    """Look for the key of a request among the server's, if it has any. Raises ApiError (401)."""
    if not api_keys:
        return
    scheme, _, key = (authorization or "").partition(" ")
    # How long it takes tells nothing: digests are of one length, and all of them are compared.
    digest = _digest(key.strip())
    found = [hmac.compare_digest(digest, _digest(api_key)) for api_key in api_keys]
    if scheme.lower() != "bearer" or not any(found):
        # Clients know a wrong key by these words of OpenAI's.
        message = "Incorrect API key provided" if authorization else "an API key is needed"
        raise ApiError(
            401,
            f"{message}: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def check_content(content_type: str | None, content_encoding: str | None) -> None:
    """Refuse a body that is not plain JSON in UTF-8. Raises ApiError (415)."""
    kind, _, parameters = (content_type or "").partition(";")
    kind = kind.strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        shown = f'"{content_type[:80]}"' if content_type else "missing"
        raise _unsupported_media(f"Content-Type must be application/json, but is {shown}")
    charset = parameters.strip().lower()
    if charset.startswith("charset=") and charset.removeprefix("charset=").strip("\"' ") not in ("utf-8", "utf8"):
        raise _unsupported_media(f"the body must be UTF-8, but Content-Type says {charset[:40]}")
    if content_encoding not in (None, "", "identity"):
        raise _unsupported_media(f"Content-Encoding is not supported, but is {content_encoding[:40]}")


def _unsupported_media(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")
