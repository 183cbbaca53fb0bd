import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_checkpoints import read_tensors, write_checkpoint, write_twin
from tiny_families import COMMON, DEEPSEEK_YARN, FAMILIES, PROMPTS, make_checkpoint

import nanovllm_models
from nanovllm_core.layers.weights import WeightError
from nanovllm_kernels import fp8
from nanovllm_kernels.gemm.block_fp8 import GROUP, BlockFP8Weight, quantize_groups
from nanovllm_models import deepseek_v3
from nanovllm_models.errors import ModelError
from nanovllm_models.fields import JsonFields

TINY = COMMON | FAMILIES["deepseek_v3"][1]


def add_mtp_layer(path: Path) -> dict[str, torch.Tensor]:
    file = path / "model.safetensors"
    tensors = load_file(file)
    layer = {
        f"model.layers.3{name[14:]}": tensor for name, tensor in tensors.items() if name.startswith("model.layers.2")
    }
    table, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
    extra = {"embed_tokens": table, "shared_head.head": table, "shared_head.norm": norm, "enorm": norm, "hnorm": norm}
    layer |= {f"model.layers.3.{name}.weight": tensor for name, tensor in extra.items()}
    layer["model.layers.3.eh_proj.weight"] = torch.randn(32, 64)
    layer = {name: torch.randn_like(tensor) for name, tensor in layer.items()}
    save_file(tensors | layer, file)
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 1}))
    return layer


def test_layers_for_multi_token_prediction_are_loaded_on_request_and_change_nothing(tmp_path, session_class):
    make_checkpoint(tmp_path, "deepseek_v3")
    expected = session_class(nanovllm_models.load(tmp_path)).step(PROMPTS)
    layer = add_mtp_layer(tmp_path)
    without_mtp = session_class(nanovllm_models.load(tmp_path))
    assert len(without_mtp.model.model.layers) == 3
    assert all(torch.equal(a, b) for a, b in zip(without_mtp.step(PROMPTS), expected, strict=True))
    ours = session_class(nanovllm_models.load(tmp_path), uses_mtp=True)
    assert (len(without_mtp.model.cache_specs()), len(ours.model.cache_specs())) == (3, 4)
    assert all(torch.equal(a, b) for a, b in zip(ours.step(PROMPTS), expected, strict=True))
    mtp = ours.model.model.layers[3]
    assert torch.equal(mtp.eh_proj.weight.data, layer["model.layers.3.eh_proj.weight"])
    assert torch.equal(mtp.shared_head.head.weight, layer["model.layers.3.shared_head.head.weight"])
    assert torch.equal(mtp.mlp.experts.weights.w2[7], layer["model.layers.3.mlp.experts.7.down_proj.weight"])


def test_missing_and_unexpected_tensors_are_refused(tmp_path, session_class):
    make_checkpoint(tmp_path, "deepseek_v3")
    add_mtp_layer(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.layers.3.enorm.weight", "model.layers.1.mlp.gate.e_score_correction_bias"):
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, file)
        with pytest.raises(WeightError, match=rf"lacks 1 of \d+ tensors: {name}"):
            session_class(nanovllm_models.load(tmp_path), uses_mtp=True)
    for name in ("model.layers.4.enorm.weight", "model.layers.0.self_attn.kv_b_proj.bias"):
        save_file(tensors | {name: torch.zeros(3)}, file)
        with pytest.raises(WeightError, match=f"tensor {name} .* the model has no such weight"):
            session_class(nanovllm_models.load(tmp_path))


def test_moe_layer_freq_selects_the_layers_with_experts():
    config = deepseek_v3.parse_config(JsonFields(TINY | {"moe_layer_freq": 2, "num_hidden_layers": 6}, "config.json"))
    assert [config.moe.has_experts(index) for index in range(6)] == [False, False, True, False, True, False]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_key_value_heads", 2, "num_attention_heads, 4"),
        ("qk_rope_head_dim", 7, "even"),
        ("n_group", 3, "a divisor of n_routed_experts, 8"),
        ("n_group", 8, "at most half of it"),
        ("topk_group", 5, "at most n_group, 4"),
        ("num_experts_per_tok", 5, "at most the number of experts in topk_group groups"),
        ("scoring_func", "softmax", "sigmoid"),
        ("topk_method", "greedy", "noaux_tc"),
        ("num_nextn_predict_layers", -1, "an integer of at least 0"),
    ],
)
def test_the_error_for_an_unsupported_config_names_the_field(field, value, message):
    with pytest.raises(ModelError, match=rf"{field} of config.json is .*, but must be .*{message}"):
        deepseek_v3.parse_config(JsonFields(TINY | {field: value}, "config.json"))


