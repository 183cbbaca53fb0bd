"""Tests `find_model` with a hub on a loopback address."""

import os
import pty
import re
import socket
import subprocess
import sys
import termios
from collections.abc import Generator
from pathlib import Path

import pytest
from loopback_hub import COMMIT, TOKEN, LoopbackHub, run_hub

from nanovllm_models import ModelDirectory, ModelError, find_model
from nanovllm_models.hub import is_repository

WANTED = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b'{"top_p": 1}',
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b'{"eos_token": "end"}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-00001-of-00002.safetensors": b"first shard",
    "model-00002-of-00002.safetensors": b"second shard",
}
UNWANTED = {
    "README.md": b"a model card",
    "modeling_custom.py": b"raise SystemExit",
    "pytorch_model.bin": b"a pickle",
    "consolidated.safetensors": b"a copy of the weights",
    "original/params.json": b"{}",
    "onnx/model.safetensors": b"another copy",
}

FIND = """
import sys, nanovllm_models as models
try: print(models.find_model(sys.argv[1], with_weights=len(sys.argv) < 3))
except models.ModelError as error: print(f"ModelError: {error}")
"""
LOG_AND_FIND = (
    """
import logging
logging.basicConfig(level="INFO")
for library in ("httpx", "httpx2"): logging.getLogger(library).disabled = True
"""
    + FIND
)


@pytest.fixture
def hub(tmp_path: Path) -> Generator[LoopbackHub]:
    with run_hub(WANTED | UNWANTED, tmp_path / "cache") as hub:
        yield hub


def run_find_model(hub: LoopbackHub, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", FIND, *arguments],
        env=hub.environment | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def parse_directory(result: str) -> Path:
    path, name = re.fullmatch(r"ModelDirectory\(path=\w+\('(.*)'\), name='(.*)'\)", result).groups()
    assert name in ("org/model", "org/private")
    return Path(path)


def test_a_download_fetches_weights_json_tokenizer_and_template_but_no_code_and_no_copies(hub: LoopbackHub):
    directory = parse_directory(run_find_model(hub, "org/model"))
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == WANTED
    assert set(hub.requested_files) == set(WANTED)


def test_a_model_is_downloaded_once_and_then_found_without_a_network(hub: LoopbackHub):
    directory = run_find_model(hub, "org/model")
    hub.requested_files.clear()
    assert run_find_model(hub, "org/model") == directory
    assert run_find_model(hub, "org/model", HF_HUB_OFFLINE="1") == directory
    assert hub.requested_files == []


def test_a_terminal_shows_a_progress_bar_instead_of_a_log_line(hub: LoopbackHub):
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    with os.fdopen(controller, "rb", buffering=0) as screen, os.fdopen(terminal, "wb") as stderr:
        subprocess.run(
            [sys.executable, "-c", LOG_AND_FIND, "org/model"],
            env=hub.environment,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            timeout=60,
            check=True,
        )
        shown = screen.read(1 << 16).decode()
    assert "100%" in shown
    assert "downloading" not in shown


def test_without_a_terminal_a_download_is_one_log_line(hub: LoopbackHub):
    done = subprocess.run(
        [sys.executable, "-c", LOG_AND_FIND, "org/model"],
        env=hub.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (line,) = done.stderr.splitlines()
    assert (
        f"downloading from {hub.url} the files of org/model that are not yet in {hub.environment['HF_HOME']}/hub"
        in line
    )


def test_a_revision_follows_an_at_sign(hub: LoopbackHub):
    assert parse_directory(run_find_model(hub, "org/model@v1.0")).name == COMMIT
    assert parse_directory(run_find_model(hub, f"org/model@{COMMIT}")).name == COMMIT
    assert "has no revision v2.0: name a branch, a tag or a commit" in run_find_model(hub, "org/model@v2.0")


def test_a_private_repository_is_read_with_hf_token(hub: LoopbackHub):
    refused = run_find_model(hub, "org/private")
    assert refused.startswith("ModelError: org/private is neither a directory nor a repository")
    assert "set HF_TOKEN" in refused
    assert parse_directory(run_find_model(hub, "org/private", HF_TOKEN=TOKEN)).name == COMMIT


def test_a_gated_repository_says_where_to_accept_the_licence(hub: LoopbackHub):
    message = run_find_model(hub, "org/gated")
    assert message.startswith("ModelError: access to org/gated")
    assert "accept the licence" in message


def test_an_unknown_repository_names_the_hub(hub: LoopbackHub):
    message = run_find_model(hub, "org/unknown")
    assert message.startswith("ModelError: org/unknown is neither a directory nor a repository")
    assert hub.url in message


def test_a_refusal_has_the_reason_of_the_hub(hub: LoopbackHub):
    message = run_find_model(hub, "org/refused")
    assert message.startswith(f"ModelError: {hub.url} refused to send org/refused: ")
    assert "not available in your country" in message


def test_the_error_for_a_broken_download_says_how_to_continue(hub: LoopbackHub):
    message = run_find_model(hub, "org/broken")
    assert message.startswith("ModelError: the download of org/broken")
    assert "start again to continue" in message


def test_an_unreachable_hub_is_named(hub: LoopbackHub):
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        endpoint = f"http://127.0.0.1:{closed_soon.getsockname()[1]}"
    message = run_find_model(hub, "org/model", HF_ENDPOINT=endpoint)
    assert message.startswith(f"ModelError: org/model is not a directory, and {endpoint} can't be reached")


def test_offline_mode_downloads_nothing_and_says_how_to_allow_it(hub: LoopbackHub):
    assert "HF_HUB_OFFLINE forbids downloads: unset HF_HUB_OFFLINE" in run_find_model(
        hub, "org/model", HF_HUB_OFFLINE="1"
    )
    assert hub.requested_files == []


def test_without_weights_no_safetensors_file_is_downloaded(hub: LoopbackHub):
    directory = parse_directory(run_find_model(hub, "org/model", "without weights"))
    assert {file.name for file in directory.iterdir()} == {name for name in WANTED if not name.endswith(".safetensors")}


def test_a_directory_takes_precedence_over_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "org" / "model" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert find_model("org/model") == ModelDirectory(Path("org/model"), "model")
    assert not is_repository("org/model")
    assert is_repository("org/other")


def test_a_directory_without_a_config_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="has no config.json: it is not a Hugging Face model directory"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("model", ["./missing/model", "/missing/model", "a/b/c", "../model", "org/model@", "~nobody/x"])
def test_a_path_that_is_no_directory_is_refused_without_a_download(model: str):
    with pytest.raises(ModelError, match=f"^'{model}' is not a directory: pass a directory with config.json"):
        find_model(model)


@pytest.mark.parametrize("model", ["missing", "Qwen3-0.6B", "x" * 5000, "", "a\0b"])
def test_a_word_that_is_no_directory_is_refused_without_a_download(model: str):
    with pytest.raises(ModelError, match="is neither a directory nor the name of a repository: pass a directory"):
        find_model(model)


def test_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"^'org/model\.gguf' is not a directory"):
        find_model("org/model.gguf")
