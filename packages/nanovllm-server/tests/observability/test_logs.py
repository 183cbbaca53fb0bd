import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from nanovllm_server.http.app import create_app
from nanovllm_server.settings import TransferSettings

PROGRAM = """
import logging, sys
from structlog.contextvars import bind_contextvars
from nanovllm_server.observability.logs import configure_logs, get_logger
configure_logs(sys.argv[1], "info")
logging.getLogger("httpx2").info("a request of a library")
bind_contextvars(request_id="the-one")
get_logger("nanovllm").info("request", status=200)
logging.getLogger("somebody.else").warning("hm")
try:
    secret = "do not tell"
    1 / 0
except ZeroDivisionError:
    get_logger("nanovllm").exception("failed")
"""


class RecordingLogger:
    def __init__(self):
        self.lines = []

    def _record(self, event, **fields):
        self.lines.append({"event": event, **fields})

    debug = info = warning = error = exception = _record


@pytest.fixture
def recorder(service) -> RecordingLogger:
    service.logger = RecordingLogger()
    return service.logger


@pytest.fixture
def client(recorder, service):
    return create_app(service).test_client()


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_every_log_line_has_the_request_id(log_format):
    process = subprocess.run([sys.executable, "-c", PROGRAM, log_format], capture_output=True, text=True, check=True)
    assert "do not tell" not in process.stderr
    if log_format == "json":
        lines = [json.loads(line) for line in process.stderr.splitlines()]
        assert [line["event"] for line in lines] == ["request", "hm", "failed"]
        assert all(line["request_id"] == "the-one" for line in lines)
        assert "ZeroDivisionError" in lines[-1]["exception"]
    else:
        assert process.stderr.count("the-one") == 3


async def test_each_request_is_one_log_line(post, recorder):
    await (await post(n=2, max_tokens=3, request_id="mine")).get_data()
    (line,) = recorder.lines
    assert 0 <= line["queue_seconds"] <= line["ttft_seconds"] <= line["seconds"] + 0.001
    expected = {
        "event": "request",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "request_id": "mine",
        "prompt_tokens": 8,
        "cached_tokens": 8,
        "completion_tokens": 6,
        "finish_reason": "length,length",
    }
    assert {name: line[name] for name in expected} == expected


async def test_log_names_the_engine_of_a_computed_prompt(post, recorder, service, engine):
    engine.info = replace(engine.info, transfer_peers=("node-1:5600",), transfer_address="127.0.0.1:5600")
    service.transfer = TransferSettings(role="decode")
    await post(kv_transfer_params={"do_remote_prefill": True, "remote_host": "node-1", "remote_port": 5600})
    service.transfer = TransferSettings(role="prefill", advertised_host="node-1")
    await post(kv_transfer_params={"do_remote_decode": True})
    await post()
    fields = [(line.get("prefix_peer"), line.get("remote_decode")) for line in recorder.lines]
    assert fields == [("node-1:5600", None), (None, True), (None, None)]


async def test_refused_request_is_one_log_line(post, recorder):
    assert (await post(temperature=9)).status_code == 400
    (line,) = recorder.lines
    assert (line["status"], line["path"]) == (400, "/v1/chat/completions")


async def test_path_cannot_forge_a_log_line(recorder, service, serve_at):
    async with serve_at(create_app(service)) as url:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        path = b"/a%0d%0aERROR%1b[31m" + b"x" * 1000
        writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 404")
        writer.close()
    (line,) = recorder.lines
    assert line["path"].startswith("/a%0d%0aERROR%1b")
    assert len(line["path"]) == 200


async def test_log_shortens_names_of_unknown_fields(post, recorder):
    await post(**{"x" * 1000: 1, "a\nb": 2})
    line = recorder.lines[0]
    assert line["fields"] == ["x" * 80, "a\nb"]


async def test_log_names_unknown_fields_of_nested_objects(post, recorder):
    function = {"name": "add", "x": 1, "parameters": {"type": "object", "x-order": 1}}
    await post(
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {}}]}],
        metadata={"trace": "1"},
        reasoning={"summary": "auto"},
        tools=[{"type": "function", "function": function}],
        tool_choice="none",
    )
    paths = ["messages[0].content[0].cache_control", "reasoning.summary", "tools[0].function.x"]
    assert recorder.lines[0]["fields"] == paths


async def test_prompts_are_logged_only_on_request(post, recorder, service):
    await post(messages=[{"role": "user", "content": "a secret"}])
    assert "secret" not in repr(recorder.lines)
    service.log_prompts = True
    await post(messages=[{"role": "user", "content": "a secret"}], request_id="mine")
    assert {"event": "prompt", "request_id": "mine", "text": "<|start|>user:a secret"} in recorder.lines
