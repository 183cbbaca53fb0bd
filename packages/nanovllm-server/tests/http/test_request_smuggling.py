"""Requests that a proxy and the server may read differently get at most one answer.

Sources: RFC 9112, sections 2.2, 3.2, 5.1, 5.2, 6.1, 6.3 and 7.1; https://portswigger.net/web-security/request-smuggling
"""

import asyncio
import json
import re

import pytest
from loopback import connect

BODY = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}).encode()
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
REQUEST_LINE = b"POST /v1/chat/completions HTTP/1.1"
LENGTH_HEADER = b"Content-Length: %d" % len(BODY)
CHUNKED_HEADER = b"Transfer-Encoding: chunked"


def request(*headers: bytes, start: bytes = REQUEST_LINE, body: bytes = BODY) -> bytes:
    return b"\r\n".join([start, b"Host: x", b"Content-Type: application/json", *headers, b"", b""]) + body


def chunked(chunks: bytes) -> bytes:
    return request(CHUNKED_HEADER, body=chunks)


REFUSED_FORMS = {
    "CL.TE": request(LENGTH_HEADER, CHUNKED_HEADER, body=b"0\r\n\r\n"),
    "TE.CL": request(CHUNKED_HEADER, b"Content-Length: 4", body=CHUNK + b"0\r\n\r\n"),
    "length 0 and chunks": request(b"Content-Length: 0", CHUNKED_HEADER, body=CHUNK + b"0\r\n\r\n"),
    "TE of HTTP/1.0 and a length": request(
        LENGTH_HEADER, CHUNKED_HEADER, start=b"POST /v1/chat/completions HTTP/1.0", body=b"0\r\n\r\n"
    ),
    "unknown coding": request(b"Transfer-Encoding: xchunked", LENGTH_HEADER),
    "two codings": request(b"Transfer-Encoding: chunked, identity", LENGTH_HEADER),
    "identity": request(b"Transfer-Encoding: identity", LENGTH_HEADER),
    "two Transfer-Encodings": request(CHUNKED_HEADER, b"Transfer-Encoding: identity", LENGTH_HEADER),
    "quoted coding": request(b'Transfer-Encoding: "chunked"', LENGTH_HEADER),
    "coding with a parameter": request(b"Transfer-Encoding: chunked;q=1", LENGTH_HEADER),
    "empty coding": request(b"Transfer-Encoding:", LENGTH_HEADER),
    "space before the colon": request(b"Transfer-Encoding : chunked", LENGTH_HEADER),
    "tab before the colon": request(b"Transfer-Encoding\t: chunked", LENGTH_HEADER),
    "space before the name": request(b" Transfer-Encoding: chunked", LENGTH_HEADER),
    "vertical tab in the coding": request(b"Transfer-Encoding: \x0bchunked", LENGTH_HEADER),
    "NUL in the coding": request(b"Transfer-Encoding: chunked\x00", LENGTH_HEADER),
    "return in the coding": request(b"Transfer-Encoding: chunked\r", LENGTH_HEADER),
    "coding after a bare line feed": request(b"X: y\n" + CHUNKED_HEADER, LENGTH_HEADER),
    "coding after a bare return": request(b"X: y\r" + CHUNKED_HEADER, LENGTH_HEADER),
    "folded coding": request(b"Transfer-Encoding:\r\n chunked", LENGTH_HEADER),
    "folded header": request(b"X: y\r\n\tz", LENGTH_HEADER),
    "folded first header": REQUEST_LINE + b"\r\n Host: x\r\n" + LENGTH_HEADER + b"\r\n\r\n" + BODY,
    "two lengths": request(LENGTH_HEADER, b"Content-Length: 1"),
    "two lengths in one header": request(LENGTH_HEADER + b", 1"),
    "negative length": request(b"Content-Length: -1"),
    "length with a plus": request(b"Content-Length: +%d" % len(BODY)),
    "length with a space": request(b"Content-Length: 1 0"),
    "length with an underscore": request(b"Content-Length: 1_0"),
    "hexadecimal length": request(b"Content-Length: 0x10"),
    "fractional length": request(b"Content-Length: 10.0"),
    "length with a comma": request(b"Content-Length: 10,"),
    "empty length": request(b"Content-Length:"),
    "length of 21 digits": request(b"Content-Length: " + b"9" * 21),
    "length before a NUL": request(b"Content-Length: 10\x00"),
    "bare line feeds": request(LENGTH_HEADER).replace(b"\r\n", b"\n"),
    "bare line feed after the first line": request(LENGTH_HEADER).replace(b"\r\n", b"\n", 1),
    "bare line feeds at the end of the head": request(LENGTH_HEADER, body=b"").rstrip(b"\r\n") + b"\n\n" + BODY,
    "bare returns": REQUEST_LINE + b"\rHost: x\r\r" + BODY + b"\r\n\r\n",
    "empty first line": b"\r\n" + request(LENGTH_HEADER),
    "bare line feed as the first line": b"\n" + request(LENGTH_HEADER),
    "NUL in a name": request(b"X\x00Y: z", LENGTH_HEADER),
    "NUL in a value": request(b"X: y\x00z", LENGTH_HEADER),
    "header without a colon": request(b"nothing", LENGTH_HEADER),
    "header without a name": request(b": nothing", LENGTH_HEADER),
    "two hosts": request(b"Host: y", LENGTH_HEADER),
    "absolute form": request(LENGTH_HEADER, start=b"POST http://x/v1/chat/completions HTTP/1.1"),
    "absolute form of another host": request(LENGTH_HEADER, start=b"POST https://y/v1/chat/completions HTTP/1.1"),
    "authority form": request(LENGTH_HEADER, start=b"CONNECT y:443 HTTP/1.1"),
    "asterisk form": request(LENGTH_HEADER, start=b"OPTIONS * HTTP/1.1"),
    "only a query": request(LENGTH_HEADER, start=b"POST ?x HTTP/1.1"),
    "path without a slash": request(LENGTH_HEADER, start=b"POST v1/chat/completions HTTP/1.1"),
    "two spaces in the first line": request(LENGTH_HEADER, start=b"POST  /v1/chat/completions HTTP/1.1"),
    "space in the path": request(LENGTH_HEADER, start=b"POST /v1/chat/completions x HTTP/1.1"),
    "no version": request(LENGTH_HEADER, start=b"POST /v1/chat/completions"),
    "long header": request(b"X: " + b"y" * 300_000, LENGTH_HEADER),
    "many headers": request(*[b"X: y"] * 50_000, LENGTH_HEADER),
    "chunk of 21 digits": chunked(b"0" * 20 + b"1\r\nx\r\n0\r\n\r\n"),
    "negative chunk": chunked(b"-1\r\nx\r\n0\r\n\r\n"),
    "chunk with a plus": chunked(b"+1\r\nx\r\n0\r\n\r\n"),
    "chunk with 0x": chunked(b"0x1\r\nx\r\n0\r\n\r\n"),
    "chunk with an underscore": chunked(b"1_0\r\n" + b"x" * 16 + b"\r\n0\r\n\r\n"),
    "chunk with a comma": chunked(b"1,\r\nx\r\n0\r\n\r\n"),
    "space before a chunk's size": chunked(b" 1\r\nx\r\n0\r\n\r\n"),
    "empty chunk's size": chunked(b"\r\nx\r\n0\r\n\r\n"),
    "bare line feed after a chunk's size": chunked(b"1\nx\r\n0\r\n\r\n"),
    "bare line feed after a chunk": chunked(b"1\r\nx\n0\r\n\r\n"),
    "bare line feed in a chunk's extension": chunked(b"1;a\nb\r\nx\r\n0\r\n\r\n"),
    "long chunk": chunked(b"1\r\nxx\r\n0\r\n\r\n"),
    "trailer without a colon": chunked(CHUNK + b"0\r\nnothing\r\n\r\n"),
    "long chunk's extension": chunked(b"1;" + b"a" * 300_000 + b"\r\nx\r\n0\r\n\r\n"),
}  # fmt: skip

