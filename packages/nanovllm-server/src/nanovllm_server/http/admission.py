"""Checks before a request is read: API key, content type, and the number of sequences in the server."""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence

from nanovllm_server.processes.shared_counters import SharedCounters
from nanovllm_server.protocol.error import ApiError, unavailable


class AdmissionControl:
    """Counts the sequences in the server, over all workers, and refuses more than `capacity`.

    closed: once set, the reason for which all requests are refused.
    empty: set while this worker has no sequences.
    """

    def __init__(self, capacity: int, counters: SharedCounters):
        self.capacity = capacity
        self.empty = asyncio.Event()
        self.empty.set()
        self.closed: str | None = None
        self._active = counters.claim(1)
        # If this worker replaces a dead one, the sequences of the dead one are gone.
        self._active.clear()

    @property
    def active(self) -> int:
        """Sequences in the server."""
        return int(self._active.total(0))

    def admit(self, num_sequences: int) -> Callable[[], None]:
        """Count in that many sequences. Returns a function that counts them out. Raises ApiError (429, 503)."""
        if self.closed is not None:
            raise unavailable(self.closed, "draining")
        # First taken, then looked at: two workers that do so at once may both refuse, but never both admit too many.
        self._active.add(0, num_sequences)
        active = self.active
        if active > self.capacity:
            self._active.add(0, -num_sequences)
            raise ApiError(
                429,
                f"the queue is full: {active - num_sequences} sequences of at most {self.capacity} are in the server; "
                "try again in a moment",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.empty.clear()

        def leave() -> None:
            self._active.add(0, -num_sequences)
            if not self._active.own(0):
                self.empty.set()

        return leave


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
