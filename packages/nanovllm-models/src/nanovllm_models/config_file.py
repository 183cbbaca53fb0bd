"""Parses fields of config.json that several families share. Avoids transformers, whose import takes seconds."""

from pathlib import Path

import torch

from nanovllm_core.layers.quantization import BlockFP8
from nanovllm_core.layers.rotary import Llama3Scaling, RotaryConfig, YarnScaling, yarn_mscale
from nanovllm_models.fields import JsonFields, read_fields

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Names of the number format e4m3 in config.json. MiniMax's checkpoints have the second name.
E4M3_NAMES = ("e4m3", "float8_e4m3fn")
# Characters that occur in globs and regular expressions, but not in modules' names.
PATTERN_CHARACTERS = frozenset("*?[](){}|^$+\\:")
# Default base of the rotary frequencies, as in transformers.
DEFAULT_ROPE_THETA = 10000.0


def parse_dtype(config: JsonFields) -> torch.dtype:
    """Return the checkpoint's dtype; float32 if config.json has none. Raises ModelError."""
    field_name = "dtype" if config.has("dtype") else "torch_dtype"
    dtype = DTYPES.get(config.text(field_name, "float32").removeprefix("torch."))
    if dtype is None:
        raise config.error(field_name, f"one of {', '.join(DTYPES)}")
    return dtype


def parse_quantization(config: JsonFields) -> BlockFP8 | None:
    """Return the quantisation; None for unquantised weights. Raises ModelError for all but e4m3 in 128 x 128 blocks."""
    if not config.has("quantization_config"):
        return None
    fields = config.nested("quantization_config")
    if fields.text("quant_method") != "fp8":
        raise fields.error("quant_method", expected="fp8: no other quantisation is supported")
    if fields.text("fmt", "e4m3") not in E4M3_NAMES:
        raise fields.error("fmt", f"one of {', '.join(E4M3_NAMES)}")
    if fields.text("activation_scheme", "dynamic") != "dynamic":
        raise fields.error("activation_scheme", "dynamic: activation scales are computed at run time, not loaded")
    if fields.positive_integers("weight_block_size") != (128, 128):
        raise fields.error("weight_block_size", "[128, 128]")
    unquantized_modules = fields.texts("modules_to_not_convert")
    if any(set(name) & PATTERN_CHARACTERS for name in unquantized_modules):
        raise fields.error("modules_to_not_convert", "a list of modules' names without patterns")
    return BlockFP8(unquantized_modules)


def parse_eos_token_ids(path: Path, config: JsonFields, vocab_size: int) -> tuple[int, ...]:
    """Return the token ids that end a sequence, from config.json and generation_config.json. Raises ModelError.

    Ids of at least `vocab_size` are left out, because the model can't generate them.
    """
    generation_config = path / "generation_config.json"
    generation_ids = read_fields(generation_config).token_ids("eos_token_id") if generation_config.exists() else ()
    ids = dict.fromkeys(config.token_ids("eos_token_id") + generation_ids)
    return tuple(token_id for token_id in ids if token_id < vocab_size)


def parse_rotary(
    config: JsonFields,
    max_position: int,
    *,
    default_theta: float = DEFAULT_ROPE_THETA,
    head_dim: int | None = None,
    default_fraction: float = 1.0,
) -> RotaryConfig:
    """Parse the rotary embeddings: `rope_parameters` of transformers 5, or the older `rope_theta` and `rope_scaling`.

    Raises ModelError for a kind of scaling that is not implemented.
    max_position: `max_position_embeddings` of config.json.
    default_theta: base of the frequencies if config.json has none.
    head_dim: size of a head if the family may rotate a part of each head; None for other families.
    default_fraction: fraction of each head to rotate if config.json has none.
    """
    rope = config.nested("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    theta_fields = rope if rope.has("rope_theta") else config
    theta = theta_fields.positive_number("rope_theta", default_theta)
    if theta <= 1:
        raise theta_fields.error("rope_theta", "above 1")
    fraction = _parse_rotated_fraction(config, rope, head_dim, default_fraction)
    type_field = "rope_type" if rope.has("rope_type") else "type"
    match rope.text(type_field, "default"):
        case "default":
            return RotaryConfig(theta, fraction=fraction)
        case "llama3":
            return RotaryConfig(theta, _parse_llama3_scaling(config, rope, max_position), fraction)
        case "yarn":
            return RotaryConfig(theta, _parse_yarn(config, rope, max_position), fraction)
        case _:
            raise rope.error(type_field, "default, llama3 or yarn")


def max_sequence_length(max_position_embeddings: int, rotary: RotaryConfig) -> int:
    """Return the maximum length of a sequence, in tokens. YaRN may extend `max_position_embeddings`."""
    if not isinstance(rotary.scaling, YarnScaling):
        return max_position_embeddings
    return max(max_position_embeddings, int(rotary.scaling.original_max_position * rotary.scaling.factor))


def _parse_rotated_fraction(config: JsonFields, rope: JsonFields, head_dim: int | None, default: float) -> float:
    for fields in (rope, config):
        if not fields.has("partial_rotary_factor"):
            continue
        fraction = fields.positive_number("partial_rotary_factor")
        if head_dim is None:
            if fraction != 1.0:
                raise fields.error("partial_rotary_factor", "1: rotating a part of each head is not supported")
            return 1.0
        rotary_dim = int(head_dim * fraction)
        if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
            raise fields.error(
                "partial_rotary_factor",
                f"a fraction that selects an even number (at least 2) of the {head_dim} dimensions of a head",
            )
        return rotary_dim / head_dim
    if head_dim is None:
        return default
    rotary_dim = config.positive_integer("rotary_dim", max(1, round(head_dim * default)))
    if rotary_dim > head_dim or rotary_dim % 2:
        raise config.error("rotary_dim", f"even and at most the size of a head, {head_dim}")
    return rotary_dim / head_dim


def _parse_llama3_scaling(config: JsonFields, rope: JsonFields, max_position: int) -> Llama3Scaling:
    default_original = config.positive_integer("original_max_position_embeddings", max_position)
    factor = rope.positive_number("factor")
    low, high = rope.positive_number("low_freq_factor"), rope.positive_number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"above low_freq_factor, {low:g}")
    original_max_position = rope.positive_integer("original_max_position_embeddings", default_original)
    return Llama3Scaling(factor, low, high, original_max_position)


def _parse_yarn(config: JsonFields, rope: JsonFields, max_position: int) -> YarnScaling:
    # The defaults are those of transformers.
    default_original = config.positive_integer("original_max_position_embeddings", max_position)
    original_max_position = rope.positive_integer("original_max_position_embeddings", default_original)
    factor = rope.positive_number("factor", max_position / original_max_position)
    mscale, mscale_all_dim = rope.non_negative_number("mscale"), rope.non_negative_number("mscale_all_dim")
    attention_factor = yarn_mscale(factor)
    if mscale and mscale_all_dim:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return YarnScaling(
        factor=factor,
        original_max_position=original_max_position,
        attention_factor=rope.positive_number("attention_factor", attention_factor),
        mscale_all_dim=mscale_all_dim,
        beta_fast=rope.positive_number("beta_fast", 32.0),
        beta_slow=rope.positive_number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
    )
