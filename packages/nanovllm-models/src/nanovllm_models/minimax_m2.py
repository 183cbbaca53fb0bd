"""MiniMax-M2 (https://github.com/MiniMax-AI/MiniMax-M2): half of each head is rotated, and every layer has experts.

config.json declares modules for multi-token prediction (`num_mtp_modules`), but their weights are not published. In
shapes, T is the number of tokens of a step.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from nanovllm_core.layers.attention import attend, qkv_parts
from nanovllm_core.layers.moe import ExpertNames, Experts, Router, Routing, SparseMLP
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.residual import ResidualStream
from nanovllm_core.layers.rotary import Rotation
from nanovllm_core.model import BuildContext, ForwardContext, ModelSpec
from nanovllm_kernels.elementwise import compute_mean_squares, norm_parts
from nanovllm_models.checkpoint import WeightSource
from nanovllm_models.fields import JsonFields
from nanovllm_models.llama import (
    ConfigDefaults,
    LlamaAttention,
    LlamaConfig,
    LlamaForCausalLM,
    build_llama,
    parse_llama_fields,
)
from nanovllm_models.model_spec import make_model_spec
from nanovllm_models.mtp import has_mtp_heads

EXPERT_NAMES = ExpertNames(gate="w1", up="w3", down="w2")


@dataclass(frozen=True, slots=True)
class MiniMaxM2MoEConfig:
    """The fields of config.json that define the experts. An expert's width is `LlamaConfig.intermediate_size`."""

    num_experts: int
    routing: Routing


CONFIG_DEFAULTS = ConfigDefaults(
    vocab_size=200064,
    hidden_size=3072,
    intermediate_size=1536,
    num_hidden_layers=62,
    num_attention_heads=48,
    num_key_value_heads=8,
    max_position_embeddings=196608,
    head_dim=128,
    rope_theta=5_000_000.0,
    allows_partial_rotation=True,
)


def parse_config(config: JsonFields) -> LlamaConfig:
    """Parse all fields except those of the experts. Raises ModelError for a wrong or unsupported value."""
    if not config.boolean("use_qk_norm", True):
        raise config.error("use_qk_norm", "true")
    if config.text("qk_norm_type", "per_layer") != "per_layer":
        raise config.error("qk_norm_type", "per_layer")
    if any(attention_type != 1 for attention_type in config.non_negative_integers("attn_type_list")):
        raise config.error("attn_type_list", "1 for each layer: only full attention is supported")
    return replace(parse_llama_fields(config, CONFIG_DEFAULTS), attention_bias=False, o_proj_bias=False)


def parse_moe_config(config: JsonFields) -> MiniMaxM2MoEConfig:
    """Parse the fields of the experts. Raises ModelError."""
    if config.text("scoring_func", "sigmoid") != "sigmoid":
        raise config.error("scoring_func", "sigmoid")
    if not config.boolean("use_routing_bias", True):
        raise config.error("use_routing_bias", "true")
    num_experts = config.positive_integer("num_local_experts", 256)
    top_k = config.positive_integer("num_experts_per_tok", 8)
    if top_k > num_experts:
        raise config.error("num_experts_per_tok", f"at most num_local_experts, {num_experts}")
    return MiniMaxM2MoEConfig(num_experts, Routing(top_k, "sigmoid"))


