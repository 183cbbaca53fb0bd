"""Two HTTP workers in front of one engine behave like one worker."""

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import openai
import pytest
from messages import WORKER_DIED, WORKER_HANGS, WORKER_IS_NOT_REPLACED
from server_load import wait_for_load
from stopped_process import stop_process

pytestmark = pytest.mark.slow

MAX_ATTEMPTS = 3
MESSAGES = [{"role": "user", "content": "hi"}]
FLAGS = (
    "--http-workers",
    "2",
    "--max-model-len",
    "1024",
    "--cpu-cache-gib",
    "0.05",
    "--dtype",
    "float32",
    "--served-model-name",
    "tiny",
    "--api-key",
    "any",
    "--api-key",
    "other",
)


@pytest.fixture(scope="module")
def shared_server(run_server, tiny_model):
    with run_server(tiny_model, *FLAGS, "--max-num-seqs", "8", "--max-queue", "16", "--log-format", "json") as server:
        assert len(server.worker_pids()) == 2
        yield server
        assert server.stop() == 0


def client(server, api_key="any"):
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=api_key, max_retries=0, timeout=60)


async def send_request(server, api_key="any", **fields):
    """Uses a new connection, so that either worker may get the request."""
    async with client(server, api_key) as sdk:
        return await sdk.chat.completions.create(
            **{"model": "tiny", "messages": MESSAGES, "temperature": 0, "extra_body": {"ignore_eos": True}} | fields
        )


async def send_stream_request(server, number, max_tokens):
    async with client(server) as sdk:
        stream = await sdk.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"Tell me of {number}."}],
            temperature=0,
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def get(server, path):
    try:
        with urllib.request.urlopen(f"{server.url}{path}") as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def read_metric(server, name):
    return float(re.search(rf"^nanovllm:{name}(?:{{[^}}]*}})? (\S+)$", get(server, "/metrics")[1], re.MULTILINE)[1])


async def test_two_workers_give_the_same_answers_and_metrics(shared_server):
    texts = await asyncio.gather(*(send_stream_request(shared_server, number, 20) for number in range(16)))
    for number in (0, 7, 15):
        answer = await send_request(
            shared_server, max_tokens=20, messages=[{"role": "user", "content": f"Tell me of {number}."}]
        )
        assert answer.choices[0].message.content == texts[number]
    # Either worker reports the numbers of both workers.
    names = ("request_generation_tokens_sum", 'request_success_total{finished_reason="length",model_name="tiny"}')
    expected = (
        f'{names[0]}{{model_name="tiny"}} {19 * 20}.0',
        f"{names[1]} 19.0",
        'generation_tokens_total{model_name="tiny"} 380.0',
    )
    async with asyncio.timeout(60):
        # A worker counts a request only after the client has read the whole answer.
        while not all(line in get(shared_server, "/metrics")[1] for line in expected):
            await asyncio.sleep(0.05)
    for _ in range(8):
        text = get(shared_server, "/metrics")[1]
        assert [line for line in expected if line not in text] == []


async def test_cached_tokens_tell_nothing_about_prompts_of_another_key(shared_server):
    messages = [{"role": "user", "content": "a secret " * 50}]

    async def count_cached_tokens(api_key, **extra_body):
        answer = await send_request(shared_server, api_key, messages=messages, max_tokens=1, extra_body=extra_body)
        return answer.usage.prompt_tokens_details.cached_tokens

    num_cached_template_tokens = await count_cached_tokens("any")
    assert await count_cached_tokens("any") > num_cached_template_tokens
    digest = hashlib.sha256(b"any").hexdigest()
    assert [await count_cached_tokens("other", cache_salt=salt) for salt in ("", digest)] == [0, 0]
    assert await count_cached_tokens("other") > 0