ANSWERED_FORMS = {
    "chunks": chunked(CHUNK + b"0\r\n\r\n"),
    "capital coding": request(b"Transfer-Encoding: CHUNKED", body=CHUNK + b"0\r\n\r\n"),
    "spaces around the coding": request(b"Transfer-Encoding: \t chunked \t", body=CHUNK + b"0\r\n\r\n"),
    "chunk's extension": chunked(CHUNK.replace(b"\r\n", b';a="b;c"\r\n', 1) + b"0;d\r\n\r\n"),
    "return in a chunk's extension": chunked(CHUNK.replace(b"\r\n", b";a\rb\r\n", 1) + b"0\r\n\r\n"),
    "zeros before a chunk's size": chunked(b"000" + CHUNK + b"00000\r\n\r\n"),
    "space after a chunk's size": chunked(CHUNK.replace(b"\r\n", b" \r\n", 1) + b"0\r\n\r\n"),
    "trailer": chunked(CHUNK + b"0\r\nContent-Length: 5\r\n\r\n"),
    "bare line feed after the last chunk": chunked(CHUNK + b"0\r\n\n"),
    "bare line feeds in the trailer": chunked(CHUNK + b"0\r\nX: y\n\n"),
}  # fmt: skip


async def send_and_read(url: str, data: bytes) -> list[int]:
    reader, writer = await connect(url)

    async def send() -> None:
        try:
            writer.write(data + SMUGGLED)
            await writer.drain()
        except ConnectionError:
            pass

    send_task = asyncio.create_task(send())
    received = b""
    try:
        async with asyncio.timeout(30):
            while part := await reader.read(1 << 16):
                received += part
    except ConnectionResetError:
        pass  # The server closed the connection while more data arrived.
    finally:
        send_task.cancel()
        writer.transport.abort()
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


