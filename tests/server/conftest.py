import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx2
import pytest
import torch
from contract import ObservedResponse, check_response
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

NUM_SHALLOW_LAYERS = 4


class RecordedStream(httpx2.AsyncByteStream):
    def __init__(self, request: httpx2.Request, response: httpx2.Response, exchanges: list[ObservedResponse]):
        self._request, self._response, self._exchanges = request, response, exchanges
        self._stream = response.stream
        self._body = bytearray()
        self._is_complete = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._body += part
            yield part
        self._is_complete = True

    async def aclose(self) -> None:
        await self._stream.aclose()
        url, response = self._request.url, self._response
        content_type = response.headers.get("content-type", "")
        body = bytes(self._body)
        self._exchanges.append(
            ObservedResponse(
                self._request.method, url.path, response.status_code, content_type, body, self._is_complete
            )
        )


@pytest.fixture(autouse=True)
def exchanges(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ObservedResponse]]:
    """The answers that OpenAI's client received in this test. Each must follow the contract."""
    exchanges: list[ObservedResponse] = []
    original_handler = httpx2.AsyncHTTPTransport.handle_async_request

    async def handle(self: httpx2.AsyncHTTPTransport, request: httpx2.Request) -> httpx2.Response:
        response = await original_handler(self, request)
        response.stream = RecordedStream(request, response, exchanges)
        return response

    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", handle)
    yield exchanges
    for exchange in exchanges:
        check_response(exchange)


@pytest.fixture(scope="session")
def server(run_server: Callable, default_model: Path) -> Iterator:
    with run_server(
        default_model, "--dtype", "float32", "--max-model-len", "512", "--cpu-cache-gib", "0.25", "--max-num-seqs", "8"
    ) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    for file in default_model.iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "special_tokens")):
            (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.fixture(scope="session")
def shallow_model(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of the default model, for tests that need no sensible text."""
    path = tmp_path_factory.mktemp("shallow") / "shallow"
    shutil.copytree(default_model, path, ignore=shutil.ignore_patterns("model.safetensors", "manifest.json"))
    config = json.loads((path / "config.json").read_text())
    removed = tuple(f"model.layers.{layer}." for layer in range(NUM_SHALLOW_LAYERS, config["num_hidden_layers"]))
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": NUM_SHALLOW_LAYERS}))
    tensors = load_file(default_model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(removed)}
    save_file(kept, path / "model.safetensors")
    return path


@pytest.fixture(scope="session")
def shallow_server(run_server: Callable, shallow_model: Path) -> Iterator:
    """A server in float32, where a token does not depend on other requests in the batch."""
    flags = ("--dtype", "float32", "--max-model-len", "1024", "--cpu-cache-gib", "0.25", "--max-num-seqs", "20")
    with run_server(shallow_model, *flags) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_server(run_server: Callable, tiny_model: Path) -> Iterator:
    """A server for tests that leave no state behind."""
    flags = ("--served-model-name", "tiny", "--max-model-len", "1024", "--cpu-cache-gib", "0.05", "--max-num-seqs", "8")
    parsers = ("--reasoning-parser", "think", "--tool-call-parser", "hermes")
    with run_server(tiny_model, *flags, *parsers, "--log-format", "json", "--log-prompts") as server:
        yield server