async def test_workers_share_one_queue_limit(shared_server):
    streams = [asyncio.create_task(send_stream_request(shared_server, number, 900)) for number in range(24)]
    async with asyncio.timeout(60):
        while read_metric(shared_server, "num_requests_running") < 8:
            await asyncio.sleep(0.01)
    # The streams that run do not end before the last stream has arrived.
    with stop_process(shared_server.engine_pid()):
        await wait_for_load(shared_server.url, 24)
        for _ in range(6):
            with pytest.raises(openai.RateLimitError, match="24 sequences of at most 24"):
                await send_request(shared_server)
    async with asyncio.timeout(60):
        while (
            read_metric(shared_server, "num_requests_running") + read_metric(shared_server, "num_requests_waiting") < 24
        ):
            await asyncio.sleep(0.01)
    for stream in streams:
        stream.cancel()
    await asyncio.wait(streams)
    await wait_for_load(shared_server.url, 0)
    async with asyncio.timeout(60):
        while read_metric(shared_server, "num_requests_running") + read_metric(shared_server, "num_requests_waiting"):
            await asyncio.sleep(0.05)
    for _ in range(6):
        assert (await send_request(shared_server, max_tokens=1)).usage.completion_tokens == 1


async def test_a_dead_worker_is_replaced(shared_server):
    streams = [asyncio.create_task(send_stream_request(shared_server, number, 500)) for number in range(8)]
    async with asyncio.timeout(20):
        while read_metric(shared_server, "num_requests_running") < 8:
            await asyncio.sleep(0.01)
    victim, other = shared_server.worker_pids()
    os.kill(victim, signal.SIGKILL)
    ended = await asyncio.gather(*streams, return_exceptions=True)
    lost = [error for error in ended if isinstance(error, Exception)]
    assert all(isinstance(error, openai.APIError | OSError) or "peer closed" in str(error) for error in lost)
    async with asyncio.timeout(30):
        while not (
            len(pids := shared_server.worker_pids()) == 2 and read_metric(shared_server, "num_requests_running") == 0
        ):
            await asyncio.sleep(0.05)
    assert other in pids
    assert victim not in pids
    # A connection to the dead worker waits for the replacement.
    for _ in range(8):
        assert (await send_request(shared_server, max_tokens=2)).usage.completion_tokens == 2
    assert read_metric(shared_server, "kv_cache_usage_perc") == 0
    assert all(has_rings(pid) for pid in pids)
    lines = [json.loads(line) for line in shared_server.errors if line.startswith("{")]
    assert [line["exit_code"] for line in lines if line["event"] == "HTTP worker died"] == [-9]


async def check_only_the_hanging_worker_is_replaced(server):
    pids = set(server.worker_pids())
    # While the parent is stopped, it misses answers of workers, but must not replace the workers.
    with stop_process(server.process.pid):
        await asyncio.sleep(2.5)
    assert read_metric(server, "http_event_loop_lag_seconds_count") > 0
    victim = min(pids)
    with stop_process(victim):
        async with asyncio.timeout(60):
            while victim in (new_pids := set(server.worker_pids())) or len(new_pids) < 2:
                await asyncio.sleep(0.05)
    assert pids - new_pids == {victim}
    for _ in range(8):
        assert (await send_request(server, max_tokens=1)).usage.completion_tokens == 1
    assert error_events(server) == [WORKER_HANGS, WORKER_DIED]


async def test_a_worker_that_does_not_respond_is_replaced_unless_replacements_die(run_server, tiny_model):
    for attempt in range(1, MAX_ATTEMPTS + 1):
        with run_server(tiny_model, *FLAGS, "--worker-timeout", "2", "--log-format", "json") as server:
            try:
                await check_only_the_hanging_worker_is_replaced(server)
            except (AssertionError, OSError, openai.APIConnectionError):
                # Other programs may stop a healthy worker for 2 s, and then the server replaces this worker too.
                if error_events(server) == [WORKER_HANGS, WORKER_DIED] or attempt == MAX_ATTEMPTS:
                    raise
                continue
            # The server ends only if a replacement dies before it is ready: kill workers until this happens.
            engine_pid = server.engine_pid()
            async with asyncio.timeout(120):
                while server.process.poll() is None:
                    kill_workers(server, engine_pid)
                    await asyncio.sleep(0.01)
            assert server.process.returncode == 1
        assert WORKER_IS_NOT_REPLACED in error_events(server)
        return