@pytest.mark.parametrize("form", REFUSED_FORMS)
async def test_ambiguous_request_is_refused_and_the_connection_closes(url, engine, form):
    statuses = await send_and_read(url, REFUSED_FORMS[form])
    assert len(statuses) <= 1
    assert set(statuses) <= {400, 413, 431, 501}
    assert engine.requests == []


@pytest.mark.parametrize("form", ANSWERED_FORMS)
async def test_chunked_request_is_the_last_of_its_connection(url, engine, form):
    assert await send_and_read(url, ANSWERED_FORMS[form]) == [200]
    assert len(engine.requests) == 1


async def test_size_of_a_chunk_does_not_overflow(url, engine):
    reader, writer = await connect(url)
    # Modulo 2 ** 64, the size would be 1.
    writer.write(chunked(b"10000000000000001\r\nx\r\n0\r\n\r\n" + SMUGGLED))
    writer.write_eof()
    async with asyncio.timeout(30):
        received = await reader.read()
    writer.close()
    assert received.count(b"HTTP/1.1 ") <= 1
    assert engine.requests == []


async def test_refusal_of_invalid_http_is_a_json_error(url):
    for data, status in (
        (request(b"X: y\n"), 400),
        (request(LENGTH_HEADER, CHUNKED_HEADER, body=CHUNK + b"0\r\n\r\n"), 400),
        (request(b"Transfer-Encoding: gzip"), 501),
        (b"GET http://x/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400),
    ):
        reader, writer = await connect(url)
        writer.write(data)
        async with asyncio.timeout(30):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in head.lower()
        assert json.loads(body)["error"]["code"] == "invalid_http"


async def test_two_requests_with_lengths_share_a_connection(url):
    reader, writer = await connect(url)
    writer.write(request(LENGTH_HEADER) + request(LENGTH_HEADER, b"Connection: close"))
    async with asyncio.timeout(30):
        received = await reader.read()
    writer.close()
    assert received.count(b"HTTP/1.1 200 ") == 2
