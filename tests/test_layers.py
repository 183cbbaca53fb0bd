"""Imports go downward only: between the packages, and between the rooms of core."""

import subprocess
import sys
from pathlib import Path


def test_every_import_contract_holds():
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout
