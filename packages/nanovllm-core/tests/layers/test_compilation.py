import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nanovllm_core.layers import compilation as compilation_module
from nanovllm_core.layers.compilation import compile_for_rows, set_cache_directories

CACHE_VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUTE_DSL_CACHE_DIR": "cute",
    "CUTE_EXPERIMENTAL_DSL_CACHE_DIR": "cute",
    "QUACK_CACHE_DIR": "quack",
}


@pytest.fixture(autouse=True)
def counter(monkeypatch, tmp_path) -> CompileCounterWithBackend:
    """Replaces Inductor. A second compilation of the same function is an error."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compilation_module, "BACKEND", counter)
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    for name in (*CACHE_VARIABLES, "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with torch._dynamo.config.patch(recompile_limit=1):
        yield counter


def mix(rows, others, weights):
    return [(rows + others) * weight for weight in weights]


def test_at_most_one_compilation_for_all_numbers_of_rows(counter):
    weights = (torch.randn(8), torch.randn(1))
    compiled_mix = compile_for_rows(mix, 9)
    for num_rows, count in [(8, 0), (64, 1), (8, 1), (9, 1), (16, 1), (1, 1), (1000, 1)]:
        rows, others = torch.randn(num_rows, 8), torch.randn(num_rows, 8)
        for found, expected in zip(compiled_mix(rows, others, weights), mix(rows, others, weights), strict=True):
            torch.testing.assert_close(found, expected)
        assert counter.frame_count == count


def test_a_single_row_is_compiled_if_min_rows_is_one(counter):
    weights = (torch.randn(8),)
    compiled_mix = compile_for_rows(mix, 1)
    with torch._dynamo.config.patch(recompile_limit=2):
        for num_rows in (16, 1, 2, 300, 1):
            rows = torch.randn(num_rows, 8)
            assert torch.equal(compiled_mix(rows, rows, weights)[0], mix(rows, rows, weights)[0])
    assert counter.frame_count == 2


def test_each_result_of_compile_for_rows_is_compiled_separately(counter):
    compiled = [(compile_for_rows(mix, 9), torch.randn(width)) for width in (4, 8, 12)]
    for _ in range(2):
        for compiled_mix, weight in compiled:
            rows = torch.randn(20, len(weight))
            assert torch.equal(compiled_mix(rows, rows, (weight,))[0], 2 * rows * weight)
    assert counter.frame_count == 3


def test_compiled_code_is_cached_if_the_directory_is_writable(tmp_path, monkeypatch):
    compile_for_rows(mix, 9)
    assert all(os.environ[name] == str(tmp_path / directory) for name, directory in CACHE_VARIABLES.items())
    for name in CACHE_VARIABLES:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NANOVLLM_CACHE", "/proc/nowhere")
    compile_for_rows(mix, 9)
    assert not any(os.environ.get(name, "").startswith("/proc") for name in CACHE_VARIABLES)


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs CuTe DSL")
def test_cute_dsl_leaves_nothing_in_the_directory_for_temporary_files(tmp_path):
    code = "from nanovllm_core.layers.compilation import set_cache_directories as f; f(); import cutlass.cute"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in CACHE_VARIABLES}
    environment |= {"TMPDIR": str(temporary), "NANOVLLM_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert list(temporary.iterdir()) == []


def test_cache_directories_of_the_user_are_kept(monkeypatch):
    for name in CACHE_VARIABLES:
        monkeypatch.setenv(name, "/somewhere")
    set_cache_directories()
    assert [os.environ[name] for name in CACHE_VARIABLES] == ["/somewhere"] * len(CACHE_VARIABLES)
