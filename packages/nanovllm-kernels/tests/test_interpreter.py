"""Tests the Triton kernels under Triton's interpreter on the CPU.

Triton selects the interpreter on import. Separate processes, which `conftest` starts, therefore run the tests.
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
