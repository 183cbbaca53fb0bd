"""A real server gives each message that `docs/deploy/troubleshooting.md` quotes."""

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from kill_ranks import ENGINE_DIED, RANK_ENDED
from messages import (
    BODY_IS_TOO_LARGE,
    IS_DRAINING,
    IS_STOPPED,
    NO_DEFAULT_MODEL,
    PREFILL_ENGINE_DIED,
    STEP_HANGS,
    TEMPLATE_OMITS_CONTENT,
    WORKER_DIED,
    WORKER_HANGS,
    WORKER_IS_NOT_REPLACED,
)
from proxies import DEPLOY, HEADERS, chat, free_port, post_chat, stream_chat
from toy_model import toy_spec

import nanovllm_models
from nanovllm_core import ConfigError, EngineConfig, EngineDeadError
from nanovllm_core.engine.build import build_loop
from nanovllm_server.cli import make_parser
from nanovllm_server.engine_flags import make_engine_config

PAGE = (DEPLOY / "troubleshooting.md").read_text()
# Keys: parts of messages. Values: flags of the server.
REFUSED_STARTS = {
    "is not a directory": ["/no/such/model"],
    "has no config.json: it is not a Hugging Face model directory": ["EMPTY"],
    "can't be reached to download a repository": ["org/model"],
    "Address already in use": ["MODEL", "--port", "PORT"],
    "can't read the API keys in": ["MODEL", "--api-key-file", "/no/such/file"],
    "can't keep the default model in": [],
}
REFUSED_ENGINES = {
    "fewer than max_model_len": ["--device", "cpu", "--max-model-len", "8192", "--cpu-cache-gib", "0.001"],
    "no usable NVIDIA GPU was found": ["--device", "cuda"],
}
# Values: expected status, changed fields and changed headers of a request.
REFUSED_REQUESTS = {
    "an API key is needed": (401, {}, {"Authorization": ""}),
    "Incorrect API key provided": (401, {}, {"Authorization": "Bearer other"}),
    "this server does not allow the name": (403, {}, {"Host": "other.example.com"}),
    "this server does not let clients set priorities": (400, {"priority": 1}, {}),
    "does not exist; this server has": (404, {"model": "other"}, {}),
    "maximum context length is": (400, {"messages": [{"role": "user", "content": "long " * 600}]}, {}),
    "Content-Type must be application/json": (415, {}, {"Content-Type": "text/plain"}),
    "the answer took longer than its limit": (504, {"max_tokens": 400, "timeout": 0.05}, {}),
}
QUEUE_IS_FULL = "the queue is full"
BODY_MEMORY_IS_FULL = "too many large requests arrive at once"
# Tests in other files of this folder and in tests/server provoke these messages.
PROVOKED_ELSEWHERE = {BODY_IS_TOO_LARGE, IS_DRAINING, IS_STOPPED, NO_DEFAULT_MODEL, TEMPLATE_OMITS_CONTENT}
PROVOKED_ELSEWHERE |= {WORKER_HANGS, WORKER_DIED, WORKER_IS_NOT_REPLACED, ENGINE_DIED, RANK_ENDED, PREFILL_ENGINE_DIED}


def test_every_message_of_the_page_is_provoked():
    tables = PAGE[PAGE.index("## The server does not start") : PAGE.index("## Streams")]
    messages = re.findall(r"(?m)^\| (?:\d{3} )?`([^`]+)` \|", tables)
    provoked = {QUEUE_IS_FULL, BODY_MEMORY_IS_FULL, STEP_HANGS} | PROVOKED_ELSEWHERE
    provoked |= REFUSED_STARTS.keys() | REFUSED_ENGINES.keys() | REFUSED_REQUESTS.keys()
    assert len(messages) == len(set(messages))
    assert set(messages) == provoked


