"""Random models with two layers of published or reduced widths, fewer experts and a smaller vocabulary."""

import math

import torch
from tiny_families import build_model
from torch import Tensor
from transformers import PreTrainedModel

COMMON = {
    "num_hidden_layers": 2,
    "vocab_size": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
# Published fields of config.json, except the numbers of experts and the numbers and kinds of layers.
PUBLISHED: dict[str, dict[str, object]] = {
    # meta-llama/Llama-3.1-8B
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": LLAMA3_ROPE,
    },
    # Qwen/Qwen3-Next-80B-A3B
    "qwen3_next": {
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "full_attention_interval": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 32,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    },
    # MiniMaxAI/MiniMax-M2
    "minimax_m2": {
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rotary_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 196_608,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
    },
    # deepseek-ai/DeepSeek-R1
    "deepseek_v3": {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 163_840,
        "rms_norm_eps": 1e-6,
        "rope_parameters": YARN_ROPE,
    },
}
_REDUCED_COMMON = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
# Fields that replace those of PUBLISHED, for a CPU.
REDUCED: dict[str, dict[str, object]] = {
    "llama": _REDUCED_COMMON
    | {"intermediate_size": 192, "rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 128}},
    "qwen3_next": _REDUCED_COMMON
    | {
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
    },
    "minimax_m2": _REDUCED_COMMON | {"head_dim": 32, "rotary_dim": 16, "intermediate_size": 48},
    "deepseek_v3": _REDUCED_COMMON
    | {
        "num_key_value_heads": 4,
        "intermediate_size": 192,
        "moe_intermediate_size": 48,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "rope_parameters": YARN_ROPE | {"factor": 4.0, "original_max_position_embeddings": 256},
    },
}
# Gains by the end of a weight's name. A weight with n inputs has the standard deviation gain / sqrt(n).
# With these gains, all parts of a layer have a similar influence on the logits.
GAINS: dict[str, dict[str, float]] = {
    "llama": {"q_proj.weight": 2.0, "o_proj.weight": 2.0},
    "qwen3_next": {"self_attn.o_proj.weight": 4.0},
    "minimax_m2": {"o_proj.weight": 2.0},
    "deepseek_v3": {"o_proj.weight": 2.0, "experts.down_proj": 0.5},
}
# Rounding may change the chosen experts, so all experts have a common part of their weights. OWN_SHARE is the standard
# deviation of an expert's own part, relative to the standard deviation of the whole weight.
OWN_SHARE = 0.4
LOGIT_STD = 2.0
NUM_SUCCESSORS = 2
SUCCESSOR_LEAD = 12.0


def make_wide_model(family: str, *, reduced: bool, device: str, dtype: torch.dtype) -> PreTrainedModel:
    fields = COMMON | PUBLISHED[family] | (REDUCED[family] if reduced else {})
    with torch.device(device):
        model = build_model(family, fields, dtype)
    if hasattr(model.config, "num_experts_per_tok"):
        # The default implementation uses an operator that supports only bfloat16 on some devices.
        model.set_experts_implementation("eager")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            _draw_weight(name, weight, GAINS[family])
        _draw_head(model.lm_head.weight, model.get_input_embeddings().weight)
    return model


def _draw_weight(name: str, weight: Tensor, gains: dict[str, float]) -> None:
    if "rotary_emb" in name:
        return
    if name.endswith("A_log"):
        # The initial weights of transformers would erase the state within a few tokens.
        weight.uniform_(-5, 0)
    elif name.endswith("e_score_correction_bias"):
        weight.normal_(0, 0.1)
    elif "norm" in name or name.endswith("bias"):
        weight.add_(torch.randn_like(weight) * 0.3)
        if name.endswith("self_attn.q_norm.weight"):
            weight.add_(1.0)
    elif "embed_tokens" in name:
        weight.normal_()
    else:
        gain = next((gain for end, gain in gains.items() if name.endswith(end)), 1.0)
        std = gain / math.sqrt(weight.shape[-1])
        weight.normal_(0, std)
        if ".experts." in name:
            common = torch.empty_like(weight[0]).normal_(0, std * math.sqrt(1 - OWN_SHARE**2))
            weight.mul_(OWN_SHARE).add_(common)


def _draw_head(head: Tensor, embedding: Tensor) -> None:
    """Raise the logits of two successors of each token.

    Otherwise the largest logits would often be so close that rounding to bfloat16 swaps them.
    """
    vocab_size, hidden_size = head.shape
    head.normal_(0, LOGIT_STD / math.sqrt(hidden_size))
    for _ in range(NUM_SUCCESSORS):
        predecessors = torch.randperm(vocab_size, device=head.device)
        head.add_(embedding[predecessors] * (SUCCESSOR_LEAD * LOGIT_STD / hidden_size))
