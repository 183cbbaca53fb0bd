"""Tests of `tiny_checkpoints`: published layouts, and float32 twins that transformers reads."""

import json
import re

import pytest
import torch
import transformers
from tiny_checkpoints import INDEX, read_tensors, write_checkpoint, write_twin

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "intermediate_size": 48}
# Values: prefix of transformers' class names, config fields, dtypes of some tensors in the FP8 checkpoint.
FAMILIES = {
    "llama": ("Llama", {"intermediate_size": 150}, {"model.layers.0.mlp.up_proj.weight": "fp8"}),
    "qwen2": (
        "Qwen2",
        {"intermediate_size": 48},
        {"model.layers.0.self_attn.q_proj.bias": "bf16", "model.layers.0.self_attn.q_proj.weight": "fp8"},
    ),
    "qwen3": (
        "Qwen3",
        {"intermediate_size": 48, "head_dim": 8},
        {"model.layers.0.self_attn.q_norm.weight": "bf16", "model.layers.1.mlp.down_proj.weight_scale_inv": "bf16"},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**MOE, "head_dim": 8, "num_experts": 4},
        {"model.layers.0.mlp.experts.3.down_proj.weight": "fp8", "model.layers.0.mlp.gate.weight": "bf16"},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **MOE,
            "head_dim": 8,
            "num_experts": 4,
            "shared_expert_intermediate_size": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        {
            "model.layers.0.linear_attn.in_proj_qkvz.weight": "fp8",
            "model.layers.0.linear_attn.in_proj_ba.weight": "bf16",
            "model.layers.0.linear_attn.conv1d.weight": "bf16",
            "model.layers.0.mlp.shared_expert.up_proj.weight": "fp8",
            "model.layers.0.mlp.shared_expert_gate.weight": "bf16",
            "mtp.fc.weight": "bf16",
            "mtp.layers.0.self_attn.q_proj.weight": "fp8",
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {"num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4, "intermediate_size": 24, "num_local_experts": 4},
        {
            "model.layers.1.block_sparse_moe.experts.3.w2.weight": "fp8",
            "model.layers.1.block_sparse_moe.experts.3.w2.weight_scale_inv": "float32",
            "model.layers.1.block_sparse_moe.gate.weight": "float32",
            "model.layers.1.block_sparse_moe.e_score_correction_bias": "float32",
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **MOE,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        {
            "model.layers.0.mlp.gate_proj.weight": "fp8",
            "model.layers.1.mlp.gate.weight": "bf16",
            "model.layers.1.mlp.gate.e_score_correction_bias": "float32",
            "model.layers.1.mlp.shared_experts.down_proj.weight": "fp8",
            "model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv": "float32",
            "model.layers.2.eh_proj.weight": "bf16",
            "model.layers.2.shared_head.head.weight": "bf16",
            "model.layers.2.mlp.experts.0.up_proj.weight": "fp8",
        },
    ),
}
DTYPES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "float32": torch.float32}
FAMILIES_WITH_MTP = ("qwen3_next", "deepseek_v3")


def make_model(family):
    name, fields, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(COMMON | fields))
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_have_the_published_layout(family, tmp_path):
    model = make_model(family)
    write_checkpoint(
        tmp_path / "fp8", model, dtype=torch.bfloat16, fp8=True, mtp=family in FAMILIES_WITH_MTP, old_config=True
    )
    tensors = read_tensors(tmp_path / "fp8")
    weight_map = json.loads((tmp_path / "fp8" / INDEX).read_text())["weight_map"]
    assert len(set(weight_map.values())) == 3
    for name, dtype in FAMILIES[family][2].items():
        assert tensors[name].dtype == DTYPES[dtype], name
    for name, tensor in tensors.items():
        assert (tensor.dtype == torch.float8_e4m3fn) == (f"{name}_scale_inv" in tensors)
        if tensor.dtype == torch.float8_e4m3fn:
            blocks = [-(-size // 128) for size in tensor.shape]
            assert list(tensors[f"{name}_scale_inv"].shape) == blocks
        assert tensor.dim() < 3 or "conv1d" in name
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    kept = config["quantization_config"].get("modules_to_not_convert", [])
    assert not [name for name in kept for other in tensors if re.fullmatch(rf".*{name}\.weight_scale_inv", other)]
    assert config["torch_dtype"] == "bfloat16"

    write_twin(tmp_path / "fp8", tmp_path / "twin")
    twin, info = type(model).from_pretrained(tmp_path / "twin", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    ids = torch.arange(20)[None]
    with torch.no_grad():
        found, expected = twin.eval()(ids).logits, model(ids).logits
    # Rounding may choose another expert for a token, so the test compares the median.
    similarities = torch.nn.functional.cosine_similarity(found, expected, dim=-1)
    assert similarities.median() > 0.99


def test_multi_token_prediction_that_is_not_published_is_refused(tmp_path):
    with pytest.raises(ValueError, match="minimax_m2 is published without heads"):
        write_checkpoint(tmp_path, make_model("minimax_m2"), mtp=True)


def test_transformers_reads_a_plain_checkpoint(tmp_path):
    model = make_model("qwen3_moe")
    write_checkpoint(tmp_path, model, num_shards=2)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
