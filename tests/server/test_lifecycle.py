import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import openai
import pytest
from kill_ranks import find_descendants, kill_once, read_processes
from server_load import wait_for_load
from stopped_process import stop_process

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "hi"}]
FLAGS = ("--max-model-len", "1024", "--cpu-cache-gib", "0.05", "--served-model-name", "tiny")


def client(server):
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60)


async def open_stream(sdk, max_tokens):
    stream = await sdk.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, max_tokens=max_tokens, extra_body={"ignore_eos": True}
    )
    chunks = aiter(stream)
    await anext(chunks)
    return chunks


def readiness(server):
    try:
        with urllib.request.urlopen(f"{server.url}/ready") as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


async def wait_for_drain(server):
    async with asyncio.timeout(60):
        while (await asyncio.to_thread(readiness, server))[0] == 200:
            await asyncio.sleep(0.01)


async def test_a_full_queue_is_drained_on_sigterm(run_server, tiny_model):
    queue_flags = ("--max-num-seqs", "1", "--max-queue", "1")
    with run_server(tiny_model, *FLAGS, *queue_flags, "--log-format", "json", "--drain-timeout", "300") as server:
        async with client(server) as sdk:
            chunks = await open_stream(sdk, 900)
            with stop_process(server.engine_pid()):
                waiting = asyncio.create_task(
                    sdk.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
                )
                await wait_for_load(server.url, 2)
                with pytest.raises(openai.RateLimitError) as refused:
                    await sdk.chat.completions.create(model="tiny", messages=MESSAGES)
                assert int(refused.value.response.headers["Retry-After"]) >= 1
                server.process.send_signal(signal.SIGTERM)
                await wait_for_drain(server)
                with pytest.raises(openai.InternalServerError) as refused:
                    await sdk.chat.completions.create(model="tiny", messages=MESSAGES)
                assert refused.value.status_code == 503
                assert not waiting.done()
            last = [chunk async for chunk in chunks][-1]
            assert last.choices[0].finish_reason == "length"
            assert (await waiting).usage.completion_tokens == 1
        assert await asyncio.to_thread(server.process.wait, 60) == 0
    lines = [json.loads(line) for line in server.errors if line.startswith("{")]
    assert any(line["event"] == "request" and line.get("completion_tokens") == 900 for line in lines)
    assert not any("Traceback" in line for line in server.errors)


async def test_a_second_signal_ends_the_drain(run_server, tiny_model):
    drain_flags = ("--max-model-len", "2048", "--drain-timeout", "300", "--log-format", "json")
    with run_server(tiny_model, *FLAGS, *drain_flags) as server:
        async with client(server) as sdk:
            chunks = await open_stream(sdk, 1900)
            with stop_process(server.engine_pid()):
                server.process.send_signal(signal.SIGINT)
                await wait_for_drain(server)
                server.process.send_signal(signal.SIGINT)

            async def read():
                async for _ in chunks:
                    pass

            with pytest.raises(openai.APIError, match="shutting down"):
                await read()
        assert await asyncio.to_thread(server.process.wait, 60) == 0
    assert not any("Traceback" in line for line in server.errors)


@pytest.fixture
def default_sighup() -> Iterator[None]:
    """Children don't ignore SIGHUP, also if `nohup` started the tests."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.usefixtures("default_sighup")
async def test_a_closed_terminal_drains_the_server_and_leaves_nothing(run_server, tiny_model, tmp_path):
    # `setsid` gives the server its own process group. A terminal sends SIGHUP to the whole group.
    program = ("setsid", sys.executable, "-m", "nanovllm_server")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with run_server(tiny_model, *FLAGS, "--drain-timeout", "300", program=program, environment=environment) as server:
        descendants = find_descendants(server.process.pid)
        async with client(server) as sdk:
            chunks = await open_stream(sdk, 900)
            with stop_process(server.engine_pid()):
                os.killpg(server.process.pid, signal.SIGHUP)
                await wait_for_drain(server)
                processes = read_processes()
                # The descendants include multiprocessing's resource tracker, which removes semaphores of killed
                # processes.
                assert all(processes.get(pid, (0, "Z"))[1] != "Z" for pid in descendants)
                os.killpg(server.process.pid, signal.SIGHUP)
            last = [chunk async for chunk in chunks][-1]
            assert last.choices[0].finish_reason == "length"
        assert await asyncio.to_thread(server.process.wait, 60) == 0
    assert not list(tmp_path.glob("nanovllm-*"))


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (1, 2)])
async def test_killed_rank_ends_the_server_and_leaves_nothing(tiny_model, rank, num_ranks):
    """Rank 0 is the engine's process."""
    command = [sys.executable, "-m", "nanovllm_server", str(tiny_model), *FLAGS]
    await kill_once([*command, "--port", "0", "--device", "cpu", "-tp", str(num_ranks)], rank, num_ranks)


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        (["/no/such/model"], "/no/such/model"),
        (["MODEL", "--max-model-len", "999999"], "max_model_len"),
        (["MODEL", "--chat-template", "/no/such/file"], "/no/such/file"),
        (["MODEL", "--port", "TAKEN"], "in use"),
    ],
)
def test_a_start_that_fails_ends_with_one_line(tiny_model, arguments, expected_text):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"MODEL": str(tiny_model), "TAKEN": str(taken.getsockname()[1])}
        arguments = [values.get(argument, argument) for argument in arguments]
        port = [] if "--port" in arguments else ["--port", "0"]
        done = subprocess.run(
            [sys.executable, "-m", "nanovllm_server", *arguments, *port, "--device", "cpu"],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 2
    assert done.stdout == ""
    *log_lines, line = done.stderr.splitlines()
    assert expected_text in line
    assert all("start-up phase" in log_line for log_line in log_lines)
