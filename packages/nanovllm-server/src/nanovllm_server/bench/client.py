"""A client of streamed chat completions over HTTP/1.1. Records when each piece (a delta with content) arrives.

A general HTTP client would take more time per piece than the server, and limit the measured rate.
"""

import asyncio
import ssl
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from nanovllm_server.bench.report import InvalidSettingsError
from nanovllm_server.protocol.json import JSON

# Time limit of a whole answer. A time limit per piece would double the cost of reading a piece.
ANSWER_TIMEOUT_S = 3600.0
MAX_HTTP_LINE_BYTES = 1 << 20  # A longer line of a response is an error.
MAX_BODY_PART_BYTES = 1 << 16  # Limit of one read from an unchunked body.
MAX_BODY_CHARACTERS_IN_ERROR = 300
# Fields of a delta that hold a piece of the answer. The first delta has only the role.
CONTENT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class ExchangeError(RuntimeError):
    """A request got no complete answer."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The parts of a base URL.

    path_prefix: path before `/chat/completions`.
    api_key: sent as a bearer token; None for no key.
    """

    host: str
    port: int
    uses_tls: bool
    path_prefix: str
    api_key: str | None


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """The times and token counts of one answer. Times come from `time.perf_counter`.

    start_time: time before the connection was opened.
    piece_times: arrival time of each delta with content; `(end_time,)` if no delta has content.
    end_time: arrival time of the finish reason.
    accepted_drafts, rejected_drafts: numbers of drafts (proposed tokens); 0 if not reported.
    """

    start_time: float
    piece_times: tuple[float, ...]
    end_time: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    accepted_drafts: int = 0
    rejected_drafts: int = 0

    @property
    def ttft_s(self) -> float:
        """Returns the seconds from the start of the request to the first piece of the answer."""
        return self.piece_times[0] - self.start_time


