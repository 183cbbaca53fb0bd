import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from loopback_hub import run_hub

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(tiny_model, tmp_path, monkeypatch):
    files = {file.name: file.read_bytes() for file in tiny_model.iterdir()}
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    with run_hub(files, tmp_path / "cache") as hub:
        for name in ("HF_ENDPOINT", "HF_HOME"):
            monkeypatch.setenv(name, hub.environment[name])
        yield hub


def test_a_downloaded_model_has_the_name_of_its_repository(run_server, hub):
    with run_server("org/model@v1.0", "--max-model-len", "256", "--cpu-cache-gib", "0.05") as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            assert json.load(response)["model"] == "org/model"
        assert server.stop() == 0
    assert "model.safetensors" in hub.requested_files
    assert len([line for line in server.errors if "downloading" in line]) == 1
    phases = [
        match[1] for line in server.errors if (match := re.search(r"start-up phase (\w+) took \d+\.\d\d s", line))
    ]
    assert sorted(phases) == ["calibration", "capture", "compile", "imports", "memory", "model", "total", "weights"]


def test_a_signal_ends_a_download(hub):
    hub.may_send.clear()
    command = [sys.executable, "-m", "nanovllm_server", "org/model", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not hub.requested_files and time.monotonic() < deadline:
            time.sleep(0.02)
        assert hub.requested_files
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""


def test_offline_mode_without_the_model_fails_with_one_line(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = [sys.executable, "-m", "nanovllm_server", "org/model", "--port", "0", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("nanovllm-server: org/model is not in the cache")