def round_input(_module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (x,) = inputs
    numbers, scales = quantize_groups(x.flatten(0, -2))
    rounded = numbers.float() * scales.repeat_interleave(GROUP, 1)[:, : x.shape[-1]]
    return (rounded.view(x.shape),)


def test_block_fp8_checkpoints_give_the_logits_of_the_rounded_twin(tmp_path, session_class):
    """The twin does not round the inputs of kv_b_proj, because our model dequantises this weight."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**TINY | {"first_k_dense_replace": 3, "initializer_range": 0.1})
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    write_checkpoint(tmp_path / "fp8", model, fp8=True, old_config=True)
    write_twin(tmp_path / "fp8", tmp_path / "twin")
    ours = session_class(nanovllm_models.load(tmp_path / "fp8"))
    layer = ours.model.model.layers[0]
    for linear in (layer.self_attn.kv_a_proj, layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.down_proj):
        assert isinstance(linear.weight, BlockFP8Weight)
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "twin").eval()
    for name, module in twin.named_modules():
        if name.endswith(("_proj", "_with_mqa")) and not name.endswith("kv_b_proj"):
            module.register_forward_pre_hook(round_input)
    prompts = [[first, 95 - 2 * first, 40 + first] for first in range(32)]
    with torch.no_grad():
        expected = twin(torch.tensor(prompts)).logits
    found = torch.stack(ours.step(prompts))
    errors = (found - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
    assert errors.quantile(0.75) < 1e-5
    assert errors.max() < 0.15


def test_experts_of_block_fp8_checkpoints_give_nearly_the_logits_of_the_twin(tmp_path, session_class):
    """The twin does not round the inputs of linear layers, so the logits are only similar."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**TINY | {"initializer_range": 0.1})
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    write_checkpoint(tmp_path / "fp8", model, fp8=True, mtp=True)
    write_twin(tmp_path / "fp8", tmp_path / "twin")
    prompts = [PROMPTS[0], list(range(40))]
    exact = torch.cat(session_class(nanovllm_models.load(tmp_path / "twin")).step(prompts))
    ours = session_class(nanovllm_models.load(tmp_path / "fp8"), uses_mtp=True)
    found = torch.cat(ours.step(prompts))
    assert 2**-8 < (found - exact).norm() / exact.norm() < 0.15
    last = ours.model.model.layers[3]
    assert last.mlp.experts.weights.w2.dtype == fp8.DTYPE
    assert last.mlp.experts.weights.w2.shape[0] == 9
    assert last.mlp.shared_experts is None
    assert last.eh_proj.weight.data.dtype == torch.float32


def test_shared_experts_with_another_quantisation_run_separately(tmp_path, session_class):
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**TINY | {"initializer_range": 0.1}))
    write_checkpoint(tmp_path / "fp8", model.eval(), fp8=True)
    write_twin(tmp_path / "fp8", tmp_path / "twin")
    plain = read_tensors(tmp_path / "twin")
    kept = {name: tensor for name, tensor in plain.items() if "layers.1.mlp.shared_experts" in name}
    tensors = {
        name: tensor for name, tensor in read_tensors(tmp_path / "fp8").items() if "layers.1.mlp.shared_" not in name
    }
    for file in (tmp_path / "fp8").glob("*.safetensors*"):
        file.unlink()
    save_file(tensors | kept, tmp_path / "fp8" / "model.safetensors")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.1.mlp.shared_experts"]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    ours = session_class(nanovllm_models.load(tmp_path / "fp8"))
    separate, fused = (ours.model.model.layers[index].mlp for index in (1, 2))
    down = "model.layers.{}.mlp.shared_experts.down_proj.weight"
    assert torch.equal(separate.shared_experts.down_proj.weight.data, kept[down.format(1)])
    assert fused.shared_experts is None
    assert torch.equal(fused.experts.weights.w2[8].float(), tensors[down.format(2)].float())
    prompts = [PROMPTS[0], list(range(40))]
    exact = torch.cat(session_class(nanovllm_models.load(tmp_path / "twin")).step(prompts))
    assert (torch.cat(ours.step(prompts)) - exact).norm() < 0.15 * exact.norm()


def test_blocks_that_split_rotated_rows_are_refused(tmp_path, session_class):
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**TINY | {"kv_lora_rank": 124})
    write_checkpoint(tmp_path, transformers.DeepseekV3ForCausalLM(config), fp8=True)
    with pytest.raises(
        ValueError, match="rows 124 to 131 are rotated together, but lie in different FP8 blocks of 128"
    ):
        session_class(nanovllm_models.load(tmp_path))


def test_a_config_with_published_head_sizes_runs_with_random_weights(tmp_path, session_class):
    scaling = {name: value for name, value in DEEPSEEK_YARN.items() if name not in ("rope_type", "rope_theta")}
    fields = TINY | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "kv_lora_rank": 128,
        "num_nextn_predict_layers": 1,
        "rope_scaling": {"type": "yarn", **scaling},
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = session_class(nanovllm_models.load(tmp_path, load_format="dummy"), torch.bfloat16, uses_mtp=True)
    assert model.model.model.layers[3].self_attn.q_proj.weight.data.dtype == fp8.DTYPE
    assert model.model.model.layers[0].self_attn.kv_b_proj.by_head.dtype == torch.bfloat16
    assert model.step(PROMPTS)[0].isfinite().all()
