"""Qwen2 and 2.5, dense models (https://arxiv.org/abs/2407.10671): Llama with biases on queries, keys and values."""

from dataclasses import replace
from pathlib import Path

from nanovllm_core.model import ModelSpec
from nanovllm_models.checkpoint import WeightSource
from nanovllm_models.fields import JsonFields
from nanovllm_models.llama import ConfigDefaults, LlamaConfig, make_llama_spec, parse_llama_fields

CONFIG_DEFAULTS = ConfigDefaults(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=22016,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=32768,
)


def parse_config(config: JsonFields) -> LlamaConfig:
    """Parse config.json. Raises ModelError for a wrong or unsupported value."""
    llama_config = parse_llama_fields(config, CONFIG_DEFAULTS)
    # Layers whose index is below max_window_layers have no sliding windows.
    if (
        config.boolean("use_sliding_window", False)
        and config.positive_integer("max_window_layers", 28) < llama_config.num_hidden_layers
    ):
        raise config.error("use_sliding_window", expected="false: sliding windows are not supported")
    return replace(llama_config, attention_bias=True, o_proj_bias=False)


def build_spec(path: Path, fields: JsonFields, *, name: str, weights: WeightSource) -> ModelSpec:
    """Return the spec of the checkpoint in `path`, whose config.json is `fields`. Raises ModelError."""
    return make_llama_spec(path, fields, parse_config(fields), name, weights)
