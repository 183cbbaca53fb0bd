"""The fields of Qwen3-Next's config.json."""

from dataclasses import dataclass

from nanovllm_core.layers.gated_delta_net import DeltaShape
from nanovllm_core.layers.quantization import BlockFP8
from nanovllm_core.layers.rotary import RotaryConfig
from nanovllm_kernels.gemm.block_fp8 import GROUP as FP8_BLOCK_SIZE
from nanovllm_models.config_file import max_sequence_length, parse_quantization, parse_rotary
from nanovllm_models.fields import JsonFields
from nanovllm_models.qwen3_moe import Qwen3MoEConfig, parse_moe_config

LAYER_TYPES = LINEAR_ATTENTION, FULL_ATTENTION = ("linear_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class Qwen3NextConfig:
    """The fields of config.json that define the model.

    attention_layers: indices of the layers with gated attention; the other layers have Gated DeltaNet.
    shared_intermediate_size: width of the shared expert.
    num_mtp_heads: number of heads for multi-token prediction that config.json declares. Published checkpoints have one
        head, but their config.json declares no head.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    attention_layers: frozenset[int]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rotary: RotaryConfig
    attention_bias: bool
    delta: DeltaShape
    moe: Qwen3MoEConfig
    shared_intermediate_size: int
    tie_word_embeddings: bool
    quantization: BlockFP8 | None
    num_mtp_heads: int


def parse_config(config: JsonFields) -> Qwen3NextConfig:
    """Parse config.json, with the defaults of transformers. Raises ModelError for a wrong or unsupported value."""
    if config.text("hidden_act", "silu") != "silu":
        raise config.error("hidden_act", "silu")
    num_heads = config.positive_integer("num_attention_heads", 16)
    num_kv_heads = config.positive_integer("num_key_value_heads", 2)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    num_layers = config.positive_integer("num_hidden_layers", 48)
    head_dim = config.positive_integer("head_dim", 256)
    quantization = parse_quantization(config)
    if quantization is not None and head_dim % FP8_BLOCK_SIZE:
        raise config.error(
            "head_dim", f"a multiple of {FP8_BLOCK_SIZE}, so that gates and queries have separate FP8 blocks"
        )
    max_position = config.positive_integer("max_position_embeddings", 32768)
    rotary = parse_rotary(config, max_position, head_dim=head_dim, default_fraction=0.25)
    eps = config.positive_number("rms_norm_eps", 1e-6)
    return Qwen3NextConfig(
        vocab_size=config.positive_integer("vocab_size", 151936),
        hidden_size=config.positive_integer("hidden_size", 2048),
        intermediate_size=config.positive_integer("intermediate_size", 5632),
        num_hidden_layers=num_layers,
        attention_layers=_parse_attention_layers(config, num_layers),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_sequence_length(max_position, rotary),
        rms_norm_eps=eps,
        rotary=rotary,
        attention_bias=config.boolean("attention_bias", False),
        delta=_parse_delta(config, eps),
        moe=parse_moe_config(config, num_layers, 512, 10, 512, default_renormalize=True),
        shared_intermediate_size=config.positive_integer("shared_expert_intermediate_size", 512),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        quantization=quantization,
        num_mtp_heads=config.non_negative_integer("num_nextn_predict_layers", 0),
    )


def _parse_attention_layers(config: JsonFields, num_layers: int) -> frozenset[int]:
    layer_types = config.texts("layer_types")
    if not layer_types:
        interval = config.positive_integer("full_attention_interval", 4)
        attention_layers = frozenset(index for index in range(num_layers) if (index + 1) % interval == 0)
        if not attention_layers:
            raise config.error("full_attention_interval", f"at most num_hidden_layers, {num_layers}")
        return attention_layers
    if len(layer_types) != num_layers or not set(layer_types) <= set(LAYER_TYPES) or FULL_ATTENTION not in layer_types:
        raise config.error(
            "layer_types", f"{' or '.join(LAYER_TYPES)} for each of {num_layers} layers, {FULL_ATTENTION} at least once"
        )
    return frozenset(index for index, layer_type in enumerate(layer_types) if layer_type == FULL_ATTENTION)


def _parse_delta(config: JsonFields, eps: float) -> DeltaShape:
    num_k_heads = config.positive_integer("linear_num_key_heads", 16)
    num_v_heads = config.positive_integer("linear_num_value_heads", 32)
    if num_v_heads % num_k_heads:
        raise config.error("linear_num_value_heads", f"a multiple of linear_num_key_heads, {num_k_heads}")
    return DeltaShape(
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        k_dim=config.positive_integer("linear_key_head_dim", 128),
        v_dim=config.positive_integer("linear_value_head_dim", 128),
        num_taps=config.positive_integer("linear_conv_kernel_dim", 4),
        eps=eps,
    )
