"""The Triton kernels' own source, run by Triton's interpreter on the CPU.

In processes of their own: the interpreter is chosen by an environment variable when triton is first imported.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nanovllm_kernels.platform import has_triton

KERNELS = Path(__file__).parent / "kernels"
# About half of the time that all take.
HALF = (KERNELS / "test_attention.py", KERNELS / "test_sampling.py")
RUNS = {"half": HALF, "rest": (KERNELS, *(f"--ignore={file}" for file in HALF))}


@pytest.fixture(scope="module")
def outcomes(request):
    """Both runs, side by side: each keeps one core busy."""

    def run(arguments):
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", *arguments],
            cwd=request.config.rootpath,
            env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    with ThreadPoolExecutor(len(RUNS)) as pool:
        yield {name: pool.submit(run, arguments) for name, arguments in RUNS.items()}


@pytest.mark.skipif(not has_triton(), reason="triton isn't installed here")
@pytest.mark.parametrize("name", RUNS)
def test_kernels_under_the_interpreter(name, outcomes):
    outcome = outcomes[name].result()
    assert outcome.returncode == 0, outcome.stdout[-8000:] + outcome.stderr[-2000:]
    assert " passed" in outcome.stdout
