"""Decodes the JSON body of a request, and limits how many values the body has."""

from typing import cast

import orjson

from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.json import JSON

# Maximum number of values in a body. `orjson` blocks the worker's other threads while it decodes: up to 80 ms for this
# number of values. A body of 16 MiB can have 5,000,000 empty lists, which would take 1.7 s.
MAX_VALUES = 250_000
# One of these bytes precedes every value except the outermost. Only a key may stand between the byte and the value.
_BYTES_BEFORE_VALUES = b"[{,"
_BYTES_TO_SKIP = bytes(set(range(256)) - set(b'"' + _BYTES_BEFORE_VALUES))


def parse_body(data: bytes | bytearray) -> dict[str, JSON]:
    """Decodes `data`. Raises ApiError (400) if `data` is not a JSON object or has too many values."""
    if _has_too_many_values(data):
        raise ApiError(400, f"the body has more than {MAX_VALUES} JSON values: send fewer", code="too_many_values")
    try:
        body = cast(JSON, orjson.loads(data))
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


def _has_too_many_values(data: bytes | bytearray) -> bool:
    if len(data) <= MAX_VALUES:
        return False
    # One call of `translate` takes less than half the time of three calls of `count`.
    if len(data) - len(data.translate(None, _BYTES_BEFORE_VALUES)) <= MAX_VALUES:
        return False
    # Strings may contain these bytes, for example a long text with many commas: count again without strings.
    without_escapes = data.replace(rb"\\", b"").replace(rb"\"", b"")
    quotes_and_bytes_before_values = without_escapes.translate(None, _BYTES_TO_SKIP)
    if quotes_and_bytes_before_values.count(b'"') > 4 * MAX_VALUES:
        # At most two strings (four quotes) follow each comma or bracket, so there are too many commas and brackets.
        return True
    return sum(map(len, quotes_and_bytes_before_values.split(b'"')[::2])) > MAX_VALUES
