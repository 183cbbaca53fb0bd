import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_the_program_in_the_readme_runs(default_model, tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path / "program.py"
    file.write_text(program)
    environment = os.environ | {"NANOVLLM_CACHE": str(default_model.parent)}
    done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
