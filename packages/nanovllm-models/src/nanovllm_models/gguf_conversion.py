"""Converts a SmolLM model from a GGUF file into a Hugging Face directory in bfloat16."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, TokenType
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm

from nanovllm_models.errors import ModelError

# Names of modules in Hugging Face checkpoints, by name in GGUF files.
GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Modules whose rows GGUF permutes, with the metadata key of each module's number of heads.
HEAD_COUNT_KEYS = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}

# Metadata of a GGUF file, by key.
Metadata = dict[str, Any]
# Keys of the metadata that `convert` checks.
MODEL_KIND_KEYS = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")


def convert(file: Path, directory: Path, *, show_progress: bool | None = None) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into `directory`, which must exist.

    Raises ModelError if the model is not a SmolLM model, OSError if the directory can't be written.
    show_progress: whether to show a progress bar on stderr; None: show it if stderr is a terminal.
    """
    reader = GGUFReader(file)
    metadata: Metadata = {name: field.contents() for name, field in reader.fields.items()}
    model_kind = tuple(metadata.get(key) for key in MODEL_KIND_KEYS)
    if model_kind != ("llama", "gpt2", "smollm"):
        raise ModelError(f"{file} holds {model_kind}, but only ('llama', 'gpt2', 'smollm') can be converted")
    bar = tqdm(
        reader.tensors,
        desc="Converting the model",
        unit=" tensors",
        disable=None if show_progress is None else not show_progress,
    )
    tensors = dict(convert_tensor(tensor, metadata) for tensor in bar)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer(metadata).save(str(directory / "tokenizer.json"))
    for name, content in {
        "config.json": _make_config(metadata),
        # Greedy decoding is the default: at temperature 1, the answers of this 4-bit model lose the topic.
        "generation_config.json": {**_read_special_token_ids(metadata), "do_sample": False},
        "tokenizer_config.json": _make_tokenizer_config(metadata),
    }.items():
        (directory / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert_tensor(tensor: ReaderTensor, metadata: Metadata) -> tuple[str, Tensor]:
    """Return a tensor's name in Hugging Face checkpoints, and its values in bfloat16 with unpermuted rows."""
    module_name, _, parameter = tensor.name.rpartition(".")
    values = dequantize(tensor.data, tensor.tensor_type)
    if module_name in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[module_name]}.{parameter}", torch.tensor(values).bfloat16()
    _, index, layer_module = module_name.split(".")
    if layer_module in HEAD_COUNT_KEYS:
        values = _unpermute(values, metadata[HEAD_COUNT_KEYS[layer_module]])
    return f"model.layers.{index}.{LAYER_NAMES[layer_module]}.{parameter}", torch.tensor(values).bfloat16()


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Build a byte-level BPE tokenizer with one token per digit."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    token_types: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    typed_tokens = zip(tokens, token_types, strict=True)
    special_tokens = [token for token, token_type in typed_tokens if token_type == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return tokenizer


def _unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    # GGUF interleaves the two halves of a head's rotary dimensions; Hugging Face stores one half after the other.
    rows, columns = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _make_config(metadata: Metadata) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **_read_special_token_ids(metadata),
    }


def _read_special_token_ids(metadata: Metadata) -> dict[str, int]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _make_tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
