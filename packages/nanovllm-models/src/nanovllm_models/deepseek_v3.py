"""DeepSeek-V3 (https://arxiv.org/abs/2412.19437) and R1: latent attention, and experts in most layers.

In shapes, T is the number of tokens of a step.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from nanovllm_core.layers.compilation import MIN_COMPILED_ROWS, compile_for_rows
from nanovllm_core.layers.embedding import LMHead, VocabEmbedding
from nanovllm_core.layers.linear import ColumnParallelLinear, LinearPart
from nanovllm_core.layers.mla import LatentAttention, LatentAttentionConfig
from nanovllm_core.layers.mlp import GatedMLP
from nanovllm_core.layers.moe import MLP_LINEAR_NAMES, Experts, Router, Routing, SharedExpertNames, can_fuse_shared
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.quantization import BlockFP8, find_quantization
from nanovllm_core.layers.residual import ResidualStream
from nanovllm_core.layers.rotary import RotaryConfig, RotaryEmbedding, YarnScaling, yarn_mscale
from nanovllm_core.model import BuildContext, ForwardContext, MLASpec, ModelSpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_models.checkpoint import WeightSource
from nanovllm_models.config_file import max_sequence_length, parse_quantization, parse_rotary
from nanovllm_models.fields import JsonFields
from nanovllm_models.model_spec import DecoderWithHead, make_model_spec
from nanovllm_models.mtp import has_mtp_heads

# Name of the shared experts' module in checkpoints.
SHARED_EXPERT_NAMES = SharedExpertNames("shared_experts")


@dataclass(frozen=True, slots=True)
class DeepseekMoEConfig:
    """The fields of config.json that define the experts.

    first_layer: index of the first layer that may have experts.
    layer_step: from `first_layer` on, layers whose index is a multiple of `layer_step` have experts.
    """

    num_experts: int
    num_shared_experts: int
    intermediate_size: int
    routing: Routing
    first_layer: int
    layer_step: int

    def has_experts(self, index: int) -> bool:
        """Return whether layer `index` has experts."""
        return index >= self.first_layer and index % self.layer_step == 0


@dataclass(frozen=True, slots=True)
class DeepseekV3Config:
    """The fields of config.json that define the model.

    num_mtp_layers: number of layers for multi-token prediction (MTP), which follow the decoder layers. Only the first
        MTP layer can be used; published checkpoints have one MTP layer.
    quantization: None for unquantised weights.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_mtp_layers: int
    max_position: int
    rms_norm_eps: float
    rotary: RotaryConfig
    attention: LatentAttentionConfig
    moe: DeepseekMoEConfig
    tie_word_embeddings: bool
    quantization: BlockFP8 | None = None


