"""The Triton kernels' own source, run by Triton's interpreter on the CPU.

In a process of its own: the interpreter is chosen by an environment variable when triton is first imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm_kernels.platform import has_triton


@pytest.mark.skipif(not has_triton(), reason="triton isn't installed here")
def test_kernels_under_the_interpreter(request):
    outcome = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--durations=5",
            Path(__file__).parent / "kernels",
        ],
        cwd=request.config.rootpath,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout[-8000:] + outcome.stderr[-2000:]
    assert " passed" in outcome.stdout