def parse_base_url(url: str, api_key: str | None) -> Endpoint:
    """Splits a base URL into its parts. Raises InvalidSettingsError if the URL is invalid."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise InvalidSettingsError(f"{url} is not a base URL such as http://127.0.0.1:8000/v1")
    uses_tls = parts.scheme == "https"
    try:
        port = parts.port or (443 if uses_tls else 80)
    except ValueError as error:
        raise InvalidSettingsError(f"{url}: {error}") from error
    return Endpoint(parts.hostname, port, uses_tls, parts.path.rstrip("/"), api_key)


async def list_models(endpoint: Endpoint) -> list[str]:
    """Asks the server for the names of its models. Raises ExchangeError."""
    body = await fetch(endpoint, "/models")
    try:
        return [model["id"] for model in orjson.loads(body)["data"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ExchangeError(f"the server's list of models is not in OpenAI's format: {_shorten(body)}") from error


async def fetch(endpoint: Endpoint, path: str) -> bytes:
    """Gets the body at `path`, which follows the base URL. Raises ExchangeError."""
    async with _open_exchange(endpoint, "GET", path, b"") as body_parts:
        return b"".join([part async for part in body_parts])


def chat_request(model: str, messages: Sequence[JSON], max_tokens: int, temperature: float) -> dict[str, JSON]:
    """Builds the body of a request for a streamed answer of exactly `max_tokens` tokens."""
    return {
        "model": model,
        "messages": [*messages],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        # Only nanovllm, vLLM and SGLang have this field. Answers of other servers may be shorter.
        "ignore_eos": True,
    }


async def stream_chat(
    endpoint: Endpoint, request: JSON, on_piece: Callable[[float], None] | None = None
) -> TimedAnswer:
    """Sends the body that `chat_request` built, and reads the whole answer. Raises ExchangeError.

    on_piece: called with the arrival time of each piece.
    """
    piece_times: list[float] = []
    usage: dict[str, Any] | None = None
    end_time = 0.0
    start_time = time.perf_counter()
    async with (
        _open_exchange(endpoint, "POST", "/chat/completions", orjson.dumps(request)) as body_parts,
        aclosing(_read_events(body_parts)) as events,
    ):
        async for event in events:
            now = time.perf_counter()
            chunk = _parse_chunk(event)
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                if any(delta.get(field) for field in CONTENT_FIELDS):
                    piece_times.append(now)
                    if on_piece is not None:
                        on_piece(now)
                if choice.get("finish_reason"):
                    end_time = now
    if not end_time:
        raise ExchangeError("the stream ended before the answer was complete")
    if usage is None:
        raise ExchangeError("the server doesn't send usage in a stream")
    output_details = usage.get("completion_tokens_details") or {}
    # An answer of one token has no piece if the token holds only a part of a character.
    return TimedAnswer(
        start_time=start_time,
        piece_times=tuple(piece_times or [end_time]),
        end_time=end_time,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        output_tokens=usage["completion_tokens"],
        accepted_drafts=output_details.get("accepted_prediction_tokens") or 0,
        rejected_drafts=output_details.get("rejected_prediction_tokens") or 0,
    )


def _parse_chunk(event: bytes) -> dict[str, Any]:
    try:
        chunk = orjson.loads(event)
    except orjson.JSONDecodeError as error:
        raise ExchangeError(f"an event is not JSON: {_shorten(event)}") from error
    if "error" in chunk:
        raise ExchangeError(f"the server sent an error in the stream: {_shorten(event)}")
    return chunk


async def _read_events(body_parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yields the data of each server-sent event before [DONE]. Assumes one line of data per event."""
    incomplete_line = b""
    async for part in body_parts:
        *lines, incomplete_line = (incomplete_line + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data


@asynccontextmanager
async def _open_exchange(
    endpoint: Endpoint, method: str, path: str, body: bytes
) -> AsyncGenerator[AsyncIterator[bytes]]:
    """Sends a request on a new connection, and yields an iterator over the response's body in parts.

    Raises ExchangeError if the connection breaks or the status is not 200.
    """
    try:
        reader, writer = await asyncio.open_connection(
            endpoint.host,
            endpoint.port,
            ssl=ssl.create_default_context() if endpoint.uses_tls else None,
            limit=MAX_HTTP_LINE_BYTES,
        )
    except OSError as error:
        raise ExchangeError(f"can't connect to {endpoint.host}:{endpoint.port}: {error.strerror or error}") from error
    try:
        async with (
            asyncio.timeout(ANSWER_TIMEOUT_S),
            aclosing(await _send_request(endpoint, reader, writer, method, path, body)) as body_parts,
        ):
            yield body_parts
    except (OSError, EOFError, TimeoutError, ValueError) as error:
        raise ExchangeError(f"the connection broke: {type(error).__name__}: {error}") from error
    finally:
        writer.close()


async def _send_request(
    endpoint: Endpoint, reader: StreamReader, writer: StreamWriter, method: str, path: str, body: bytes
) -> AsyncGenerator[bytes, None]:
    """Sends a request. Returns an iterator over the response's body. Raises ExchangeError if the status is not 200."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    head_lines = [
        f"{method} {endpoint.path_prefix}{path} HTTP/1.1",
        f"Host: {host}:{endpoint.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *([f"Authorization: Bearer {endpoint.api_key}"] if endpoint.api_key else []),
        "\r\n",
    ]
    writer.write("\r\n".join(head_lines).encode() + body)
    status_fields = (await reader.readuntil(b"\n")).strip().split(maxsplit=2)
    headers: dict[bytes, bytes] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip().lower()
    body_parts = _read_body(reader, headers)
    if len(status_fields) < 2 or status_fields[1] != b"200":
        error_body = b"".join([part async for part in body_parts])
        raise ExchangeError(f"status {b' '.join(status_fields[1:]).decode(errors='replace')}: {_shorten(error_body)}")
    return body_parts


async def _read_body(reader: StreamReader, headers: dict[bytes, bytes]) -> AsyncGenerator[bytes, None]:
    """Yields the parts of a body. Without chunks and Content-Length, the body ends when the server disconnects."""
    if headers.get(b"transfer-encoding") == b"chunked":
        while size := int((await reader.readline()).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        return
    remaining_bytes = float(headers.get(b"content-length", b"inf"))
    while remaining_bytes > 0 and (part := await reader.read(int(min(remaining_bytes, MAX_BODY_PART_BYTES)))):
        remaining_bytes -= len(part)
        yield part


def _shorten(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())[:MAX_BODY_CHARACTERS_IN_ERROR]
