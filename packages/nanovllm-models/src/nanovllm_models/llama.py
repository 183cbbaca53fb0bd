"""Llama (https://arxiv.org/abs/2407.21783) and models of the same architecture, such as SmolLM2.

Other families use these modules too. In shapes, T is the number of tokens of a step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from nanovllm_core.layers.attention import HeadLayout, QKNorm, attend, qkv_parts
from nanovllm_core.layers.compilation import MIN_COMPILED_ROWS, compile_for_rows
from nanovllm_core.layers.embedding import VocabEmbedding
from nanovllm_core.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm_core.layers.mlp import GatedMLP
from nanovllm_core.layers.moe import MLP_LINEAR_NAMES, SparseMLP
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.quantization import BlockFP8, find_quantization
from nanovllm_core.layers.residual import ResidualStream
from nanovllm_core.layers.rotary import RotaryConfig, RotaryEmbedding, Rotation
from nanovllm_core.model import BuildContext, ForwardContext, ModelSpec, PagedSpec
from nanovllm_models.checkpoint import WeightSource
from nanovllm_models.config_file import DEFAULT_ROPE_THETA, max_sequence_length, parse_quantization, parse_rotary
from nanovllm_models.fields import JsonFields
from nanovllm_models.model_spec import DecoderWithHead, make_model_spec


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The fields of config.json that define the model.

    attention_bias: whether the projections of queries, keys and values have a bias.
    o_proj_bias: whether the output projection of attention has a bias.
    qk_norm: whether each query and key head is normed before its rotation.
    quantization: None for unquantised weights.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rotary: RotaryConfig
    attention_bias: bool
    o_proj_bias: bool
    tie_word_embeddings: bool
    mlp_bias: bool = False
    qk_norm: bool = False
    quantization: BlockFP8 | None = None


class ConfigDefaults(NamedTuple):
    """A family's values for fields that config.json lacks, as in transformers.

    num_key_value_heads: None for the number of query heads.
    head_dim: None for hidden_size / num_attention_heads.
    allows_partial_rotation: whether the family may rotate only a part of each head.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    max_position_embeddings: int
    head_dim: int | None = None
    rope_theta: float = DEFAULT_ROPE_THETA
    allows_partial_rotation: bool = False


CONFIG_DEFAULTS = ConfigDefaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    max_position_embeddings=2048,
)


def parse_llama_fields(config: JsonFields, defaults: ConfigDefaults) -> LlamaConfig:
    """Parse the fields that all families with Llama's layers share. Raises ModelError for an unsupported value."""
    if config.text("hidden_act", "silu") != "silu":
        raise config.error("hidden_act", "silu")
    hidden_size = config.positive_integer("hidden_size", defaults.hidden_size)
    num_heads = config.positive_integer("num_attention_heads", defaults.num_attention_heads)
    num_kv_heads = config.positive_integer("num_key_value_heads", defaults.num_key_value_heads or num_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    if defaults.head_dim is None and not config.has("head_dim") and hidden_size % num_heads:
        raise config.error("hidden_size", f"a multiple of num_attention_heads, {num_heads}")
    head_dim = config.positive_integer("head_dim", defaults.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise config.error("head_dim", "even (by default it is hidden_size / num_attention_heads)")
    # `parse_rotary` takes head_dim only for families that may rotate a part of each head.
    partial_head_dim = head_dim if defaults.allows_partial_rotation else None
    max_position = config.positive_integer("max_position_embeddings", defaults.max_position_embeddings)
    rotary = parse_rotary(config, max_position, default_theta=defaults.rope_theta, head_dim=partial_head_dim)
    attention_bias = config.boolean("attention_bias", False)
    return LlamaConfig(
        vocab_size=config.positive_integer("vocab_size", defaults.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=config.positive_integer("intermediate_size", defaults.intermediate_size),
        num_hidden_layers=config.positive_integer("num_hidden_layers", defaults.num_hidden_layers),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_sequence_length(max_position, rotary),
        rms_norm_eps=config.positive_number("rms_norm_eps", 1e-6),
        rotary=rotary,
        attention_bias=attention_bias,
        o_proj_bias=attention_bias,
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        quantization=parse_quantization(config),
    )


def parse_config(config: JsonFields) -> LlamaConfig:
    """Parse config.json. Raises ModelError for a wrong or unsupported value."""
    return replace(parse_llama_fields(config, CONFIG_DEFAULTS), mlp_bias=config.boolean("mlp_bias", False))


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig, index: int, build: BuildContext):
        super().__init__()
        build = build.for_attention()
        num_heads, num_kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        projections = qkv_parts(num_heads, num_kv_heads, head_dim, bias=config.attention_bias)
        name = f"model.layers.{index}.self_attn"
        qkv_quantization = find_quantization(config.quantization, name, *(linear.name for linear in projections))
        o_quantization = find_quantization(config.quantization, name, "o_proj")
        self.heads = HeadLayout.for_rank(num_heads, num_kv_heads, head_dim, build.parallel)
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, projections, build, quantization=qkv_quantization)
        self.o_proj = RowParallelLinear(
            num_heads * head_dim,
            config.hidden_size,
            build,
            name="o_proj",
            own_columns=projections[0].own_rows(build.parallel),
            bias=config.o_proj_bias,
            quantization=o_quantization,
        )
        self.q_norm, self.k_norm = (
            RMSNorm(head_dim, config.rms_norm_eps, build) if config.qk_norm else None for _ in range(2)
        )
        self._index = index

    def forward(self, qkv: Tensor, rotation: Rotation, ctx: ForwardContext) -> Tensor:
        """Attend; returns [T, query heads * head_dim]. qkv: [T, all heads * head_dim], overwritten."""
        qk_norm = None
        if self.q_norm is not None and self.k_norm is not None:
            qk_norm = QKNorm(self.q_norm.packed_weight, self.k_norm.packed_weight, self.q_norm.eps)
        return attend(self.heads.view_heads(qkv), rotation, ctx, self._index, qk_norm)


class LlamaLayer(nn.Module):
    """Attention and a feed-forward layer. Callers run `before_attention`, `self_attn`, then `after_attention`.

    mlp: the feed-forward layer; None for a GatedMLP.
    """

    def __init__(self, config: LlamaConfig, index: int, build: BuildContext, mlp: SparseMLP | None = None):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.self_attn = LlamaAttention(config, index, build)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.has_experts = mlp is not None
        if mlp is not None:
            self.mlp = mlp
            return
        quantization = find_quantization(config.quantization, f"model.layers.{index}.mlp", *MLP_LINEAR_NAMES)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, build, bias=config.mlp_bias, quantization=quantization
        )

    def before_attention(self, stream: ResidualStream) -> tuple[Tensor, Tensor]:
        """Return the residual stream [T, hidden], with all ranks' results added, and the input of `self_attn`."""
        x, layer_input, norm = self.input_layernorm.add_partials(stream)
        return x, self.self_attn.qkv_proj.forward(layer_input, norm)

    def after_attention(self, attended: Tensor, x: Tensor) -> ResidualStream:
        """Return the residual stream after the layer. x: residual stream before the layer; may be overwritten."""
        stream = self.self_attn.o_proj.forward(attended, ResidualStream(x))
        x, layer_input, norm = self.post_attention_layernorm.add_partials_and_gather_requests(stream)
        return self.mlp.forward(layer_input, ResidualStream(x), norm)


