import asyncio
import json
from random import Random

import pytest
from loopback import connect, until

from nanovllm_server import cli
from nanovllm_server.http import body_memory
from nanovllm_server.http.app import create_app
from nanovllm_server.http.body_memory import MAX_UNCOUNTED_BYTES, BodyMemory
from nanovllm_server.observability.request_body import RequestBody
from nanovllm_server.protocol.error import ApiError
from nanovllm_server.settings import SettingsError

MIB = 1 << 20


def part(data: bytes, *, more: bool = True):
    return {"type": "http.request", "body": data, "more_body": more}


class Holder:
    def __init__(self, memory: BodyMemory, num_bytes: int):
        self.release = asyncio.Event()
        self.is_holding = False
        self._memory, self._num_bytes = memory, num_bytes
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        with self._memory.hold(self._num_bytes) as share:
            await share.grow(self._num_bytes)
            self.is_holding = True
            await self.release.wait()


async def test_bodies_wait_in_order_until_memory_is_free():
    memory = BodyMemory(4 * MIB)
    holders = [Holder(memory, size * MIB) for size in (3, 2, 1)]
    await asyncio.sleep(0)
    # The third body would fit, but the second came earlier.
    assert [holder.is_holding for holder in holders] == [True, False, False]
    holders[0].release.set()
    await until(lambda: all(holder.is_holding for holder in holders[1:]))
    assert memory.num_free_bytes == MIB
    for holder in holders:
        holder.release.set()
    await asyncio.gather(*(holder.task for holder in holders))
    assert memory.num_free_bytes == 4 * MIB


async def test_bodies_get_memory_only_if_earlier_bodies_still_fit():
    memory = BodyMemory(4 * MIB)
    with memory.hold(3 * MIB) as first, memory.hold(3 * MIB) as second, memory.hold(MIB) as third:
        await first.grow(MIB)
        await second.grow(MIB)
        # The second body would take memory that the first body may need.
        second_task = asyncio.create_task(second.grow(3 * MIB))
        third_task = asyncio.create_task(third.grow(MIB))
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in (second_task, third_task))
        await first.grow(3 * MIB)
        assert memory.num_free_bytes == 0
        first.shrink(2 * MIB)
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in (second_task, third_task))
        first.shrink(0)
        await second_task
        await third_task
        assert memory.num_free_bytes == 0
    assert memory.num_free_bytes == 4 * MIB


async def test_bodies_that_grow_at_once_all_arrive():
    random = Random(0)
    memory = BodyMemory(32)
    num_grown = 0

    async def receive(max_bytes: int) -> None:
        nonlocal num_grown
        with memory.hold(max_bytes) as share:
            num_bytes = 1
            while num_bytes < max_bytes:
                num_bytes = min(2 * num_bytes, max_bytes)
                await share.grow(num_bytes)
                assert memory.num_free_bytes >= 0
                await asyncio.sleep(random.choice((0, 0, 0.001)))
            num_grown += 1
            share.shrink(random.randint(0, max_bytes))
            await asyncio.sleep(0)

    await asyncio.gather(*(receive(random.randint(1, 32)) for _ in range(300)))
    assert num_grown == 300
    assert memory.num_free_bytes == 32


@pytest.mark.parametrize("when", ["waiting", "granted", "holding"])
async def test_cancelled_body_gives_its_memory_back(when):
    memory = BodyMemory(2 * MIB)
    first, second = Holder(memory, 2 * MIB), Holder(memory, 2 * MIB)
    third = Holder(memory, MIB)
    await asyncio.sleep(0)
    if when != "waiting":
        first.release.set()
        await until(lambda: memory.num_free_bytes == 0 and first.task.done())
    if when == "holding":
        await until(lambda: second.is_holding)
    second.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second.task
    first.release.set()
    await until(lambda: third.is_holding)
    third.release.set()
    await third.task
    assert memory.num_free_bytes == 2 * MIB


async def test_body_that_waits_too_long_is_a_503(monkeypatch):
    monkeypatch.setattr(body_memory, "MAX_WAIT_S", 0.05)
    memory = BodyMemory(MIB)
    with memory.hold(MIB) as first:
        await first.grow(MIB)
        with pytest.raises(ApiError) as refused, memory.hold(MIB) as second:
            await second.grow(MIB)
    assert (refused.value.status, refused.value.code) == (503, "body_memory_full")
    assert "Retry-After" in refused.value.headers
    assert memory.num_free_bytes == MIB


async def test_share_shrinks_to_the_size_of_the_body():
    memory = BodyMemory(2 * MIB)
    with memory.hold(2 * MIB) as share:
        await share.grow(2 * MIB)
        share.shrink(MIB)
        assert memory.num_free_bytes == MIB
        share.shrink(2 * MIB)
        assert memory.num_free_bytes == MIB
    assert memory.num_free_bytes == 2 * MIB


async def test_nothing_is_kept_of_a_refused_body():
    body = RequestBody()
    body.discard()
    for _ in range(100):
        body.add(part(bytes(MIB)))
    assert not body._data
    body.add(part(b"", more=False))
    assert body.received.is_set()


