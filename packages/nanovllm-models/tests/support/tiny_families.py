"""Tiny random models of transformers, one per family, and prompts."""

from pathlib import Path

import torch
import transformers

# The second prompt is longer than CHECKPOINT_INTERVAL.
PROMPTS = [[5, 17, 3, 88, 41, 2, 60], [(7 * i) % 96 for i in range(80)]]
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# By family: its name in transformers, and the fields that differ from COMMON.
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 40,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 24,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
    ),
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 32,
}


def build_model(
    family: str, fields: dict[str, object], dtype: torch.dtype = torch.float32
) -> transformers.PreTrainedModel:
    name, _ = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**fields)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_model(family: str, **changes: object) -> transformers.PreTrainedModel:
    """Return a seeded model. Tests notice a missing norm or bias, because norms and biases are random."""
    torch.manual_seed(0)
    model = build_model(family, COMMON | FAMILIES[family][1] | changes)
    with torch.no_grad():
        for part, weight in [*model.named_parameters(), *model.named_buffers()]:
            if part.endswith("bias") or "norm" in part:
                weight.add_(torch.randn_like(weight) * 0.3)
    return model


def make_checkpoint(
    path: Path, family: str, max_shard_size: str = "1GB", **changes: object
) -> transformers.PreTrainedModel:
    model = make_model(family, **changes)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model
