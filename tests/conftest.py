import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from nanovllm_models import default_model_path

ChooseTokens = Callable[[PreTrainedModel, list[int], list[int]], list[int]]

MAX_START_S = 500


class ReferenceAnswer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


GenerateTokens = Callable[[PreTrainedModel, list[int], int], ReferenceAnswer]


@dataclass
class ServerProcess:
    """errors: lines of stderr."""

    process: subprocess.Popen[str]
    url: str
    errors: list[str]

    def _children(self) -> list[int]:
        """Leaves out multiprocessing's resource tracker. The child with the least memory comes first."""
        pid = self.process.pid
        memory_by_child: dict[int, int] = {}
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            with suppress(FileNotFoundError, ProcessLookupError):
                if "resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text():
                    memory_by_child[child] = int(Path(f"/proc/{child}/statm").read_text().split()[1])
        return sorted(memory_by_child, key=memory_by_child.__getitem__)

    def engine_pid(self) -> int:
        return self._children()[-1]

    def worker_pids(self) -> list[int]:
        return self._children()[:-1]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


# Tests without these markers are at 0.
PLACE_BY_MARKER = {"starts": -1, "waits": 1, "measures": 2}


# Run last, because pytest sorts tests by their shared fixtures in the same hook.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: sum(place for name, place in PLACE_BY_MARKER.items() if item.get_closest_marker(name)))


@contextmanager
def start_server(
    model: Path | str | None,
    *flags: str,
    nice: int = 0,
    program: Sequence[str | Path] = (sys.executable, "-m", "nanovllm_server"),
    environment: Mapping[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """model: None for the program's default model."""
    arguments = [] if model is None else [model]
    command = ["nice", "-n", str(nice), *program, *arguments, "--port", "0", "--device", "cpu", *flags]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        errors: list[str] = []
        drain = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)
        drain.start()
        watchdog = threading.Timer(MAX_START_S, process.kill)
        watchdog.start()
        try:
            url = next((urls[0] for line in process.stdout if (urls := re.findall(r"http://\S+:\d+", line))), None)
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


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def default_model() -> Path:
    return default_model_path(show_progress=False)


@pytest.fixture(scope="session")
def load_reference() -> Callable[[Path, torch.dtype, str], PreTrainedModel]:
    @cache
    def load(path: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).to(device).eval()

    return load


@pytest.fixture(scope="session")
def reference_generate() -> GenerateTokens:
    def generate(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> ReferenceAnswer:
        ids = torch.tensor([prompt], device=model.device)
        model.generation_config.eos_token_id = None
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
            logprobs = torch.cat(output.logits).float().log_softmax(-1).amax(-1)
        return ReferenceAnswer(output.sequences[0, len(prompt) :].tolist(), logprobs.tolist())

    return generate


@pytest.fixture(scope="session")
def greedy_choices() -> ChooseTokens:
    """A function that returns the likeliest token at each position of an output. A greedy output equals the result."""

    @cache
    def compute(model: PreTrainedModel, prompt: tuple[int, ...], output: tuple[int, ...]) -> list[int]:
        ids = torch.tensor([prompt + output[:-1]], device=model.device)
        with torch.inference_mode():
            return model(ids, logits_to_keep=len(output)).logits[0].argmax(-1).tolist()

    return lambda model, prompt, output: compute(model, tuple(prompt), tuple(output))


@pytest.fixture(scope="session")
def run_server() -> Callable:
    return start_server
