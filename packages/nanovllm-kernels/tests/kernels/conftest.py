"""Runs the tested Triton kernels on a GPU, or in Triton's interpreter on the CPU if TRITON_INTERPRET=1 is set."""

import os
from pathlib import Path

import pytest
import torch

from nanovllm_kernels.platform import has_cuda

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> str:
    if INTERPRETED:
        return "cpu"
    if not has_cuda():
        pytest.skip("needs an NVIDIA GPU")
    return "cuda"


@pytest.fixture(autouse=True)
def interpreter_that_rounds_to_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix Triton 3.6's interpreter: it loses a carry when it rounds to a type that numpy lacks (31.5 becomes 16)."""
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_exactly(data, source, target, rounding):
        if source == tl.float32 and target == tl.float8e4nv:
            # Saturate at the largest finite value, like the instruction (satfinite).
            numbers = torch.from_numpy(data.view("float32").clip(-448, 448))
            return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(data, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert_exactly)


@pytest.fixture(autouse=True)
def interpreter_with_fused_multiply_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix Triton 3.6's interpreter: it rounds `tl.fma` twice, but the GPU rounds once."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    def create_fma(self, x, y, z):
        product = x.data.astype("float64") * y.data.astype("float64")
        return interpreter.TensorHandle((product + z.data).astype(z.data.dtype), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)


@pytest.fixture(scope="session", autouse=True)
def changed_interpreter() -> None:
    if not INTERPRETED:
        return
    from interpreter_fixes import change_interpreter

    change_interpreter()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `triton_sort` split even a few (token, expert) pairs into several parts."""
    from nanovllm_kernels.moe import triton_sort

    sizes = {"MAX_SINGLE_PART_PAIRS": 32, "SMALL_PART_PAIRS": 32, "MAX_SMALL_PARTS": 3}
    sizes |= {"LARGE_PART_PAIRS": 64, "PARTS_PER_LOAD": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(triton_sort, name, size)
