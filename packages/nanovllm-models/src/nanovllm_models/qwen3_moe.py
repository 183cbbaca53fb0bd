"""Qwen3's mixtures of experts (https://arxiv.org/abs/2505.09388)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nanovllm_core.layers.moe import MLP_LINEAR_NAMES, Experts, Router, Routing, SparseMLP
from nanovllm_core.model import BuildContext, ModelSpec
from nanovllm_models import qwen3
from nanovllm_models.checkpoint import WeightSource
from nanovllm_models.fields import JsonFields
from nanovllm_models.llama import ConfigDefaults, LlamaConfig, LlamaLayer, make_llama_spec


@dataclass(frozen=True, slots=True)
class Qwen3MoEConfig:
    """The fields of config.json that define the experts.

    intermediate_size: width of an expert.
    sparse_layers: indices of the layers with experts.
    """

    num_experts: int
    intermediate_size: int
    routing: Routing
    sparse_layers: frozenset[int]


CONFIG_DEFAULTS = ConfigDefaults(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=24,
    num_attention_heads=32,
    num_key_value_heads=4,
    max_position_embeddings=32768,
)


def parse_config(config: JsonFields) -> LlamaConfig:
    """Parse all fields except those of the experts. Raises ModelError."""
    return qwen3.parse_config(config, CONFIG_DEFAULTS)


def parse_moe_config(
    config: JsonFields,
    num_layers: int,
    default_experts: int = 128,
    default_top_k: int = 8,
    default_expert_width: int = 768,
    *,
    default_renormalize: bool = False,
) -> Qwen3MoEConfig:
    """Parse the fields of the experts. Raises ModelError. default_*: values of fields that config.json lacks."""
    # transformers 5 may write num_local_experts; published checkpoints have num_experts.
    field_name = "num_experts" if config.has("num_experts") else "num_local_experts"
    num_experts = config.positive_integer(field_name, default_experts)
    top_k = config.positive_integer("num_experts_per_tok", default_top_k)
    if top_k > num_experts:
        raise config.error("num_experts_per_tok", f"at most num_experts, {num_experts}")
    sparse_step = config.positive_integer("decoder_sparse_step", 1)
    dense_layers = config.non_negative_integers("mlp_only_layers")
    return Qwen3MoEConfig(
        num_experts=num_experts,
        intermediate_size=config.positive_integer("moe_intermediate_size", default_expert_width),
        routing=Routing(top_k, renormalize=config.boolean("norm_topk_prob", default_renormalize)),
        sparse_layers=frozenset(i for i in range(num_layers) if (i + 1) % sparse_step == 0 and i not in dense_layers),
    )


def make_layer(config: LlamaConfig, index: int, build: BuildContext, *, moe: Qwen3MoEConfig) -> LlamaLayer:
    """Make layer `index`, with experts or without."""
    if index not in moe.sparse_layers:
        return LlamaLayer(config, index, build)
    router = Router(config.hidden_size, moe.num_experts, moe.routing, build)
    quantization = MLP_LINEAR_NAMES.find_quantization(config.quantization, f"model.layers.{index}.mlp.experts")
    width = moe.intermediate_size
    experts = Experts(moe.num_experts, config.hidden_size, width, build, quantization=quantization)
    return LlamaLayer(config, index, build, SparseMLP(router, experts))


def build_spec(path: Path, fields: JsonFields, *, name: str, weights: WeightSource) -> ModelSpec:
    """Return the spec of the checkpoint in `path`, whose config.json is `fields`. Raises ModelError."""
    config = parse_config(fields)
    moe = parse_moe_config(fields, config.num_hidden_layers)
    return make_llama_spec(path, fields, config, name, weights, partial(make_layer, moe=moe))
