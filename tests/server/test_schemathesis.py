"""Generated requests, valid and invalid: no answer is a 5xx, and every answer fits the API's description.

A longer run against a running server:

    export NANOVLLM_MODEL=SmolLM2-135M-Instruct PYTHONPATH=tests/server/schemathesis SCHEMATHESIS_HOOKS=hooks
    uv run schemathesis --config-file tests/server/schemathesis/schemathesis.toml \\
        run http://127.0.0.1:8000/openapi.json --max-examples 2000 --seed 7
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HOOKS_FOLDER = Path(__file__).with_name("schemathesis")
MAX_EXAMPLES = 20


def test_no_generated_request_causes_a_5xx_or_an_undescribed_answer(tiny_server, tmp_path):
    done = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"),
            *("--config-file", HOOKS_FOLDER / "schemathesis.toml", "run", f"{tiny_server.url}/openapi.json"),
            *("--max-examples", str(MAX_EXAMPLES), "--generation-deterministic", "--seed", "1", "--no-color"),
        ],
        cwd=tmp_path,
        env={**os.environ, "NANOVLLM_MODEL": "tiny", "PYTHONPATH": str(HOOKS_FOLDER), "SCHEMATHESIS_HOOKS": "hooks"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) generated", done.stdout)[1]) > 400, done.stdout
    assert tiny_server.process.poll() is None
    assert not any("Traceback" in line for line in tiny_server.errors), "".join(tiny_server.errors)
