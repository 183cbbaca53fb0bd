"""The Triton kernels' own source, run by Triton's interpreter on the CPU.

In processes of their own: the interpreter is chosen by an environment variable when triton is first imported. They
begin with the session's first test and are waited for behind its last (`conftest`): they take minutes, and most other
tests leave a core idle.
"""

import pytest

from nanovllm_kernels.platform import has_triton


@pytest.mark.skipif(not has_triton(), reason="triton isn't installed here")
@pytest.mark.parametrize("name", ["half", "rest"])
def test_kernels_under_the_interpreter(name, interpreted):
    process = interpreted[name]
    output, _ = process.communicate()
    assert process.returncode == 0, output[-8000:]
    assert " passed" in output
