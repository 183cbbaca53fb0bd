"""An import of torch takes seconds and half a gigabyte per process."""

import subprocess
import sys

PROGRAM = """
import sys
import nanovllm_server.processes.server, nanovllm_server.processes.worker
from transformers import PreTrainedTokenizerFast
print("torch" in sys.modules)
print("quart" in sys.modules)
"""


def run(program: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_neither_parent_nor_worker_imports_torch():
    assert run(PROGRAM) == ["False", "True"]


def test_the_parent_imports_no_web_framework():
    assert run(
        PROGRAM.replace(", nanovllm_server.processes.worker", "")
        .replace("from transformers", "from orjson")
        .replace("PreTrainedTokenizerFast", "dumps")
    ) == ["False", "False"]