@pytest.mark.parametrize("message", REFUSED_REQUESTS)
def test_refused_request_gets_the_message(server, message):
    status, fields, headers = REFUSED_REQUESTS[message]
    with post_chat(server.url, chat(**fields), **headers) as response:
        assert response.status == status
        assert message in json.loads(response.read())["error"]["message"]


def test_request_beyond_the_queue_gets_the_message(server):
    with stream_chat(server.url, n=4, max_tokens=100) as pieces:
        next(pieces)
        with post_chat(server.url, chat()) as response:
            assert response.status == 429
            assert QUEUE_IS_FULL in json.loads(response.read())["error"]["message"]
            assert int(response.headers["Retry-After"]) >= 1


def send_large_body(url: str) -> tuple[int, dict[str, str]]:
    """Sends a large body while two other bodies hold all memory of the worker."""
    size = 16 << 20
    with ExitStack() as stack:
        for _ in range(2):
            connection = HTTPConnection(urlsplit(url).netloc)
            stack.callback(connection.close)
            connection.putrequest("POST", "/v1/chat/completions")
            for name, value in {**HEADERS, "Content-Length": str(size)}.items():
                connection.putheader(name, value)
            connection.endheaders(b" " * (size - 1))
        # The server may still receive the other bodies when the first requests arrive.
        for _ in range(5):
            with post_chat(url, chat(user="x" * (1 << 20))) as response:
                answer = response.status, json.loads(response.read()).get("error", {})
            if response.status == 503:
                break
        return answer


@pytest.fixture(scope="module")
def large_body_answer(server) -> Iterator[Future[tuple[int, dict[str, str]]]]:
    """Runs beside other tests, because the server refuses the body only after some time."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(send_large_body, server.url)


@pytest.mark.slow
def test_large_body_is_not_refused_at_once(large_body_answer):
    assert not large_body_answer.done()


def test_metrics_of_the_page_exist(server):
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        metrics = response.read().decode()
    names = set(re.findall(r"`(nanovllm:\w+)`", PAGE))
    assert len(names) >= 3
    assert all(f"\n{name}{{" in metrics for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("message", REFUSED_STARTS)
def test_refused_start_writes_the_message(default_model, tmp_path, message):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        values = {"MODEL": str(default_model), "EMPTY": str(tmp_path), "PORT": str(listener.getsockname()[1])}
        flags = [values.get(flag, flag) for flag in REFUSED_STARTS[message]]
        flags += [] if "--port" in flags else ["--port", "0"]
        process = subprocess.run(
            [sys.executable, "-m", "nanovllm_server", "--device", "cpu", *flags],
            env={**os.environ, "NANOVLLM_CACHE": "/proc/none", "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    line = process.stderr.splitlines()[-1]
    assert line.startswith("nanovllm-server: ")
    assert message in line
    assert process.returncode == 2


@pytest.mark.parametrize("message", REFUSED_ENGINES)
async def test_engine_that_cannot_start_gives_the_message(default_model, monkeypatch, message):
    monkeypatch.setattr("nanovllm_core.engine.build.has_cuda", lambda: False)
    config = make_engine_config(make_parser().parse_args(REFUSED_ENGINES[message]))
    with pytest.raises(ConfigError, match=message):
        await build_loop(nanovllm_models.load(default_model), config)


async def test_hanging_step_gives_the_message(monkeypatch):
    # Without a time limit, the first check for a hanging step fails, even before the first step.
    monkeypatch.setattr("nanovllm_core.engine.loop.STEP_TIMEOUT_S", 0.0)
    loop = await build_loop(toy_spec(), EngineConfig(device="cpu", num_blocks=32))
    with pytest.raises(EngineDeadError, match=STEP_HANGS):
        await loop.run(lambda outputs, stats: None)


@pytest.mark.slow
def test_large_body_without_free_memory_gets_the_message(large_body_answer):
    status, error = large_body_answer.result()
    assert status == 503
    assert BODY_MEMORY_IS_FULL in error["message"]
