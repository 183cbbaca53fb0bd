"""Protection against harmful clients: API keys, timeouts, limits for slow readers and writers."""

import asyncio
import contextlib
import json
import socket
import sys
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from loopback import connect, expire_after_first_token, until
from sse import parse_events

from nanovllm_server import cli
from nanovllm_server.http.app import create_app
from nanovllm_server.processes.server import bind
from nanovllm_server.settings import SettingsError, read_template

MAX_ATTEMPTS = 4
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


def request_bytes(body: bytes | None = None, *headers: bytes, **fields) -> bytes:
    body = json.dumps({**BODY, **fields}).encode() if body is None else body
    lines = [b"POST /v1/chat/completions HTTP/1.1", b"Host: x", b"Content-Type: application/json", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


def parse_settings(*arguments):
    return cli.make_settings(cli.make_parser().parse_args(arguments))


def test_keys_come_from_flags_a_file_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(cli.API_KEY_VARIABLE, "of-the-environment")
    assert parse_settings().api_keys == ("of-the-environment",)
    file = tmp_path / "keys"
    file.write_text("# for the team\nfirst\n\n  second  \n")
    assert parse_settings("--api-key", "a", "--api-key", "b").api_keys == ("a", "b")
    assert parse_settings("--api-key", "a", "--api-key-file", str(file)).api_keys == ("a", "first", "second")
    monkeypatch.delenv(cli.API_KEY_VARIABLE)
    assert parse_settings().api_keys == ()


@pytest.mark.parametrize("key", ["", "  ", " sesame", "sésame", "ses\tame"])
def test_key_that_a_header_cannot_hold_is_refused_and_not_shown(key):
    with pytest.raises(SettingsError) as refused:
        parse_settings("--api-key", key)
    assert not key.strip() or key not in str(refused.value)


def test_key_file_without_a_key_is_refused(tmp_path):
    file = tmp_path / "keys"
    with pytest.raises(SettingsError, match="can't read"):
        parse_settings("--api-key-file", str(file))
    file.write_text("# none\n\n")
    with pytest.raises(SettingsError, match="no API key"):
        parse_settings("--api-key-file", str(file))


@pytest.mark.parametrize("flag", ["--request-timeout", "--drain-timeout"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_invalid_timeouts_are_refused(flag, value, capsys):
    with pytest.raises(SystemExit):
        parse_settings(flag, value)
    assert flag in capsys.readouterr().err


def test_chat_template_is_a_text_or_a_file(tmp_path):
    file = tmp_path / "template"
    file.write_text("{{ messages }}")
    assert read_template(str(file)) == "{{ messages }}"
    assert read_template("{% for m in messages %}x{% endfor %}") == "{% for m in messages %}x{% endfor %}"
    with pytest.raises(SettingsError, match="can't read the chat template"):
        read_template(str(tmp_path / "none"))


async def test_each_api_key_is_accepted(post, service):
    service.api_keys = ("first", "second")
    for key in service.api_keys:
        assert (await post(headers={"Authorization": f"Bearer {key}"})).status_code == 200
    for key in ("firs", "firstt", "first second", "", "First"):
        assert (await post(headers={"Authorization": f"Bearer {key}"})).status_code == 401


async def test_prefix_cache_is_reset_only_with_the_admin_key(service, engine):
    client_of_server_without_key = create_app(service).test_client()
    assert (await client_of_server_without_key.post("/reset_prefix_cache")).status_code == 404
    service.admin_api_key, service.api_keys = "admin", ("user",)
    client = create_app(service).test_client()
    for authorization in ("Bearer user", "Bearer", ""):
        response = await client.post("/reset_prefix_cache", headers={"Authorization": authorization})
        assert response.status_code == 401
    assert engine.num_resets == 0
    admin_headers = {"Authorization": "Bearer admin"}
    assert (await client.get("/reset_prefix_cache", headers=admin_headers)).status_code == 405
    assert (await client.post("/reset_prefix_cache", headers=admin_headers)).status_code == 200
    assert engine.num_resets == 1
    engine.die("it broke")
    assert (await client.post("/reset_prefix_cache", headers=admin_headers)).status_code == 503


def test_the_admin_key_can_not_be_an_api_key():
    with pytest.raises(SettingsError, match="--admin-api-key must differ from all API keys"):
        parse_settings("--api-key", "a", "--admin-api-key", "a")
    assert parse_settings("--api-key", "a", "--admin-api-key", "b").admin_api_key == "b"
    assert parse_settings().admin_api_key is None


async def test_each_key_has_its_own_cache_salt(post, service, engine):
    service.api_keys = ("first", "second")
    for key, salt in (("first", ""), ("first", "a"), ("second", ""), ("first", "")):
        await post(headers={"Authorization": f"Bearer {key}"}, cache_salt=salt)
    salts = [request.cache_salt for request in engine.requests]
    assert len(set(salts[:3])) == 3
    assert salts[3] == salts[0]


@pytest.mark.parametrize("priority", [-1, 1])
async def test_priority_is_refused_unless_the_operator_allows_it(post, service, engine, priority):
    error = (await (await post(priority=priority)).get_json())["error"]
    assert (error["param"], error["code"]) == ("priority", "unsupported_parameter")
    assert "--allow-priority" in error["message"]
    service.allow_priority = True
    for value in (priority, 0, None):
        assert (await post(priority=value)).status_code == 200
    assert [request.priority for request in engine.requests] == [priority, 0, 0]


async def test_priority_without_effect_is_accepted(post):
    for priority in (0, None):
        assert (await post(priority=priority)).status_code == 200


async def test_messages_that_cannot_fit_are_refused_before_they_are_encoded(post, tokenizer, monkeypatch):
    encoded = []
    monkeypatch.setattr(tokenizer, "encode", lambda text, **_: encoded.append(text))
    response = await post(messages=[{"role": "user", "content": "x" * 100_000}])
    assert response.status_code == 400
    error = (await response.get_json())["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert "at least" in error["message"]
    assert encoded == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limited_by", ["request", "server", "both"])
async def test_timeout_before_the_first_token_is_a_504(post, engine, service, stream, limited_by):
    engine.delay = 60
    fields = {} if limited_by == "server" else {"timeout": 0.1 if limited_by == "request" else 50}
    service.request_timeout_s = None if limited_by == "request" else 0.1
    response = await post(stream=stream, **fields)
    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"
    error = (await response.get_json())["error"]
    assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout_error")
    assert "0.1 s" in error["message"]
    assert engine.aborted == [engine.keys[0]]
    assert service.admission.num_active == 0
    assert service.running == set()


async def test_timeout_while_a_grammar_compiles_is_a_504(post, engine, service):
    engine.compiling_s = 60
    response = await post(timeout=0.1, response_format={"type": "json_object"})
    assert response.status_code == 504
    assert (await response.get_json())["error"]["code"] == "deadline_exceeded"
    assert engine.requests == []
    assert service.admission.num_active == 0


async def test_timeout_in_mid_stream_is_an_error_event(post, engine, service):
    engine.delay, engine.endless = 0.01, True
    answer = asyncio.create_task(post(stream=True, timeout=30))
    await expire_after_first_token(service)
    data = await (await answer).get_data()
    first, *_, last = parse_events(data)
    assert first["choices"]
    assert b"\n\nevent: error\n" in data
    assert last["error"]["code"] == "deadline_exceeded"
    assert service.admission.num_active == 0
    assert engine.num_active == 0


async def test_timeout_without_streaming_is_a_504(post, engine, service):
    engine.delay, engine.endless = 0.01, True
    assert (await post(timeout=0.2)).status_code == 504
    assert service.metrics.finish_reasons["abort"] == 1


async def test_answer_within_the_timeout_is_a_200(post):
    assert (await post(timeout=30)).status_code == 200


async def test_client_that_does_not_read_is_dropped(app, service, engine, serve_at):
    engine.endless, engine.burst, engine.delay = True, 40, 0.001
    async with serve_at(app, write_timeout_s=0.3) as url:
        parts = urlsplit(url)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
        service.engine.info = SimpleNamespace(**{**info_fields(engine.info), "max_model_len": 10**9})
        await asyncio.get_running_loop().sock_sendall(
            sock, request_bytes(stream=True, logprobs=True, top_logprobs=20, max_tokens=10**8)
        )
        await until(lambda: engine.requests)
        await until(lambda: service.admission.num_active == 0)
        assert engine.num_active == 0
        assert engine.aborted == [engine.keys[0]]
        assert service.metrics.http_exchanges["/v1/chat/completions", 499] == 1
        sock.setblocking(True)
        sock.settimeout(5)

        def read_all():
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(1 << 16):
                    pass

        # Reading ends because the server has closed the connection.
        await asyncio.to_thread(read_all)
        sock.close()


def info_fields(info):
    return {name: getattr(info, name) for name in info.__dataclass_fields__} | {"kv_cache_tokens": 0}


@pytest.mark.parametrize(
    "partial_head", [b"", b"POST /v1/chat/comp", b"GET / HTTP/1.1\r\nHost: x\r\n", b"GET / HTTP/1.1\r\nX: "]
)
async def test_unfinished_request_head_is_cut_off(app, serve_at, partial_head):
    async with serve_at(app, keep_alive_s=0.3) as url:
        reader, writer = await connect(url)
        writer.write(partial_head)

        async def trickle():
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"a")
                    await asyncio.sleep(0.02)

        trickle_task = asyncio.create_task(trickle())
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        trickle_task.cancel()
        writer.close()


async def send_and_read_answer(reader, writer):
    writer.write(request_bytes())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))


async def test_idle_connection_is_closed_after_the_keep_alive(app, serve_at):
    async with serve_at(app, keep_alive_s=0.3) as url:
        reader, writer = await connect(url)
        await send_and_read_answer(reader, writer)
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()


async def test_each_request_restarts_the_keep_alive(app, serve_at):
    """If the test is stopped between two requests for longer than the keep-alive, it tries again."""

    async def send_requests_with_pauses():
        reader, writer = await connect(url)
        try:
            await send_and_read_answer(reader, writer)
            for _ in range(3):
                await asyncio.sleep(0.2)
                await send_and_read_answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        finally:
            writer.close()
        return True

    async with serve_at(app, keep_alive_s=0.5) as url:
        for _ in range(MAX_ATTEMPTS):
            if await send_requests_with_pauses():
                return
    pytest.fail(f"the server closed {MAX_ATTEMPTS} connections in use")


async def test_a_stream_outlasts_the_keep_alive(app, engine, serve_at):
    engine.delay, engine.reply = 0.05, [*b"twelve token"]
    async with serve_at(app, keep_alive_s=0.2) as url:
        reader, writer = await connect(url)
        writer.write(request_bytes(stream=True))
        async with asyncio.timeout(30):
            assert (await reader.readuntil(b"[DONE]")).count(b'"content":') == 12 + 1
        writer.close()


async def test_unfinished_body_is_a_408(app, service, serve_at, monkeypatch):
    monkeypatch.setattr("nanovllm_server.http.app.BODY_TIMEOUT_S", 0.2)
    monkeypatch.setattr("nanovllm_server.observability.http_exchange.LINGER_S", 0.2)
    async with serve_at(app) as url:
        reader, writer = await connect(url)
        writer.write(request_bytes()[:-10])
        async with asyncio.timeout(30):
            data = await reader.read()
        assert data.startswith(b"HTTP/1.1 408")
        assert b'"error"' in data
        writer.close()
    assert service.admission.num_active == 0


@pytest.mark.parametrize(("length", "is_first_alone"), [(40, True), (5, False)])
async def test_other_choices_wait_for_the_first_token_if_the_prompt_fills_a_block(
    post, engine, service, length, is_first_alone
):
    engine.delay, engine.reply = 0.05, [*b"abc"]
    request_task = asyncio.create_task(post(n=4, messages=[{"role": "user", "content": "x" * length}]))
    await until(lambda: engine.requests)
    assert len(engine.requests) == (1 if is_first_alone else 4)
    body = await (await request_task).get_json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["abc"] * 4
    assert body["usage"]["completion_tokens"] == 16
    assert len({request.arrival_time for request in engine.requests}) == 1


async def test_choices_start_at_once_without_a_prefix_cache(post, engine):
    engine.info = SimpleNamespace(**{**info_fields(engine.info), "prefix_caching": False})
    engine.delay = 0.05
    request_task = asyncio.create_task(post(n=4, messages=[{"role": "user", "content": "x" * 40}]))
    await until(lambda: engine.requests)
    assert len(engine.requests) == 4
    assert (await request_task).status_code == 200


@pytest.mark.parametrize("when", ["before", "after"])
async def test_disconnect_before_or_after_other_choices_start_frees_everything(url, engine, service, when):
    engine.delay, engine.endless = (30.0 if when == "before" else 0.02), True
    _, writer = await connect(url)
    writer.write(request_bytes(stream=True, n=4, messages=[{"role": "user", "content": "x" * 40}]))
    await until(lambda: len(engine.requests) == (1 if when == "before" else 4))
    writer.close()
    await until(lambda: service.admission.num_active == 0, seconds=30)
    assert engine.num_active == 0
    assert len(engine.aborted) == len(engine.requests)


@pytest.mark.parametrize("key", ["Sec-WebSocket-Key: eA==\r\n", ""])
async def test_websocket_handshake_is_answered_like_any_other_request(url, key):
    reader, writer = await connect(url)
    headers = f"Host: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n{key}"
    writer.write(f"GET /v1/chat/completions HTTP/1.1\r\n{headers}\r\n".encode())
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 405 ")
        assert b"\r\nx-request-id: " in head
        await reader.readuntil(b"}}")
        # The connection still serves requests, and ends with the last response.
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_http_2_upgrade_is_answered_with_http_1(url):
    reader, writer = await connect(url)
    headers = b"Host: x\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    writer.write(b"GET /health HTTP/1.1\r\n" + headers + b"\r\n")
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        await reader.readuntil(b"}")
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_http_2_without_an_upgrade_is_refused(url):
    reader, writer = await connect(url)
    empty_settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + empty_settings)
    async with asyncio.timeout(30):
        received = await reader.read()
    assert received.startswith(b"HTTP/1.1 400 ")
    assert empty_settings not in received
    writer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this timeout")
async def test_kernel_drops_a_client_that_acknowledges_nothing(monkeypatch):
    monkeypatch.setattr("nanovllm_server.processes.server.ACKNOWLEDGE_TIMEOUT_S", 1)
    (listener,) = bind("127.0.0.1", 0, 1)
    listener.listen()
    loop = asyncio.get_running_loop()
    with listener, socket.create_connection(listener.getsockname()), (await loop.sock_accept(listener))[0] as server:
        async with asyncio.timeout(20):
            with pytest.raises(OSError, match="timed out"):
                await loop.sock_sendall(server, bytes(64 << 20))
