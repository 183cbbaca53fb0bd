"""Models of the Hugging Face Hub, with a hub on a loopback address that the environment variables name."""

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest

from nanovllm_models import ModelDirectory, ModelError, find_model
from nanovllm_models.hub import is_repository

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_loopback"
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
FILES = WANTED | UNWANTED


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's HTTP interface that a download uses; `org/private` needs a token, `org/gated` a licence."""

    downloads: list[str]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        """Write nothing: the tests' output has no access log."""

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if "org/gated" in path:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body=with_body)
        elif "org/private" in path and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)
        elif "org/refused" in path:
            self._send(451, b"{}", {"X-Error-Message": "not available in your country"}, with_body=with_body)
        elif "org/broken" in path:
            self.close_connection = True
        elif not any(name in path for name in ("org/model", "org/private")):
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)
        elif "/revision/" in path:
            if path.rpartition("/")[2] in ("main", "v1.0", COMMIT):
                self._send_json({"id": "org/model", "sha": COMMIT, "siblings": []}, with_body=with_body)
            else:
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body=with_body)
        elif "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self._send_json(tree, with_body=with_body)
        else:
            name = path.partition(f"/resolve/{COMMIT}/")[2]
            if with_body:
                self.downloads.append(name)
            etag = hashlib.sha1(FILES[name]).hexdigest()
            self._send(200, FILES[name], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, with_body=with_body)

    def _send_json(self, value: object, *, with_body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, with_body=with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


class LoopbackHub:
    """A running hub, and the environment of processes that use it."""

    def __init__(self, server: ThreadingHTTPServer, cache: Path):
        self.downloads: list[str] = []
        Hub.downloads = self.downloads
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
            "HF_HOME": str(cache),
        }

    def find(self, model: str, **environment: str) -> str:
        """Return what `find_model` returns in a new process: a directory, or the message of its ModelError."""
        program = (
            "import sys, nanovllm_models as models\n"
            "try: print(models.find_model(sys.argv[1]).path)\n"
            "except models.ModelError as error: print(f'ModelError: {error}')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, model],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.strip()


@pytest.fixture
def hub(tmp_path: Path) -> Generator[LoopbackHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield LoopbackHub(server, tmp_path / "cache")
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_fetches_weights_json_tokenizer_and_template_but_no_code_and_no_copies(hub: LoopbackHub):
    directory = Path(hub.find("org/model"))
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == WANTED
    assert set(hub.downloads) == set(WANTED)


def test_a_model_is_downloaded_once_and_then_found_without_a_network(hub: LoopbackHub):
    directory = hub.find("org/model")
    hub.downloads.clear()
    assert hub.find("org/model") == directory
    assert hub.find("org/model", HF_HUB_OFFLINE="1") == directory
    assert hub.downloads == []


def test_a_revision_follows_an_at_sign(hub: LoopbackHub):
    assert hub.find("org/model@v1.0").endswith(COMMIT)
    assert hub.find(f"org/model@{COMMIT}").endswith(COMMIT)
    assert "has no revision v2.0: name a branch, a tag or a commit" in hub.find("org/model@v2.0")


def test_a_private_repository_is_read_with_hf_token(hub: LoopbackHub):
    refused = hub.find("org/private")
    assert refused.startswith("ModelError: org/private is neither a directory nor a repository")
    assert "set HF_TOKEN" in refused
    assert hub.find("org/private", HF_TOKEN=TOKEN).endswith(COMMIT)


def test_a_gated_repository_says_where_to_accept_the_licence(hub: LoopbackHub):
    message = hub.find("org/gated")
    assert message.startswith("ModelError: access to org/gated")
    assert "accept the licence" in message


def test_an_unknown_repository_names_the_hub(hub: LoopbackHub):
    message = hub.find("org/unknown")
    assert message.startswith("ModelError: org/unknown is neither a directory nor a repository")
    assert hub.environment["HF_ENDPOINT"] in message


def test_a_refusal_has_the_reason_of_the_hub(hub: LoopbackHub):
    message = hub.find("org/refused")
    assert message.startswith(f"ModelError: {hub.environment['HF_ENDPOINT']} refused to send org/refused: ")
    assert "not available in your country" in message


def test_a_download_that_breaks_off_can_be_continued(hub: LoopbackHub):
    message = hub.find("org/broken")
    assert message.startswith("ModelError: the download of org/broken")
    assert "start again to continue" in message


def test_an_unreachable_hub_is_named(hub: LoopbackHub):
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        endpoint = f"http://127.0.0.1:{closed_soon.getsockname()[1]}"
    message = hub.find("org/model", HF_ENDPOINT=endpoint)
    assert message.startswith(f"ModelError: org/model is not a directory, and {endpoint} can't be reached")


def test_offline_mode_downloads_nothing_and_says_how_to_allow_it(hub: LoopbackHub):
    assert "HF_HUB_OFFLINE forbids downloads: unset HF_HUB_OFFLINE" in hub.find("org/model", HF_HUB_OFFLINE="1")
    assert hub.downloads == []


def test_without_weights_no_safetensors_file_is_downloaded(hub: LoopbackHub):
    program = "import nanovllm_models as models; print(models.find_model('org/model', with_weights=False).path)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=hub.environment, capture_output=True, text=True, timeout=60, check=True
    )
    names = {file.name for file in Path(done.stdout.strip()).iterdir()}
    assert names == {name for name in WANTED if not name.endswith(".safetensors")}


def test_the_name_of_a_repository_has_no_revision(hub: LoopbackHub):
    program = "import nanovllm_models as models; print(models.find_model('org/model@v1.0').name)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=hub.environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "org/model"


def test_a_directory_takes_precedence_over_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_model("org/model") == ModelDirectory(Path("org/model"), "model")
    assert not is_repository("org/model")
    assert is_repository("org/other")


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
