"""vllm-router in front of a prefill server and a decode server."""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from sse import parse_events

pytestmark = [
    pytest.mark.slow,
    pytest.mark.background,
    pytest.mark.skipif(sys.platform != "linux", reason="vllm-router has wheels only for Linux"),
]

ROUTER = Path(sys.executable).with_name("vllm-router")
SIZE_FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--cpu-cache-gib", "0.2", "--max-num-seqs", "4")
MODEL = "SmolLM2-135M-Instruct"
PROMPT = " ".join(f"In the year {year}, the town had {year * 7 % 900} houses." for year in range(1900, 1930))
MAX_START_S = 300
MAX_FETCH_S = 300


class Cluster(NamedTuple):
    router_url: str
    prefill: object
    decode: object


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def post_chat(url: str, **fields: object) -> tuple[int, bytes]:
    defaults = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 16, "temperature": 0}
    body = json.dumps({**defaults, **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return response.status, response.read()


def read_text(body: bytes) -> str:
    return json.loads(body)["choices"][0]["message"]["content"]


def read_streamed_text(body: bytes) -> str:
    choices = [choice for chunk in parse_events(body) for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def read_requests(server) -> list[dict]:
    lines = [json.loads(line) for line in list(server.errors) if line.startswith("{")]
    return [line for line in lines if line["event"] == "request" and line["path"] == "/v1/chat/completions"]


def wait_for_requests(server, number: int) -> list[dict]:
    """The server writes the log line of a request after the response."""
    deadline = time.monotonic() + 60
    while len(read_requests(server)) < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return read_requests(server)


def read_metric(server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"nanovllm:{name}{{"))


@contextmanager
def run_router(folder: Path, prefill_url: str, decode_url: str) -> Iterator[str]:
    port, log = free_port(), folder / "router.log"
    command = [
        *(ROUTER, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
        *("--vllm-pd-disaggregation", "--policy", "round_robin", "--worker-startup-check-interval", "1"),
        *("--prefill", prefill_url, "--decode", decode_url),
    ]
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, cwd=folder, env={**os.environ, "HOME": str(folder)}, stdout=output, stderr=output
        ) as process,
    ):
        try:
            deadline = time.monotonic() + MAX_START_S
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10):
                        break
                except OSError:
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def make_conversation(number: int) -> list[dict]:
    return [{"role": "user", "content": f"{number}. {PROMPT} What happened in 1905?"}]


@pytest.fixture(scope="module")
def cluster(run_server, tmp_path_factory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("router")
    secret, port = folder / "secret", free_port()
    secret.touch(0o600)
    secret.write_bytes(os.urandom(32))
    flags = (*SIZE_FLAGS, "--kv-offload-gib", "0.2", "--log-format", "json", "--transfer-secret-file", str(secret))
    prefill_flags = ("--role", "prefill", "--transfer-listen", f"127.0.0.1:{port}")
    decode_flags = ("--role", "decode", "--transfer-peers", f"127.0.0.1:{port}")
    with (
        run_server(None, *flags, *prefill_flags) as prefill,
        run_server(None, *flags, *decode_flags) as decode,
        run_router(folder, prefill.url, decode.url) as url,
    ):
        yield Cluster(url, prefill, decode)


def test_answers_through_the_router_equal_those_of_one_server(cluster):
    num_before = [len(read_requests(server)) for server in (cluster.prefill, cluster.decode)]
    status, body = post_chat(cluster.router_url, messages=make_conversation(1))
    texts = [read_text(body)]
    assert status == 200
    status, body = post_chat(cluster.router_url, messages=make_conversation(2), stream=True)
    texts.append(read_streamed_text(body))
    assert status == 200
    prefilled = wait_for_requests(cluster.prefill, num_before[0] + 2)[num_before[0] :]
    assert [(line["status"], line["remote_decode"], line["completion_tokens"]) for line in prefilled] == [
        (200, True, 1)
    ] * 2
    decoded = wait_for_requests(cluster.decode, num_before[1] + 2)[num_before[1] :]
    # With another salt, the decode server finds no cached blocks and computes the prompt.
    for number, text in enumerate(texts, 1):
        _, body = post_chat(cluster.decode.url, messages=make_conversation(number), cache_salt="none")
        assert read_text(body) == text
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", line["prefix_peer"]) for line in decoded)
    assert [line["status"] for line in decoded] == [200, 200]


def test_decode_server_fetches_prompts_from_the_prefill_server(cluster):
    num_before = len(read_requests(cluster.decode))
    fetched, served = (read_metric(*metric) for metric in metrics_of(cluster))
    deadline = time.monotonic() + MAX_FETCH_S
    # If other programs stop a server for 2 s, the decode server computes the prompt: send new prompts until one is
    # fetched.
    for number in itertools.count():
        post_chat(cluster.router_url, messages=make_conversation(3 + number))
        # The router answers with the usage of the prefill server. Read the decode server's usage from its log.
        line = wait_for_requests(cluster.decode, num_before + number + 1)[-1]
        if line["cached_tokens"] > 0.9 * line["prompt_tokens"]:
            break
        assert time.monotonic() < deadline, line
    # The engine's metrics are up to 0.1 s old.
    while True:
        new_fetched, new_served = (read_metric(*metric) for metric in metrics_of(cluster))
        if new_fetched - fetched > 0.9 * line["prompt_tokens"] and new_served > served:
            return
        assert time.monotonic() < deadline, (fetched, new_fetched, served, new_served)
        time.sleep(0.1)


def metrics_of(cluster: Cluster) -> list[tuple]:
    return [(cluster.decode, "kv_transfer_tokens_total"), (cluster.prefill, "kv_transfer_served_bytes_total")]
