"""Deaths of engines in a server with a prefill and a decode engine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from kill_ranks import find_descendants, find_leftovers, read_processes
from messages import PREFILL_ENGINE_DIED

pytestmark = [pytest.mark.slow, pytest.mark.background]

FLAGS = (
    *("--prefill-gpus", "1", "--decode-gpus", "1", "--kv-offload-gib", "0.05", "--log-format", "json"),
    *("--max-model-len", "1024", "--cpu-cache-gib", "0.05", "--served-model-name", "tiny", "--dtype", "float32"),
)
WAIT_S = 300
PROMPT = "Prompts of several blocks travel from one engine to the other. " * 8


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ask(url: str, prompt: str = PROMPT, **fields: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def read_events(errors: list[str], event: str) -> list[dict]:
    lines = [json.loads(line) for line in list(errors) if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def wait_for_event(errors: list[str], event: str, number: int) -> dict:
    wait_until(lambda: len(read_events(errors, event)) == number)
    return read_events(errors, event)[-1]


def assert_nothing_is_left(descendants: list[int], directory: Path) -> None:
    wait_until(lambda: not [pid for pid in descendants if read_processes().get(pid, (0, "Z"))[1] != "Z"])
    assert not find_leftovers(str(directory))


def read_outcomes(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    pattern = r'nanovllm:kv_transfer_requests_total\{.*outcome="(\w+)".*\} (\S+)'
    return {outcome: float(count) for outcome, count in re.findall(pattern, text)}


def test_killed_prefill_engine_is_restarted_while_the_server_answers(run_server, tiny_model, tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with run_server(tiny_model, *FLAGS, environment=environment) as server:
        answers: dict[str, str] = {}

        def has_fetched_a_prompt() -> bool:
            prompt = f"{len(answers)} {PROMPT}"
            answers[prompt] = ask(server.url, prompt)
            return read_outcomes(server.url)["fetched"] > 0

        wait_until(has_fetched_a_prompt)
        (secret,) = tmp_path.glob("nanovllm-transfer-*/secret")
        assert secret.stat().st_mode & 0o777 == 0o600
        assert secret.parent.stat().st_mode & 0o777 == 0o700
        started = wait_for_event(server.errors, "prefill engine started", 1)
        os.kill(started["pid"], signal.SIGKILL)
        assert wait_for_event(server.errors, PREFILL_ENGINE_DIED, 1)["restart_delay_s"] == 1
        # The decode engine has no blocks with this salt and computes the prompts.
        assert {prompt: ask(server.url, prompt, cache_salt="new") for prompt in answers} == answers
        wait_for_event(server.errors, "prefill engine started", 2)
        assert ask(server.url)
        with urllib.request.urlopen(f"{server.url}/health") as response:
            assert response.status == 200
        descendants = find_descendants(server.process.pid)
        assert server.stop() == 0
        assert_nothing_is_left(descendants, tmp_path)
    assert not any("Traceback" in line for line in server.errors), "".join(server.errors)


def test_killed_server_leaves_nothing(run_server, tiny_model, tmp_path):
    with run_server(tiny_model, *FLAGS, environment={**os.environ, "TMPDIR": str(tmp_path)}) as server:
        descendants = find_descendants(server.process.pid)
        server.process.kill()
        server.process.wait()
        assert_nothing_is_left(descendants, tmp_path)


def test_death_of_the_decode_engine_ends_the_server(run_server, tiny_model, tmp_path):
    with run_server(tiny_model, *FLAGS, environment={**os.environ, "TMPDIR": str(tmp_path)}) as server:
        (started,) = read_events(server.errors, "prefill engine started")
        descendants = find_descendants(server.process.pid)
        children = [pid for pid, (parent, _) in read_processes().items() if parent == server.process.pid]
        memory = {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in children}
        del memory[started["pid"]]
        os.kill(max(memory, key=memory.__getitem__), signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert_nothing_is_left(descendants, tmp_path)


def test_start_that_fails_leaves_nothing(tiny_model, tmp_path):
    arguments = [str(tiny_model), *FLAGS, "--max-model-len", "999999", "--port", "0", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "nanovllm_server", *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 2
    assert re.search("nanovllm-server: .*max_model_len", done.stderr.splitlines()[-1])
    assert not any(tmp_path.iterdir())
