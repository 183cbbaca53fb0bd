import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CORE = Path(__file__).parents[1]
KERNELS = CORE.parent / "nanovllm-kernels"


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (CORE / "README.md").read_text(), re.DOTALL)
    return code


def uv(*arguments: str, cwd: Path) -> str:
    # `uv run` sets the variable UV to its own path, so uv need not be in PATH.
    program = os.environ.get("UV") or shutil.which("uv")
    assert program, "uv is needed: run the tests with `uv run pytest`"
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run([program, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_example_is_short():
    assert len(example().splitlines()) < 60


@pytest.mark.slow
def test_readme_example_runs_with_core_alone(tmp_path):
    (tmp_path / "toy.py").write_text(example())
    uv("venv", "--quiet", "env", cwd=tmp_path)
    python = str(tmp_path / "env" / "bin" / "python")
    # The workspace's lock file has the same version of torch, so uv need not download it again.
    uv("pip", "install", "--quiet", "--python", python, "torch==2.11.0", str(KERNELS), str(CORE), cwd=tmp_path)
    names = {line.split()[0] for line in uv("pip", "list", "--python", python, cwd=tmp_path).splitlines()[2:]}
    assert "nanovllm-core" in names
    assert not names & {"quart", "nanovllm-models", "nanovllm-server"}
    # Only xgrammar requires these packages. The example must run without them.
    uv("pip", "uninstall", "--quiet", "--python", python, "transformers", "tokenizers", cwd=tmp_path)
    done = subprocess.run([python, "-W", "error", "toy.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens = [int(token) for token in done.stdout.split()]
    assert len(tokens) == 10
    assert all(0 <= token < 256 for token in tokens)
