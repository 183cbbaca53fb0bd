"""The server behind a real socket: the official client, disconnects, slow readers and enormous bodies."""

import asyncio
import json
import socket
from contextlib import aclosing
from pathlib import Path
from urllib.parse import urlsplit

import openai
import orjson
import pytest
from loopback import connect, until

from nanovllm_core.malloc_heaps import return_freed_memory
from nanovllm_server.chat import generation as generation_module
from nanovllm_server.observability.http_exchange import HttpExchange
from nanovllm_server.protocol.request import parse_chat_request

MESSAGES = [{"role": "user", "content": "hi"}]
# Writing "5" to this file sets the peak to the memory in use.
PEAK_RESET = Path("/proc/self/clear_refs")


@pytest.fixture
async def sdk(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


def request_bytes(**fields) -> bytes:
    body = json.dumps({"model": "scripted", "messages": MESSAGES, **fields}).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    ) + body


async def test_client_reads_a_whole_answer(sdk):
    answer = await sdk.chat.completions.create(
        model="scripted", messages=MESSAGES, logprobs=True, top_logprobs=2, n=2, seed=1, stop=["zzz"]
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 8
    entry = answer.choices[0].logprobs.content[0]
    assert (entry.token, entry.bytes, len(entry.top_logprobs)) == ("H", [72], 2)


async def test_client_reads_a_stream(sdk):
    stream = await sdk.chat.completions.create(
        model="scripted", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, logprobs=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 6


async def test_stream_helper_of_the_sdk_joins_chunks(sdk):
    async with sdk.chat.completions.stream(model="scripted", messages=MESSAGES) as stream:
        async for _ in stream:
            pass
        completion = await stream.get_final_completion()
    assert completion.choices[0].message.content == "Hello"
    assert completion.choices[0].finish_reason == "stop"


async def test_client_raises_its_own_errors(sdk, service):
    with pytest.raises(openai.BadRequestError) as error_info:
        await sdk.chat.completions.create(model="scripted", messages=MESSAGES, temperature=5)
    assert error_info.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await sdk.chat.completions.create(model="other", messages=MESSAGES)
    service.api_keys = ("secret",)
    with pytest.raises(openai.AuthenticationError):
        await sdk.models.list()


async def test_client_lists_models(sdk):
    assert [model.id async for model in sdk.models.list()] == ["scripted", "alias"]


async def test_client_raises_a_failure_in_mid_stream(sdk, engine):
    engine.delay, engine.endless = 0.01, True
    stream = await sdk.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)

    async def read():
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                engine.die("out of memory")

    with pytest.raises(openai.APIError, match="out of memory"):
        await read()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_disconnect_aborts_at_once(url, engine, service, stream, n):
    engine.delay, engine.endless = 0.01, True
    reader, writer = await connect(url)
    writer.write(request_bytes(stream=stream, n=n))
    await until(lambda: len(engine.requests) == n)
    if stream:
        await reader.readuntil(b"content")
    writer.close()
    await until(lambda: service.admission.num_active == 0, seconds=30)
    assert sorted(engine.aborted) == sorted(engine.keys)
    assert engine.num_active == 0
    assert service.metrics.http_exchanges["/v1/chat/completions", 499] == 1
    assert service.metrics.finish_reasons["abort"] == n
    assert service.running == set()


async def test_disconnect_before_the_first_token_aborts_the_request(url, engine, service):
    engine.delay, engine.endless = 60, True
    _, writer = await connect(url)
    writer.write(request_bytes(stream=True))
    await until(lambda: engine.requests)
    writer.close()
    await until(lambda: engine.aborted, seconds=30)
    await until(lambda: service.admission.num_active == 0, seconds=30)


async def test_connection_reset_within_a_body_leaves_the_server_working(url, service, sdk):
    _, writer = await connect(url)
    writer.write(request_bytes()[:-20])
    await asyncio.sleep(0.05)
    writer.transport.abort()
    await until(lambda: service.metrics.http_exchanges["/v1/chat/completions", 499] == 1)
    assert (await sdk.chat.completions.create(model="scripted", messages=MESSAGES)).choices


async def test_slow_reader_gets_larger_chunks(engine, service):
    engine.reply, engine.delay = [*b"x" * 100], 0.001
    exchange = HttpExchange(None, "/")
    chat = parse_chat_request(
        json.dumps({"model": "scripted", "messages": MESSAGES}).encode(), service.limits, service.defaults
    )
    generation = await service.start_generation(chat, exchange)
    texts = []
    async with aclosing(generation.stream_deltas()) as batches:
        async for (delta,) in batches:
            texts.append(delta.text)
            await asyncio.sleep(0.03)
    assert "".join(texts) == "x" * 100
    assert len(texts) < 30


async def test_slow_reader_gets_waiting_tokens_in_one_event(url, engine, service):
    engine.reply = [*"Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. ".encode() * 7]
    fields = {"logprobs": True, "top_logprobs": 5}
    chat = parse_chat_request(request_bytes(**fields).split(b"\r\n\r\n")[1], service.limits, service.defaults)
    generation = await service.start_generation(chat, HttpExchange(None, "/"))
    async with aclosing(generation.stream_deltas()) as batches:
        deltas = [delta async for (delta,) in batches]
    num_tokens = generation.usage.completion_tokens
    assert num_tokens == len(engine.reply) + 1

    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    parts = urlsplit(url)
    await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    writer.write(request_bytes(stream=True, stream_options={"include_usage": True}, **fields))
    # The client reads nothing until the engine is done, so that tokens wait.
    await until(lambda: len(engine.requests) == 2 and engine.num_active == 0)
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += await reader.read(512)
    writer.close()
    lines = data.replace(b"\r\n", b"\n").split(b"\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert len(choices) < num_tokens / 2
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "".join(delta.text for delta in deltas)
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
    assert entries == json.loads(orjson.dumps([entry for delta in deltas for entry in delta.logprobs]))
    assert chunks[-1]["usage"]["completion_tokens"] == num_tokens


async def test_idle_stream_is_kept_alive(url, engine, monkeypatch):
    monkeypatch.setattr(generation_module.Generation.stream_deltas, "__defaults__", (0.02,))
    engine.delay = 0.15
    engine.reply = [*b"x"]
    reader, writer = await connect(url)
    writer.write(request_bytes(stream=True))
    data = await reader.readuntil(b"data: [DONE]\n\n")
    assert data.count(b": keep-alive\n\n") >= 4
    writer.close()


def peak_bytes() -> int:
    """Peak memory of this process since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


def reset_peak() -> None:
    """Resets the peak to the memory in use, so that earlier tests do not hide memory that a test takes."""
    return_freed_memory()
    PEAK_RESET.write_text("5")


@pytest.mark.skipif(not PEAK_RESET.exists(), reason="needs Linux, to reset the peak of memory")
@pytest.mark.parametrize("chunked", [False, True])
async def test_enormous_body_is_refused_without_buffering_it(url, sdk, service, chunked):
    reset_peak()
    bytes_before = peak_bytes()
    reader, writer = await connect(url)
    length_header = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % (100 << 20)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + length_header
        + b"\r\n\r\n"
    )
    piece = b"x" * (1 << 20)
    for _ in range(100):
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        await writer.drain()
    if chunked:
        writer.write(b"0\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 413 " in head.split(b"\r\n")[0]
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    error = json.loads(await reader.readexactly(length))["error"]
    assert str(service.max_body_bytes) in error["message"]
    writer.close()
    # Buffering would take 100 MiB.
    assert peak_bytes() - bytes_before < 80 << 20
    assert (await sdk.chat.completions.create(model="scripted", messages=MESSAGES)).choices


async def test_early_refusal_of_a_large_body_reaches_a_client_that_is_still_sending(url, service):
    service.api_keys = ("secret",)
    reader, writer = await connect(url)
    writer.write(request_bytes(messages=[{"role": "user", "content": "x" * (8 << 20)}]))
    await writer.drain()
    assert b" 401 " in await reader.readline()
    writer.close()


async def test_503_of_a_drain_is_the_last_response_of_its_connection(url, service):
    reader, writer = await connect(url)
    writer.write(request_bytes())
    assert b"connection: close" not in (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readuntil(b"}")
    service.admission.shutdown_reason = "the server is shutting down"
    writer.write(request_bytes())
    async with asyncio.timeout(30):
        response = (await reader.read()).lower()
    _, _, response = response.partition(b"http/1.1 ")
    assert response.startswith(b"503")
    assert b"\r\nconnection: close\r\n" in response
    writer.close()


async def test_many_simultaneous_requests_are_answered(sdk, service):
    service.admission.capacity = 100
    answers = await asyncio.gather(
        *(sdk.chat.completions.create(model="scripted", messages=MESSAGES) for _ in range(50))
    )
    assert {answer.choices[0].message.content for answer in answers} == {"Hello"}
    assert service.admission.num_active == 0
