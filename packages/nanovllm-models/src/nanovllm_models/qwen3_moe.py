"""Qwen3's mixtures of experts (https://arxiv.org/abs/2505.09388): the dense models' layers, most with experts."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nanovllm_core.layers.moe import STANDARD_NAMES, Experts, Router, Routing, SparseMLP
from nanovllm_core.model import BuildContext, ModelSpec
from nanovllm_models import qwen3
from nanovllm_models.checkpoint import WeightSource
from nanovllm_models.fields import Fields
from nanovllm_models.llama import Defaults, LlamaConfig, LlamaLayer, make_spec


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """The fields of config.json that define the experts.

    sparse_layers: indices of the layers with experts; the other layers are dense.
    """

    num_experts: int
    moe_intermediate_size: int
    routing: Routing
    sparse_layers: frozenset[int]


DEFAULTS = Defaults(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=24,
    num_attention_heads=32,
    num_key_value_heads=4,
    max_position_embeddings=32768,
)


def parse_config(config: Fields) -> LlamaConfig:
    """Parse the fields that the dense models have too. Raises ModelError, see `qwen3.parse_config`."""
    return qwen3.parse_config(config, DEFAULTS)


def parse_sparse_config(config: Fields, num_layers: int) -> SparseConfig:
    """Parse the fields of the experts. Raises ModelError."""
    # Published checkpoints have num_experts; transformers 5 writes num_local_experts.
    num_experts = config.integer("num_experts" if config.has("num_experts") else "num_local_experts", 128)
    top_k = config.integer("num_experts_per_tok", 8)
    if top_k > num_experts:
        raise config.error("num_experts_per_tok", f"at most num_experts, {num_experts}")
    step, dense = config.integer("decoder_sparse_step", 1), config.indices("mlp_only_layers")
    return SparseConfig(
        num_experts=num_experts,
        moe_intermediate_size=config.integer("moe_intermediate_size", 768),
        routing=Routing(top_k, renormalize=config.flag("norm_topk_prob", False)),
        sparse_layers=frozenset(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense),
    )


def make_layer(config: LlamaConfig, index: int, build: BuildContext, *, sparse: SparseConfig) -> LlamaLayer:
    """Make the layer with number `index`, with experts or without."""
    if index not in sparse.sparse_layers:
        return LlamaLayer(config, index, build)
    router = Router(config.hidden_size, sparse.num_experts, sparse.routing, build)
    quantization = STANDARD_NAMES.find_quantization(config.quantization, f"model.layers.{index}.mlp.experts")
    width = sparse.moe_intermediate_size
    experts = Experts(sparse.num_experts, config.hidden_size, width, build, quantization=quantization)
    return LlamaLayer(config, index, build, SparseMLP(router, experts))


def build_spec(path: Path, fields: Fields, *, name: str, weights: WeightSource) -> ModelSpec:
    """Return the spec of the checkpoint in `path`, whose config.json is `fields`. Raises ModelError."""
    config = parse_config(fields)
    sparse = parse_sparse_config(fields, config.num_hidden_layers)
    return make_spec(path, fields, config, name, weights, partial(make_layer, sparse=sparse))