def run_between_attentions(
    attended: Tensor, x: Tensor, layer: LlamaLayer, next_layer: LlamaLayer
) -> tuple[Tensor, Tensor]:
    """Run the code between two attentions; returns the residual stream and the input of the next attention."""
    return next_layer.before_attention(layer.after_attention(attended, x))


# Makes the layer with the given index: a LlamaLayer, or a module with the same methods and attributes.
MakeLayer = Callable[[LlamaConfig, int, BuildContext], nn.Module]


class LlamaModel(nn.Module):
    """The decoder: the model without its output head."""

    def __init__(self, config: LlamaConfig, build: BuildContext, make_layer: MakeLayer):
        super().__init__()
        rotary_dim = config.rotary.rotary_dim(config.head_dim)
        self._rotary = RotaryEmbedding(config.rotary, rotary_dim, config.max_position, build.device)
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, build)
        self.layers = nn.ModuleList(make_layer(config, index, build) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        # One compiled function runs layers without experts, and one runs layers with experts. The key is `has_experts`.
        self._run_between = {
            has_experts: compile_for_rows(run_between_attentions, MIN_COMPILED_ROWS)
            if build.compile
            else run_between_attentions
            for has_experts in (False, True)
        }

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [T, hidden]."""
        rotation = self._rotary.plan(positions)
        layer, *later_layers = self.layers
        x, qkv = layer.before_attention(ResidualStream(self.embed_tokens.forward(input_ids)))
        for next_layer in later_layers:
            attended = layer.self_attn.forward(qkv, rotation, ctx)
            x, qkv = self._run_between[layer.has_experts](attended, x, layer, next_layer)
            layer = next_layer
        return self.norm.normalize(layer.after_attention(layer.self_attn.forward(qkv, rotation, ctx), x))


class LlamaForCausalLM(DecoderWithHead):
    """The complete model."""

    def __init__(self, config: LlamaConfig, build: BuildContext, make_layer: MakeLayer = LlamaLayer):
        super().__init__(LlamaModel(config, build, make_layer), config, build)

    def cache_specs(self) -> tuple[PagedSpec, ...]:
        """Return each layer's cache spec."""
        return tuple(layer.self_attn.heads.cache_spec for layer in self.model.layers)


def can_skip_tensor(name: str, skipped_prefixes: tuple[str, ...] = ()) -> bool:
    """Return whether the model can do without the tensor `name` of a checkpoint."""
    # Some checkpoints store the weight of a tied head again. Old checkpoints store rotary frequencies.
    return name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq") or name.startswith(skipped_prefixes)


def build_llama(
    build: BuildContext,
    *,
    config: LlamaConfig,
    weights: WeightSource,
    make_layer: MakeLayer = LlamaLayer,
    skipped_prefixes: tuple[str, ...] = (),
) -> LlamaForCausalLM:
    """Build the model on its device and load its weights. Raises WeightError, ModelError.

    skipped_prefixes: prefixes of the names of tensors that the model does not need.
    """
    model = LlamaForCausalLM(config, build, make_layer)
    weights.load_into(model, partial(can_skip_tensor, skipped_prefixes=skipped_prefixes))
    return model


def make_llama_spec(
    path: Path,
    fields: JsonFields,
    config: LlamaConfig,
    name: str,
    weights: WeightSource,
    make_layer: MakeLayer = LlamaLayer,
) -> ModelSpec:
    """Return the spec of a model with this architecture. make_layer: must be picklable. Raises ModelError."""
    build = partial(build_llama, config=config, weights=weights, make_layer=make_layer)
    return make_model_spec(path, fields, config, name, build)


def build_spec(path: Path, fields: JsonFields, *, name: str, weights: WeightSource) -> ModelSpec:
    """Return the spec of the checkpoint in `path`, whose config.json is `fields`. Raises ModelError."""
    return make_llama_spec(path, fields, parse_config(fields), name, weights)
