"""Tests the Triton kernels under Triton's interpreter on the CPU.

Triton selects the interpreter on import. Other processes therefore run the tests.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from nanovllm_kernels.platform import has_triton

KERNEL_TESTS = Path(__file__).parent / "kernels"
# Two processes run at once: one runs these files, the other one runs the other files.
HALF_FILES = tuple(KERNEL_TESTS / f"test_{name}.py" for name in ("attention", "gemm", "mla", "sampling"))
PYTEST_ARGUMENTS = (HALF_FILES, (KERNEL_TESTS, *(f"--ignore={file}" for file in HALF_FILES)))
TIMEOUT_S = 1800


@pytest.mark.background
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.skipif(not has_triton(), reason="triton isn't installed here")
def test_kernels_pass_under_the_interpreter(request, tmp_path):
    outputs = [tmp_path / f"output-{index}" for index in range(len(PYTEST_ARGUMENTS))]
    with ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        for arguments, output in zip(PYTEST_ARGUMENTS, outputs, strict=True):
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
                cwd=request.config.rootpath,
                env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
                stdout=stack.enter_context(output.open("w")),
                stderr=subprocess.STDOUT,
            )
            # On errors, kill the process first: leaving the context of a Popen waits for the process.
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        statuses = [process.wait() for process in processes]
    for status, output in zip(statuses, outputs, strict=True):
        text = output.read_text()
        assert status == 0, text[-8000:]
        assert " passed" in text
