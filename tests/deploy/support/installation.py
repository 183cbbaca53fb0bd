"""Builds wheels of the four packages, installs them into an empty environment and starts a server from there."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from proxies import chat, post_chat

ROOT = Path(__file__).parents[3]
NICE = 10
MAX_SETUP_S = 300


def run_uv(*arguments: str | Path) -> str:
    command = ["nice", "-n", str(NICE), "uv", "--quiet", *arguments]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=MAX_SETUP_S, check=False)
    assert process.returncode == 0, f"{command}\n{process.stderr}"
    return process.stdout


def build_wheels(folder: Path) -> dict[str, Path]:
    run_uv("build", "--all-packages", "--wheel", "--out-dir", folder)
    return {file.name.split("-")[0].replace("_", "-"): file for file in folder.glob("*.whl")}


@dataclass(frozen=True)
class InstalledServer:
    server: Any
    stderr_without_model: str
    completion: dict[str, Any]
    peak_parent_bytes: int


def install_wheels(wheels: dict[str, Path], environment: Path) -> None:
    run_uv("venv", "--python", sys.executable, environment)
    # Install the versions of the lock file, because uv's cache already has these versions.
    constraints = environment.with_name("constraints.txt")
    lock = ("--locked", "--package", "nanovllm-server", "--no-default-groups", "--no-emit-workspace", "--no-hashes")
    constraints.write_text(run_uv("export", *lock))
    run_uv("pip", "install", "--python", environment, "--constraints", constraints, *wheels.values())
    # Copy bytecode, because compiling torch again would take 10 s.
    # Other processes are still writing files with a number after `.pyc`.
    site = Path(pytest.__file__).parents[1]
    for bytecode in site.rglob("__pycache__"):
        target = environment / site.relative_to(sys.prefix) / bytecode.relative_to(site)
        if target.parent.is_dir():
            shutil.copytree(bytecode, target, ignore=shutil.ignore_patterns("*.pyc.*"), dirs_exist_ok=True)


def start_from_wheels(
    wheels: dict[str, Path], folder: Path, run_server: Callable, flags: tuple[str, ...], stack: ExitStack
) -> InstalledServer:
    install_wheels(wheels, folder / "environment")
    program = folder / "environment" / "bin" / "nanovllm-server"
    excluded_prefixes = ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PYTEST_", "PYTHON")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(excluded_prefixes)}
    variables["NANOVLLM_CACHE"] = str(folder / "cache")
    refused = subprocess.run(
        [program, "--port", "0"], env=variables, capture_output=True, text=True, timeout=MAX_SETUP_S, check=False
    )
    assert refused.returncode == 2, refused.stderr
    # Use uv, because the environment has no pip.
    command = re.search(r"\((pip install .*)\)", refused.stderr)[1]
    run_uv(*command.split(), "--python", folder / "environment")
    server = stack.enter_context(run_server(None, *flags, nice=NICE, program=(program,), environment=variables))
    with post_chat(server.url, chat(max_tokens=4)) as response:
        completion = json.load(response)
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    peak_parent_bytes = int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) << 10
    return InstalledServer(server, refused.stderr, completion, peak_parent_bytes)
