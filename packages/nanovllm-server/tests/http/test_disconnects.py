import asyncio
import json
import random
from urllib.parse import urlsplit

import pytest
from loopback import connect, until

from nanovllm_models.chat_formats import HERMES, THINK, ChatFormat
from nanovllm_server.parsing.model_format import ModelFormat

NUM_CLIENTS = 300
MAX_CONCURRENT = 30
REPLY = (
    b'<think>hm, well</think>Let me see.<tool_call>\n{"name": "f", "arguments": {"x": "0123456789"}}\n</tool_call> so'
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
# Texts of a streamed response after which a client disconnects. None: after a random delay.
MOMENTS = (None, b"HTTP/1.1", b'"reasoning"', b'"content":"L', b'"tool_calls"', b"[DONE]")


@pytest.fixture
def streaming_service(service, engine, vocabulary):
    service.model_format = ModelFormat(ChatFormat(THINK, HERMES), vocabulary)
    service.admission.capacity = 3 * MAX_CONCURRENT
    engine.reply, engine.delay = [*REPLY], 0.0005
    return service


def request_bytes(rng: random.Random, **fields) -> bytes:
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "x" * rng.choice([2, 100, 600])}],
        "tools": TOOLS,
        "n": rng.choice([1, 1, 3]),
        "timeout": rng.choice([None, 0.01, 5]),
        **fields,
    }
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def send_and_disconnect(url: str, rng: random.Random) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    stream = rng.random() < 0.75
    data = request_bytes(rng, stream=stream)
    moment = rng.choice(MOMENTS)
    try:
        if rng.random() < 0.1:
            writer.write(data[: rng.randrange(len(data))])
            return
        writer.write(data)
        if moment is None or not stream:
            await asyncio.sleep(rng.choice([0, 0.001, 0.01, 0.1]))
            return
        # The server may refuse the request, fail or finish the answer before `moment`.
        seen = b""
        while moment not in seen and (piece := await reader.read(200)) and b"HTTP/1.1 4" not in seen:
            seen += piece
            if b"[DONE]" in seen or b"HTTP/1.1 5" in seen:
                break
    finally:
        if rng.random() < 0.5:
            writer.close()
        else:
            writer.transport.abort()


async def test_disconnected_clients_leave_no_tasks_or_requests(url, streaming_service, engine):
    await asyncio.sleep(0.05)
    tasks_before = asyncio.all_tasks()
    rng, slots = random.Random(0), asyncio.Semaphore(MAX_CONCURRENT)

    async def disconnect_in_turn(seed: float) -> None:
        async with slots:
            await send_and_disconnect(url, random.Random(seed))

    await asyncio.gather(*(disconnect_in_turn(rng.random()) for _ in range(NUM_CLIENTS)))
    async with asyncio.timeout(20):
        while (
            asyncio.all_tasks() - tasks_before
            or streaming_service.admission.num_active
            or streaming_service.running
            or engine.num_active
        ):
            await asyncio.sleep(0.02)
    assert streaming_service.admission.idle.is_set()
    counts_by_reason = streaming_service.metrics.finish_reasons
    assert all(counts_by_reason[reason] for reason in ("tool_calls", "abort"))
    statuses = {status for (_, status), count in streaming_service.metrics.http_exchanges.items() if count}
    assert {200, 400, 499, 504} <= statuses <= {200, 400, 429, 499, 504}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("headers", "end"),
    [
        # Java's HTTP client sends these headers.
        (b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n", b""),
        (b"", b"\r\n"),
        (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"),
    ],
    ids=["upgrade", "line break", "next request"],
)
async def test_disconnect_is_noticed_while_the_connection_reads_nothing(url, engine, service, headers, end, stream):
    await asyncio.sleep(0.05)
    tasks_before = asyncio.all_tasks()
    engine.delay, engine.endless = 0.01, True
    _, writer = await connect(url)
    line, rest = request_bytes(random.Random(0), n=1, timeout=None, stream=stream, tools=None).split(b"\r\n", 1)
    writer.write(line + b"\r\n" + headers + rest + end)
    await until(lambda: engine.requests)
    writer.close()
    await until(lambda: service.admission.num_active == 0)
    assert engine.num_active == 0
    await until(lambda: not asyncio.all_tasks() - tasks_before)
