"""Qwen2's dense models and 2.5's (https://arxiv.org/abs/2407.10671): Llama's layers, and queries, keys and values with
biases.

This room must not know tokens' text, nor Qwen2's mixtures of experts.
"""

from pathlib import Path

from nanovllm_core.model import ModelSpec
from nanovllm_models.checkpoint import WeightSource
from nanovllm_models.config_file import parse_quantization, parse_rotary
from nanovllm_models.fields import Fields
from nanovllm_models.llama import LlamaConfig, make_spec


def parse_config(config: Fields) -> LlamaConfig:
    """Read config.json, with the defaults that transformers has.

    Raises ModelError for a field that is wrong or asks for what is not implemented.
    """
    if config.text("hidden_act", "silu") != "silu":
        raise config.error("hidden_act", "silu")
    num_layers = config.integer("num_hidden_layers", 32)
    # Layers from max_window_layers on would have one.
    if config.flag("use_sliding_window", False) and config.integer("max_window_layers", 28) < num_layers:
        raise config.error("use_sliding_window", "false: sliding windows are not supported")
    hidden_size = config.integer("hidden_size", 4096)
    num_heads = config.integer("num_attention_heads", 32)
    num_kv_heads = config.integer("num_key_value_heads", 32)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    if not config.has("head_dim") and hidden_size % num_heads:
        raise config.error("hidden_size", f"a multiple of num_attention_heads, {num_heads}")
    max_position = config.integer("max_position_embeddings", 32768)
    return LlamaConfig(
        vocab_size=config.integer("vocab_size", 151936),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", 22016),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=config.integer("head_dim", hidden_size // num_heads),
        max_position_embeddings=max_position,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rotary=parse_rotary(config, max_position),
        attention_bias=True,
        output_bias=False,
        mlp_bias=False,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        quantization=parse_quantization(config),
    )


def build_spec(path: Path, fields: Fields, *, name: str, weights: WeightSource) -> ModelSpec:
    """The spec of the checkpoint in `path`, whose config.json is `fields`. Raises ModelError."""
    return make_spec(path, fields, parse_config(fields), name, weights)