async def test_workers_that_share_encodings_give_the_same_answer(shared_server):
    assert all(has_rings(pid) for pid in shared_server.worker_pids())
    assert not has_rings(shared_server.engine_pid())
    turns = [{"role": "user", "content": f"Turn {index}: " + "tell me more " * 30} for index in range(4)]
    answers = [await send_request(shared_server, max_tokens=8, messages=turns) for _ in range(8)]
    assert len({(answer.usage.prompt_tokens, answer.choices[0].message.content) for answer in answers}) == 1
    assert not any("malformed encodings" in line for line in shared_server.errors)


def test_one_worker_has_no_memory_for_encodings(tiny_server):
    assert not any(has_rings(pid) for pid in tiny_server.worker_pids())


async def test_both_workers_drain_on_sigterm(run_server, tiny_model):
    with run_server(tiny_model, *FLAGS, "--max-num-seqs", "8", "--drain-timeout", "300") as server:
        streams = [asyncio.create_task(send_stream_request(server, number, 900)) for number in range(8)]
        async with asyncio.timeout(60):
            while read_metric(server, "num_requests_running") < 8:
                await asyncio.sleep(0.01)
        # The streams that run do not end before the workers drain.
        with stop_process(server.engine_pid()):
            streams += [asyncio.create_task(send_stream_request(server, number, 100)) for number in range(8, 12)]
            await wait_for_load(server.url, 12)
            server.process.send_signal(signal.SIGTERM)
            # A service manager may signal all processes of the service; only the parent reacts.
            for pid in (*server.worker_pids(), server.engine_pid()):
                os.kill(pid, signal.SIGTERM)
            # Each connection may reach either worker.
            async with asyncio.timeout(60):
                refusals = 0
                while refusals < 6:
                    refusals = refusals + 1 if get(server, "/ready")[0] == 503 else 0
                    await asyncio.sleep(0.01)
            assert not any(stream.done() for stream in streams)
        texts = await asyncio.gather(*streams)
        assert all(texts)
        assert await asyncio.to_thread(server.process.wait, 60) == 0
    assert not any("Traceback" in line for line in server.errors)


def test_a_second_server_is_refused_at_once(shared_server, tiny_model):
    """SO_REUSEPORT alone would let the second server bind the port."""
    port = shared_server.url.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "nanovllm_server", str(tiny_model), "--port", port, "--http-workers", "2"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "in use" in done.stderr


async def test_no_process_outlives_the_parent(run_server, tiny_model):
    with run_server(tiny_model, *FLAGS) as server:
        pids = [*server.worker_pids(), server.engine_pid()]
        server.process.kill()
        async with asyncio.timeout(60):
            while any(is_alive(pid) for pid in pids):
                await asyncio.sleep(0.05)
    assert not any("Traceback" in line for line in server.errors)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))


def test_no_process_outlives_a_parent_that_is_killed_while_all_load(tiny_model, tmp_path):
    command = [sys.executable, "-m", "nanovllm_server", str(tiny_model), "--port", "0", "--device", "cpu", *FLAGS]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        children: list[int] = []
        deadline = time.monotonic() + 60
        # The engine, two workers, and multiprocessing's resource tracker.
        while len(children) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
            children = [*map(int, Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())]
        parent.kill()
        assert parent.communicate()[0] == b"", "the server was ready before it was killed"
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not list(tmp_path.glob("nanovllm-*"))


def error_events(server):
    lines = [json.loads(line) for line in server.errors if line.startswith("{")]
    return [line["event"] for line in lines if line["level"] == "error"]


def kill_workers(server, engine_pid):
    # Once the server has ended, its children can't be listed.
    with suppress(FileNotFoundError, ProcessLookupError):
        for pid in server.worker_pids():
            # worker_pids may mistake a child that still starts for the engine, and list the engine as a worker.
            if pid != engine_pid:
                os.kill(pid, signal.SIGKILL)


def has_rings(pid):
    try:
        return "nanovllm-rings" in Path(f"/proc/{pid}/maps").read_text()
    except FileNotFoundError:
        return False


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
