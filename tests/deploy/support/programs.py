import os
import shutil

import pytest


def require_programs(package: str, *programs: str) -> None:
    """Skips the calling test if a program is not in PATH. In CI, the test fails instead."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        message = f"{' and '.join(missing)} not found in PATH: install the package {package}, or run .ci/run as root"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(message)
