"""Real `nanovllm-server` processes on loopback."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

START_S = 120


@dataclass
class ServerProcess:
    """A server that serves at `url`."""

    process: subprocess.Popen[str]
    url: str
    errors: list[str]

    def _children(self) -> list[int]:
        """Its processes, smallest first; without the one that multiprocessing has of its own."""
        pid = self.process.pid
        children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        ours = [child for child in children if "resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text()]
        return sorted(ours, key=lambda child: int(Path(f"/proc/{child}/statm").read_text().split()[1]))

    def engine_pid(self) -> int:
        """The process that the engine runs in: the one with the most memory."""
        return self._children()[-1]

    def worker_pids(self) -> list[int]:
        """The processes that serve HTTP."""
        return self._children()[:-1]

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def running(model: Path, *flags: str) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "nanovllm_server", str(model), "--port", "0", "--device", "cpu", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        errors: list[str] = []
        drain = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)
        drain.start()
        watchdog = threading.Timer(START_S, process.kill)
        watchdog.start()
        try:
            url = next((found[0] for line in process.stdout if (found := re.findall(r"http://\S+:\d+", line))), None)
            watchdog.cancel()
            assert url is not None, "".join(errors)
            yield ServerProcess(process, url, errors)
        finally:
            watchdog.cancel()
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
            drain.join(10)


@pytest.fixture(scope="session")
def run_server() -> Callable:
    return running


@pytest.fixture(scope="session")
def server(default_model: Path) -> Iterator[ServerProcess]:
    """The default model in float32, so that its greedy tokens are transformers' own."""
    with running(
        default_model, "--dtype", "float32", "--max-model-len", "512", "--cpu-cache-gib", "0.25", "--max-num-seqs", "8"
    ) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the default model's tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    for file in default_model.iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "special_tokens")):
            (path / file.name).write_bytes(file.read_bytes())
    return path
