"""The models and the server that tests of the server process share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def server(run_server: Callable, default_model: Path) -> Iterator:
    """The default model in float32, so that its greedy tokens are transformers' own."""
    with run_server(
        default_model, "--dtype", "float32", "--max-model-len", "512", "--cpu-cache-gib", "0.25", "--max-num-seqs", "8"
    ) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the default model's tokenizer."""
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
