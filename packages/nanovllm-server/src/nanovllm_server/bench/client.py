"""A client of streamed chat completions over HTTP/1.1 that records the arrival time of each piece.

A general HTTP client would need more time per piece than the server, and so limit the measurement.
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

from nanovllm_server.bench.report import BenchError
from nanovllm_server.protocol.json import JSON

# Time limit of an answer. A timer per piece would cost as much as the piece.
ANSWER_S = 3600.0
LINE_BYTES = 1 << 20
READ_BYTES = 1 << 16
ERROR_SHOWN = 300
# Fields of a delta with a piece of the answer. A delta without them has only the role.
CONTENT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class ExchangeError(RuntimeError):
    """A request got no complete answer. The message gives the reason in one line."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The parts of a base URL. prefix: path before `/chat/completions`. key: sent as a bearer token; None for none."""

    host: str
    port: int
    tls: bool
    prefix: str
    key: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. sent, pieces, ended: times of `time.perf_counter`; pieces are the arrivals of content."""

    sent: float
    pieces: tuple[float, ...]
    ended: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


def parse_base_url(url: str, key: str | None) -> Endpoint:
    """Splits a base URL into its parts. Raises BenchError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise BenchError(f"{url} is not a base URL such as http://127.0.0.1:8000/v1")
    tls = parts.scheme == "https"
    try:
        port = parts.port or (443 if tls else 80)
    except ValueError as error:
        raise BenchError(f"{url}: {error}") from error
    return Endpoint(parts.hostname, port, tls, parts.path.rstrip("/"), key)


async def list_models(endpoint: Endpoint) -> list[str]:
    """The names of the server's models. Raises ExchangeError."""
    async with _exchange(endpoint, "GET", "/models", b"") as body:
        text = b"".join([piece async for piece in body])
    try:
        return [model["id"] for model in orjson.loads(text)["data"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ExchangeError(f"the list of models is not OpenAI's: {_shown(text)}") from error


def chat_request(model: str, messages: Sequence[JSON], max_tokens: int, temperature: float) -> dict[str, JSON]:
    """The body of a streamed request whose answer has exactly `max_tokens` tokens."""
    return {
        "model": model,
        "messages": [*messages],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        # OpenAI's API lacks this field; nanovllm, vLLM and SGLang have it. Without it the model chooses the length.
        "ignore_eos": True,
    }


async def stream_chat(endpoint: Endpoint, request: JSON, on_piece: Callable[[float], None] | None = None) -> Answer:
    """Send a request that asks for a stream with usage, and read the answer. Raises ExchangeError.

    on_piece: called with the time of each piece when the piece arrives.
    """
    pieces: list[float] = []
    usage: dict[str, Any] | None = None
    finished = 0.0
    sent = time.perf_counter()
    async with (
        _exchange(endpoint, "POST", "/chat/completions", orjson.dumps(request)) as body,
        aclosing(_events(body)) as events,
    ):
        async for event in events:
            now = time.perf_counter()
            chunk = _chunk(event)
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                if any(delta.get(field) for field in CONTENT_FIELDS):
                    pieces.append(now)
                    if on_piece is not None:
                        on_piece(now)
                if choice.get("finish_reason"):
                    finished = now
    if not finished:
        raise ExchangeError("the stream ended before its answer did")
    if usage is None:
        raise ExchangeError("the server doesn't send usage in a stream")
    # An answer may have no text, for example one token that is half a character.
    return Answer(
        sent=sent,
        pieces=tuple(pieces or [finished]),
        ended=finished,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        output_tokens=usage["completion_tokens"],
    )


def _chunk(event: bytes) -> dict[str, Any]:
    try:
        chunk = orjson.loads(event)
    except orjson.JSONDecodeError as error:
        raise ExchangeError(f"an event is not JSON: {_shown(event)}") from error
    if "error" in chunk:
        raise ExchangeError(f"in mid-stream: {_shown(event)}")
    return chunk


async def _events(body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yields the data of each server-sent event, up to [DONE]. Chat completions have one line of data per event."""
    rest = b""
    async for piece in body:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data


@asynccontextmanager
async def _exchange(endpoint: Endpoint, method: str, path: str, body: bytes) -> AsyncGenerator[AsyncIterator[bytes]]:
    """Sends a request on a new connection, and yields the pieces of the body. Raises ExchangeError unless it is 200."""
    try:
        reader, writer = await asyncio.open_connection(
            endpoint.host, endpoint.port, ssl=ssl.create_default_context() if endpoint.tls else None, limit=LINE_BYTES
        )
    except OSError as error:
        raise ExchangeError(f"can't connect to {endpoint.host}:{endpoint.port}: {error.strerror or error}") from error
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            aclosing(await _request(endpoint, reader, writer, method, path, body)) as pieces,
        ):
            yield pieces
    except (OSError, EOFError, TimeoutError, ValueError) as error:
        raise ExchangeError(f"the connection broke: {type(error).__name__}: {error}") from error
    finally:
        writer.close()


async def _request(
    endpoint: Endpoint, reader: StreamReader, writer: StreamWriter, method: str, path: str, body: bytes
) -> AsyncGenerator[bytes, None]:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    lines = [
        f"{method} {endpoint.prefix}{path} HTTP/1.1",
        f"Host: {host}:{endpoint.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *([f"Authorization: Bearer {endpoint.key}"] if endpoint.key else []),
        "\r\n",
    ]
    writer.write("\r\n".join(lines).encode() + body)
    status = (await reader.readuntil(b"\n")).strip().split(maxsplit=2)
    headers: dict[bytes, bytes] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip().lower()
    pieces = _body(reader, headers)
    if len(status) < 2 or status[1] != b"200":
        text = b"".join([piece async for piece in pieces])
        raise ExchangeError(f"status {b' '.join(status[1:]).decode(errors='replace')}: {_shown(text)}")
    return pieces


async def _body(reader: StreamReader, headers: dict[bytes, bytes]) -> AsyncGenerator[bytes, None]:
    """Yields the pieces of a body that is chunked, has a Content-Length, or ends with the connection."""
    if headers.get(b"transfer-encoding") == b"chunked":
        while size := int((await reader.readline()).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        return
    left = float(headers.get(b"content-length", b"inf"))
    while left > 0 and (piece := await reader.read(int(min(left, READ_BYTES)))):
        left -= len(piece)
        yield piece


def _shown(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())[:ERROR_SHOWN]