class MiniMaxM2Attention(LlamaAttention):
    """Grouped-query attention. One norm covers all query heads of a token, and another norm covers all key heads."""

    def __init__(self, config: LlamaConfig, index: int, build: BuildContext):
        super().__init__(config, index, build)
        build = build.for_attention()
        self._parallel = build.parallel
        if build.parallel.size <= config.num_key_value_heads:
            # The heads must split evenly: additional heads of zeros would change the mean squares.
            build.parallel.split_evenly(config.num_key_value_heads, "num_key_value_heads")
        # Each norm has only this rank's part of the weights, in the order of the rows of `qkv_proj`.
        query, key, _ = qkv_parts(config.num_attention_heads, config.num_key_value_heads, config.head_dim, bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(part.out_features, config.rms_norm_eps, build, own_elements=part.own_rows(build.parallel))
            for part in (query, key)
        )

    def forward(self, qkv: Tensor, rotation: Rotation, ctx: ForwardContext) -> Tensor:
        """Attend; returns [T, query heads * head_dim]. qkv: [T, all heads * head_dim], overwritten."""
        heads = self.heads
        norm_widths = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        weights, parallel = (self.q_norm.packed_weight, self.k_norm.packed_weight), self._parallel
        mean_squares = None
        if parallel.size > 1:
            # All ranks have parts of equal size, so the mean over ranks is the mean over the whole projection.
            mean_squares = parallel.all_reduce(compute_mean_squares(qkv, norm_widths)) / parallel.size
        norm_parts(qkv, norm_widths, weights, self.q_norm.eps, mean_squares)
        return attend(heads.view_heads(qkv), rotation, ctx, self._index)


class MiniMaxM2Layer(nn.Module):
    """Attention and experts, with the methods and attributes of a `LlamaLayer`."""

    has_experts = True

    def __init__(self, config: LlamaConfig, index: int, build: BuildContext, *, moe: MiniMaxM2MoEConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.self_attn = MiniMaxM2Attention(config, index, build)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        hidden_size, num_experts, bias_name = config.hidden_size, moe.num_experts, "e_score_correction_bias"
        router = Router(hidden_size, num_experts, moe.routing, build, bias_name=bias_name, uses_float32=True)
        name, width = f"model.layers.{index}.block_sparse_moe.experts", config.intermediate_size
        quantization = EXPERT_NAMES.find_quantization(config.quantization, name)
        experts = Experts(num_experts, hidden_size, width, build, EXPERT_NAMES, quantization=quantization)
        self.block_sparse_moe = SparseMLP(router, experts)

    def before_attention(self, stream: ResidualStream) -> tuple[Tensor, Tensor]:
        """See `LlamaLayer.before_attention`."""
        x, layer_input, norm = self.input_layernorm.add_partials(stream)
        return x, self.self_attn.qkv_proj.forward(layer_input, norm)

    def after_attention(self, attended: Tensor, x: Tensor) -> ResidualStream:
        """See `LlamaLayer.after_attention`."""
        stream = self.self_attn.o_proj.forward(attended, ResidualStream(x))
        x, layer_input, norm = self.post_attention_layernorm.add_partials_and_gather_requests(stream)
        return self.block_sparse_moe.forward(layer_input, ResidualStream(x), norm)


def build_minimax_m2(
    build: BuildContext, *, config: LlamaConfig, moe: MiniMaxM2MoEConfig, num_mtp_modules: int, weights: WeightSource
) -> LlamaForCausalLM:
    """Build the model on its device and load its weights. Raises WeightError, ModelError."""
    num_layers = config.num_hidden_layers
    mtp_prefixes = tuple(f"model.layers.{index}." for index in range(num_layers, num_layers + num_mtp_modules))
    # This call only logs a line: no published checkpoint has these heads.
    has_mtp_heads(weights, mtp_prefixes, num_mtp_modules)
    make_layer = partial(MiniMaxM2Layer, moe=moe)
    return build_llama(build, config=config, weights=weights, make_layer=make_layer, skipped_prefixes=mtp_prefixes)


def build_spec(path: Path, fields: JsonFields, *, name: str, weights: WeightSource) -> ModelSpec:
    """Return the spec of the checkpoint in `path`, whose config.json is `fields`. Raises ModelError."""
    config = parse_config(fields)
    num_mtp_modules = fields.non_negative_integer("num_mtp_modules", 0) if fields.boolean("use_mtp", True) else 0
    build = partial(
        build_minimax_m2, config=config, moe=parse_moe_config(fields), num_mtp_modules=num_mtp_modules, weights=weights
    )
    return make_model_spec(path, fields, config, name, build)