def parse_config(config: JsonFields) -> DeepseekV3Config:
    """Parse config.json, with the defaults of transformers. Raises ModelError for a wrong or unsupported value.

    Two defaults differ. Without `q_lora_rank`, queries are not compressed. Without `num_nextn_predict_layers`, the
    model has no MTP layers.
    """
    for name, supported in {"hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
        if config.text(name, supported) != supported:
            raise config.error(name, supported)
    num_heads = config.positive_integer("num_attention_heads", 128)
    if config.positive_integer("num_key_value_heads", num_heads) != num_heads:
        raise config.error("num_key_value_heads", f"num_attention_heads, {num_heads}")
    max_position = config.positive_integer("max_position_embeddings", 4096)
    rotary = parse_rotary(config, max_position)
    return DeepseekV3Config(
        vocab_size=config.positive_integer("vocab_size", 129280),
        hidden_size=config.positive_integer("hidden_size", 7168),
        intermediate_size=config.positive_integer("intermediate_size", 18432),
        num_hidden_layers=config.positive_integer("num_hidden_layers", 61),
        num_mtp_layers=config.non_negative_integer("num_nextn_predict_layers", 0),
        max_position=max_sequence_length(max_position, rotary),
        rms_norm_eps=config.positive_number("rms_norm_eps", 1e-6),
        rotary=rotary,
        attention=_parse_attention(config, num_heads, rotary),
        moe=_parse_moe(config),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        quantization=parse_quantization(config),
    )


def _parse_attention(config: JsonFields, num_heads: int, rotary: RotaryConfig) -> LatentAttentionConfig:
    key_dim = config.positive_integer("qk_nope_head_dim", 128)
    rope_dim = config.positive_integer("qk_rope_head_dim", 64)
    if rope_dim % 2:
        raise config.error("qk_rope_head_dim", "even")
    scale = (key_dim + rope_dim) ** -0.5
    if isinstance(rotary.scaling, YarnScaling):
        # YaRN multiplies queries and keys by a factor, so it multiplies scores by the factor's square. The rotary table
        # can't include the factor: the table scales only the rotated part of a head.
        scale *= yarn_mscale(rotary.scaling.factor, rotary.scaling.mscale_all_dim) ** 2
    return LatentAttentionConfig(
        num_heads=num_heads,
        key_dim=key_dim,
        rope_dim=rope_dim,
        value_dim=config.positive_integer("v_head_dim", 128),
        query_rank=config.positive_integer("q_lora_rank") if config.has("q_lora_rank") else None,
        latent_dim=config.positive_integer("kv_lora_rank", 512),
        scale=scale,
        interleaved=config.boolean("rope_interleave", True),
        bias=config.boolean("attention_bias", False),
    )


def _parse_moe(config: JsonFields) -> DeepseekMoEConfig:
    num_experts = config.positive_integer("n_routed_experts", 256)
    num_groups, top_groups = config.positive_integer("n_group", 8), config.positive_integer("topk_group", 4)
    top_k = config.positive_integer("num_experts_per_tok", 8)
    if num_experts % num_groups or num_experts // num_groups < 2:
        raise config.error("n_group", f"a divisor of n_routed_experts, {num_experts}, and at most half of it")
    if top_groups > num_groups:
        raise config.error("topk_group", f"at most n_group, {num_groups}")
    if top_k > top_groups * (num_experts // num_groups):
        raise config.error("num_experts_per_tok", "at most the number of experts in topk_group groups")
    return DeepseekMoEConfig(
        num_experts=num_experts,
        num_shared_experts=config.positive_integer("n_shared_experts", 1),
        intermediate_size=config.positive_integer("moe_intermediate_size", 2048),
        routing=Routing(
            top_k,
            scoring="sigmoid",
            renormalize=config.boolean("norm_topk_prob", True),
            num_groups=num_groups,
            top_groups=top_groups,
            scale=config.positive_number("routed_scaling_factor", 2.5),
        ),
        first_layer=config.non_negative_integer("first_k_dense_replace", 3),
        layer_step=config.positive_integer("moe_layer_freq", 1),
    )


class DeepseekV3MoE(nn.Module):
    """Routed experts and shared experts. name: name of this module in the checkpoint.

    `shared_experts` is one dense layer for all shared experts; None if `experts` also computes the shared experts.
    """

    def __init__(self, config: DeepseekV3Config, name: str, build: BuildContext):
        super().__init__()
        hidden_size, moe = config.hidden_size, config.moe
        width, bias_name = moe.intermediate_size, "gate.e_score_correction_bias"
        quantization = MLP_LINEAR_NAMES.find_quantization(config.quantization, f"{name}.experts")
        shared_quantization = find_quantization(config.quantization, f"{name}.shared_experts", *MLP_LINEAR_NAMES)
        shared_width = moe.num_shared_experts * width
        has_same_format = shared_quantization == quantization
        is_fused = can_fuse_shared(width, shared_width, build, same_format=has_same_format)
        shared = SHARED_EXPERT_NAMES if is_fused else None
        self.gate = Router(hidden_size, moe.num_experts, moe.routing, build, shared=shared, bias_name=bias_name)
        self.experts = Experts(moe.num_experts, hidden_size, width, build, shared=shared, quantization=quantization)
        self.shared_experts = None
        if shared is None:
            self.shared_experts = GatedMLP(
                hidden_size,
                shared_width,
                build,
                size_name="n_shared_experts * moe_intermediate_size",
                quantization=shared_quantization,
            )

    def forward(self, x: Tensor, stream: ResidualStream, norm: RMSNorm | None) -> ResidualStream:
        """Add the experts' result for norm(x) [T, hidden] to `stream`. norm: None if x is already normed."""
        normed = x if norm is None else norm.forward(x)
        if self.shared_experts is not None:
            stream = self.shared_experts.forward(normed, stream)
        return self.experts.forward(normed, *self.gate.forward(normed), stream)


class DeepseekV3Layer(nn.Module):
    """Attention and a feed-forward layer. Callers run `before_attention`, `self_attn`, then `after_attention`."""

    def __init__(self, config: DeepseekV3Config, index: int, build: BuildContext):
        super().__init__()
        name, quantization = f"model.layers.{index}", config.quantization
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.self_attn = LatentAttention(
            config.hidden_size, config.attention, index, build, quantization=quantization, name=f"{name}.self_attn"
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.has_experts = config.moe.has_experts(index)
        if self.has_experts:
            self.mlp = DeepseekV3MoE(config, f"{name}.mlp", build)
        else:
            mlp_quantization = find_quantization(quantization, f"{name}.mlp", *MLP_LINEAR_NAMES)
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, build, quantization=mlp_quantization)

    def before_attention(self, stream: ResidualStream) -> tuple[Tensor, Tensor, Tensor]:
        """Return the residual stream [T, hidden] with all ranks' results added, and queries and latents."""
        x, layer_input, norm = self.input_layernorm.add_partials(stream)
        return x, *self.self_attn.project(layer_input, norm)

    def after_attention(self, attended: Tensor, x: Tensor) -> ResidualStream:
        """Return the residual stream after the layer. x: residual stream before the layer; may be overwritten."""
        stream = self.self_attn.o_proj.forward(attended, ResidualStream(x))
        x, layer_input, norm = self.post_attention_layernorm.add_partials_and_gather_requests(stream)
        return self.mlp.forward(layer_input, ResidualStream(x), norm)


class MTPOutputHead(nn.Module):
    """The norm and the output head of a layer for multi-token prediction."""

    def __init__(self, config: DeepseekV3Config, build: BuildContext):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.head = LMHead(config.vocab_size, config.hidden_size, build)


class MTPLayer(DeepseekV3Layer):
    """A layer for multi-token prediction, see `nanovllm_core.model.PredictionHead`.

    `eh_proj` projects the concatenation of a token's embedding and the previous token's hidden state.
    """

    def __init__(self, config: DeepseekV3Config, index: int, build: BuildContext, rotary: RotaryEmbedding):
        super().__init__(config, index, build)
        hidden_size = config.hidden_size
        self._rotary = rotary
        self._parallel = build.parallel
        self.embed_tokens = VocabEmbedding(config.vocab_size, hidden_size, build)
        self.enorm = RMSNorm(hidden_size, config.rms_norm_eps, build)
        self.hnorm = RMSNorm(hidden_size, config.rms_norm_eps, build)
        # Each rank has the whole matrix, which is small. No exchange is needed.
        unsplit_build = replace(build, parallel=ParallelContext())
        self.eh_proj = ColumnParallelLinear(2 * hidden_size, (LinearPart("eh_proj", hidden_size),), unsplit_build)
        self.shared_head = MTPOutputHead(config, build)

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the residual stream [T, hidden] after the layer. See `PredictionHead.forward`."""
        embedded = self.embed_tokens.forward(input_ids)
        x = self.eh_proj.forward(torch.cat((self.enorm.forward(embedded), self.hnorm.forward(hidden)), 1))
        x, q, latents = self.before_attention(ResidualStream(x.to(embedded.dtype)))
        attended = self.self_attn.forward(q, latents, self._rotary.plan(positions), ctx)
        return self.after_attention(attended, x).complete(self._parallel)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits. hidden: [n, hidden], hidden states that `forward` has returned."""
        return self.shared_head.head.forward(self.shared_head.norm.forward(hidden))


def run_between_attentions(
    attended: Tensor, x: Tensor, layer: DeepseekV3Layer, next_layer: DeepseekV3Layer
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the code between two attentions; returns the residual stream and the inputs of the next attention."""
    return next_layer.before_attention(layer.after_attention(attended, x))


class DeepseekV3Model(nn.Module):
    """The decoder: the model without its output head. `layers` has the decoder layers, then the MTP layers."""

    def __init__(self, config: DeepseekV3Config, build: BuildContext):
        super().__init__()
        rope_dim, num_layers = config.attention.rope_dim, config.num_hidden_layers
        self._rotary = RotaryEmbedding(config.rotary, rope_dim, config.max_position, build.device)
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, build)
        decoder_layers = [DeepseekV3Layer(config, index, build) for index in range(num_layers)]
        mtp_indices = range(num_layers, num_layers + config.num_mtp_layers)
        mtp_layers = [MTPLayer(config, index, build, self._rotary) for index in mtp_indices]
        self.layers = nn.ModuleList(decoder_layers + mtp_layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self._num_layers = num_layers
        # One compiled function runs layers without experts, and one runs layers with experts. The index is has_experts.
        self._run_between = tuple(
            compile_for_rows(run_between_attentions, MIN_COMPILED_ROWS) if build.compile else run_between_attentions
            for _ in range(2)
        )

    def decoder_layers(self) -> list[DeepseekV3Layer]:
        """Return the layers that `forward` runs. The MTP layers are not included."""
        return [*self.layers][: self._num_layers]

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [T, hidden]."""
        rotation = self._rotary.plan(positions)
        layer, *later_layers = self.decoder_layers()
        x, q, latents = layer.before_attention(ResidualStream(self.embed_tokens.forward(input_ids)))
        for next_layer in later_layers:
            attended = layer.self_attn.forward(q, latents, rotation, ctx)
            x, q, latents = self._run_between[layer.has_experts](attended, x, layer, next_layer)
            layer = next_layer
        return self.norm.normalize(layer.after_attention(layer.self_attn.forward(q, latents, rotation, ctx), x))


class DeepseekV3ForCausalLM(DecoderWithHead):
    """The complete model."""

    def __init__(self, config: DeepseekV3Config, build: BuildContext):
        super().__init__(DeepseekV3Model(config, build), config, build)

    def cache_specs(self) -> tuple[MLASpec, ...]:
        """Return the cache spec of each decoder layer, then of each MTP layer."""
        return tuple(layer.self_attn.cache_spec for layer in self.model.layers)

    def mtp_head(self) -> MTPLayer | None:
        """Return the first MTP layer, which predicts all draft tokens one after the other; None without MTP layers."""
        *_, layer = self.model.layers
        return layer if isinstance(layer, MTPLayer) else None


def can_skip_tensor(name: str, *, is_head_tied: bool, skipped_prefixes: tuple[str, ...]) -> bool:
    """Return whether the model can do without the tensor `name` of a checkpoint."""
    is_redundant_head = is_head_tied and name == "lm_head.weight"
    return is_redundant_head or name.endswith(".rotary_emb.inv_freq") or name.startswith(skipped_prefixes)


def build_deepseek_v3(build: BuildContext, *, config: DeepseekV3Config, weights: WeightSource) -> DeepseekV3ForCausalLM:
    """Build the model on its device and load its weights. Raises WeightError, ModelError."""
    num_layers, num_mtp_layers = config.num_hidden_layers, config.num_mtp_layers
    mtp_prefixes = tuple(f"model.layers.{index}." for index in range(num_layers, num_layers + num_mtp_layers))
    num_used_mtp_layers = int(has_mtp_heads(weights, mtp_prefixes, num_mtp_layers) and build.uses_mtp)
    unused_prefixes = mtp_prefixes[num_used_mtp_layers:]
    config = replace(config, num_mtp_layers=num_used_mtp_layers)
    model = DeepseekV3ForCausalLM(config, build)
    can_skip = partial(can_skip_tensor, is_head_tied=config.tie_word_embeddings, skipped_prefixes=unused_prefixes)
    weights.load_into(model, can_skip)
    return model


def build_spec(path: Path, fields: JsonFields, *, name: str, weights: WeightSource) -> ModelSpec:
    """Return the spec of the checkpoint in `path`, whose config.json is `fields`. Raises ModelError."""
    config = parse_config(fields)
    build = partial(build_deepseek_v3, config=config, weights=weights)
    return make_model_spec(path, fields, config, name, build)