async def test_body_beyond_the_limit_is_dropped():
    body = RequestBody()
    read_task = asyncio.create_task(body.read(MIB))
    await asyncio.sleep(0)
    for _ in range(3):
        body.add(part(bytes(MIB // 2)))
        assert len(body._data) <= MIB
    with pytest.raises(Exception, match="413"):
        await read_task
    assert not body._data


async def test_body_is_not_received_while_it_waits_for_memory(service):
    service.max_body_bytes = service.body_memory_bytes = MIB
    app = create_app(service)
    body = json.dumps({"model": "other", "messages": [{"role": "user", "content": "x" * (3 * MIB // 4)}]}).encode()
    headers = [(b"host", b"x"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
        "raw_path": b"/v1/chat/completions", "root_path": "", "scheme": "http", "headers": headers, "client": None,
        "server": None, "extensions": {}, "state": {}, "asgi": {"version": "3.0"},
    }  # fmt: skip
    statuses: list[int] = []
    num_received = [0, 0]
    first_arrives, second_arrives = asyncio.Event(), asyncio.Event()
    second_arrives.set()
    step = MAX_UNCOUNTED_BYTES // 4

    def make_receive(index: int, arrives: asyncio.Event):
        async def receive():
            start = num_received[index]
            # The first client waits before the second half of its body.
            if start >= len(body) // 2:
                await arrives.wait()
            if start >= len(body):
                # The client stays connected.
                await asyncio.Event().wait()
            num_received[index] += step
            return part(body[start : start + step], more=start + step < len(body))

        return receive

    async def send(event):
        if event["type"] == "http.response.start":
            statuses.append(event["status"])

    first = asyncio.create_task(app({**scope, "headers": [*headers]}, make_receive(0, first_arrives), send))
    await until(lambda: num_received[0] >= len(body) // 2)
    second = asyncio.create_task(app({**scope, "headers": [*headers]}, make_receive(1, second_arrives), send))
    await until(lambda: num_received[1] >= MAX_UNCOUNTED_BYTES)
    await asyncio.sleep(0.05)
    assert (num_received[1] <= 3 * MAX_UNCOUNTED_BYTES, statuses) == (True, [])
    first_arrives.set()
    await until(lambda: statuses == [404, 404])
    await asyncio.gather(first, second)


@pytest.mark.parametrize("num_idle", [2, 100])
@pytest.mark.parametrize("num_sent", [0, MAX_UNCOUNTED_BYTES])
async def test_idle_bodies_take_no_memory_from_others(service, serve_at, monkeypatch, num_sent, num_idle):
    monkeypatch.setattr(body_memory, "MAX_WAIT_S", 0.2)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    body = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}).encode() + b" " * 100_000
    async with serve_at(create_app(service)) as url, asyncio.timeout(60):
        idle = [await connect(url) for _ in range(num_idle)]
        for _, writer in idle:
            writer.write(head + b"%d\r\n\r\n" % service.max_body_bytes + b"{" + b" " * num_sent)
            await writer.drain()
        reader, writer = await connect(url)
        writer.write(head + b"%d\r\n\r\n" % len(body) + body)
        status_line = await reader.readline()
        writer.close()
        for _, writer in idle:
            writer.close()
    assert status_line.startswith(b"HTTP/1.1 200")


async def test_small_chunked_bodies_do_not_wait_for_large_ones(service, serve_at, monkeypatch):
    monkeypatch.setattr(body_memory, "MAX_WAIT_S", 0.05)
    service.max_body_bytes = service.body_memory_bytes = MIB
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )

    def chunk(data: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(data), data)

    small = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}).encode()
    large = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "x" * 3 * MIB}]}).encode()
    async with serve_at(create_app(service)) as url, asyncio.timeout(60):
        # These bodies are idle: the first has only begun, and the second holds the memory of large bodies.
        idle = [await connect(url) for _ in range(2)]
        for (_, writer), data in zip(idle, (b"{", large[: 2 * MAX_UNCOUNTED_BYTES]), strict=True):
            writer.write(head + chunk(data))
            await writer.drain()
        for data, status in ((small, b"200"), (large[: MIB // 2], b"503")):
            reader, writer = await connect(url)
            writer.write(head + chunk(data) + chunk(b""))
            assert (await reader.readline()).startswith(b"HTTP/1.1 " + status)
            writer.close()
        # A body that is too large is refused although its start was read.
        idle[1][1].write(chunk(large[2 * MAX_UNCOUNTED_BYTES :]))
        assert (await idle[1][0].readline()).startswith(b"HTTP/1.1 413 ")
        for _, writer in idle:
            writer.close()


@pytest.mark.parametrize("length_header", [b"Content-Length: 99999999", b"Content-Length: 1000"])
async def test_key_and_length_are_checked_before_the_body_arrives(url, service, length_header):
    reader, writer = await connect(url)
    service.api_keys = ("secret",)
    key = b"wrong" if b"1000" in length_header else b"secret"
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + key)
    writer.write(b"\r\nContent-Type: application/json\r\n" + length_header + b"\r\n\r\n")
    async with asyncio.timeout(30):
        line = await reader.readline()
    assert line.startswith(b"HTTP/1.1 401 " if key == b"wrong" else b"HTTP/1.1 413 ")
    writer.close()


def test_body_memory_is_twice_the_body_limit_by_default():
    def parse(*arguments):
        return cli.make_settings(cli.make_parser().parse_args(arguments))

    assert parse().body_memory_bytes == 32 * MIB
    assert parse("--max-body-mib", "100").body_memory_bytes == 200 * MIB
    assert parse("--body-memory-mib", "20").body_memory_bytes == 20 * MIB
    with pytest.raises(SettingsError, match="--body-memory-mib must be at least --max-body-mib, which is 16, not 15"):
        parse("--body-memory-mib", "15")
