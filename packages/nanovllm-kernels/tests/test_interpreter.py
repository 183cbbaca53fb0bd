"""Tests the Triton kernels' own source under Triton's interpreter on the CPU.

Separate processes run the tests in `kernels/`, because an environment variable selects the interpreter when triton is
imported. `conftest` starts these processes before the first test.
"""

import pytest

from nanovllm_kernels.platform import has_triton


@pytest.mark.skipif(not has_triton(), reason="triton isn't installed here")
@pytest.mark.parametrize("name", ["half", "rest"])
def test_kernels_pass_under_the_interpreter(name, interpreter_processes):
    process = interpreter_processes[name]
    output, _ = process.communicate()
    assert process.returncode == 0, output[-8000:]
    assert " passed" in output
