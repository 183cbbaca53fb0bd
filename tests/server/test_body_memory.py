import asyncio
import json
import resource
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.slow

NUM_CLIENTS = 1000
MAX_WORKER_BYTES = 300 << 20
SEND_S = 3
KEY = "secret"
# A request for another model is refused once its body has been parsed.
PREFIX = b'{"model": "other", "messages": [{"role": "user", "content": "'
SUFFIX = b'"}]}'
BODY_BYTES = 16 << 20
PIECE = b"x" * (1 << 16)


@pytest.fixture(scope="module")
def server(run_server, tiny_model):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, NUM_CLIENTS + 256)), hard))
    flags = ("--max-model-len", "256", "--cpu-cache-gib", "0.02", "--served-model-name", "tiny", "--api-key", KEY)
    with run_server(tiny_model, *flags, "--log-level", "error") as server:
        yield server
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def peak_bytes(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


async def send_large_body(url: str, key: str, end_s: float) -> None:
    parts = urlsplit(url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {BODY_BYTES}\r\n\r\n".encode() + PREFIX)
    num_bytes_left = BODY_BYTES - len(PREFIX) - len(SUFFIX)
    try:
        while num_bytes_left and time.monotonic() < end_s:
            writer.write(PIECE[:num_bytes_left])
            num_bytes_left -= len(PIECE[:num_bytes_left])
            await asyncio.wait_for(writer.drain(), max(end_s - time.monotonic(), 0.001))
        if not num_bytes_left:
            writer.write(SUFFIX)
    except TimeoutError:
        # The server reads no body that waits for memory.
        pass
    except ConnectionError:
        # Later, the server closes the connections of requests that it has refused.
        if time.monotonic() < end_s:
            raise
    finally:
        writer.transport.abort()


def send_small_request(url: str) -> int:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.status


@pytest.mark.parametrize("key", ["wrong", KEY], ids=["with a wrong key", "with a key"])
async def test_large_bodies_of_many_clients_leave_a_worker_small(server, key):
    (pid,) = server.worker_pids()
    end_s = time.monotonic() + SEND_S
    clients = [asyncio.create_task(send_large_body(server.url, key, end_s)) for _ in range(NUM_CLIENTS)]
    await asyncio.sleep(SEND_S / 2)
    assert await asyncio.to_thread(send_small_request, server.url) == 200
    await asyncio.gather(*clients)
    print(f"peak memory of the worker: {peak_bytes(pid) / (1 << 20):.0f} MiB")
    assert peak_bytes(pid) < MAX_WORKER_BYTES
    assert server.worker_pids() == [pid]
