"""Tests block FP8 checkpoints against float32 twins.

A twin is a model of the library `transformers` with the same weights. The twin sums in another order, which may change
a rounding to e4m3. Most of the many short prompts are unaffected.
"""

import json

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_checkpoints import INDEX, read_tensors, write_checkpoint, write_twin

import nanovllm_models
from nanovllm_core.layers import compilation
from nanovllm_core.layers.weights import WeightError
from nanovllm_kernels.gemm.block_fp8 import GROUP, BlockFP8Weight, quantize_groups
from nanovllm_models import llama

PROMPTS = [[5, 17, 3, 88, 41, 2, 60], list(range(40))]
SHORT_PROMPTS = [[first, 95 - 2 * first, 40 + first] for first in range(32)]
FAMILIES = {
    # No width is a multiple of 128.
    "llama": ("Llama", {"hidden_size": 96, "intermediate_size": 150, "num_key_value_heads": 2, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"hidden_size": 64, "intermediate_size": 256, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"hidden_size": 160, "intermediate_size": 300, "num_key_value_heads": 2, "head_dim": 32}),
}


def make_model(family, **changes):
    name, fields = FAMILIES[family]
    torch.manual_seed(0)
    common = {
        "vocab_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    config = getattr(transformers, f"{name}Config")(**(common | fields | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            if parameter_name.endswith("bias"):
                weight.normal_(0, 0.3)
    return model


def round_input(_module, inputs):
    (x,) = inputs
    numbers, scales = quantize_groups(x.flatten(0, -2))
    rounded = numbers.float() * scales.repeat_interleave(GROUP, 1)[:, : x.shape[-1]]
    return (rounded.view(x.shape),)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_float32_twin(family, tmp_path, session_class):
    write_checkpoint(tmp_path / "fp8", make_model(family), fp8=True, old_config=True)
    write_twin(tmp_path / "fp8", tmp_path / "twin")
    ours = session_class(nanovllm_models.load(tmp_path / "fp8"))
    layer = ours.model.model.layers[0]
    for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
        assert isinstance(linear.weight, BlockFP8Weight)
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "twin").eval()
    ids = torch.tensor(SHORT_PROMPTS)
    with torch.no_grad():
        plain = twin(ids).logits
        for name, module in twin.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(round_input)
        expected = twin(ids).logits
    found = torch.stack(ours.step(SHORT_PROMPTS))
    errors = (found - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
    assert errors.quantile(0.75) < 1e-5
    # Rounding to e4m3 has a relative error of about 1/40. The three layers round 21 inputs.
    bound = 21**0.5 / 40
    assert errors.max() < bound
    assert 2**-8 < (found - plain).norm() / plain.norm() < bound


def test_modules_that_are_not_quantised_keep_their_weights(tmp_path, session_class):
    write_checkpoint(tmp_path, make_model("llama"), fp8=True)
    tensors = read_tensors(tmp_path)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        if "layers.2." in name or "layers.0.self_attn.o_proj" in name:
            del tensors[name]
            weight = name.removesuffix("_scale_inv")
            tensors[weight] = torch.randn(tensors[weight].shape) * 0.1
    (tmp_path / INDEX).unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] += ["model.layers.2", "model.layers.0.self_attn.o_proj"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = session_class(nanovllm_models.load(tmp_path))
    assert ours.step(PROMPTS)[0].isfinite().all()
    layers = ours.model.model.layers
    assert layers[0].self_attn.o_proj.weight.data.dtype == torch.float32
    assert layers[0].self_attn.qkv_proj.weight.data.dtype == torch.float8_e4m3fn
    assert layers[2].mlp.down_proj.weight.data.dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"modules_to_not_convert": ["model.layers.1.mlp.up_proj"]},
            r"layers\.1\.mlp\.up_proj is not quantised, but model\.layers\.1\.mlp\.gate_proj is",
        ),
        (
            {"modules_to_not_convert": ["down_proj", "gate_proj", "up_proj"]},
            r"mlp\.down_proj\.weight is of float8_e4m3fn, but the model expects floating-point numbers",
        ),
        (None, r"is of float8_e4m3fn, but the model expects floating-point numbers of 16 bits or more"),
    ],
    ids=["a part is kept", "quantised weights listed as kept", "no quantization_config"],
)
def test_a_config_that_does_not_fit_the_weights_is_refused(config, message, tmp_path, session_class):
    write_checkpoint(tmp_path, make_model("qwen2"), fp8=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] = None if config is None else fields["quantization_config"] | config
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        session_class(nanovllm_models.load(tmp_path))


def test_a_missing_scale_is_named(tmp_path, session_class):
    write_checkpoint(tmp_path, make_model("qwen2"), fp8=True)
    file = next(file for file in sorted(tmp_path.glob("*.safetensors")) if "layers.1.mlp" in str(read_names(file)))
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, file)
    message = r"the checkpoint lacks 1 of .*: model\.layers\.1\.mlp\.up_proj\.weight_scale_inv \[2, 1\]"
    with pytest.raises(WeightError, match=message):
        session_class(nanovllm_models.load(tmp_path))


def read_names(file):
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def test_random_weights_are_quantised_too(tmp_path, session_class):
    write_checkpoint(tmp_path, make_model("qwen3"), fp8=True)
    model = session_class(nanovllm_models.load(tmp_path, load_format="dummy", seed=1))
    assert model.model.model.layers[0].mlp.down_proj.weight.data.dtype == torch.float8_e4m3fn
    assert model.step(PROMPTS)[0].isfinite().all()


def test_bfloat16_logits_are_near_float32_logits(tmp_path, session_class):
    write_checkpoint(tmp_path, make_model("llama"), dtype=torch.bfloat16, fp8=True)
    spec = nanovllm_models.load(tmp_path)
    assert spec.dtype == torch.bfloat16
    exact, coarse = (torch.cat(session_class(spec, dtype).step(PROMPTS)) for dtype in (torch.float32, torch.bfloat16))
    assert coarse.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(coarse, exact, dim=-1).min() > 0.99


def test_compiling_gives_nearly_the_same_logits(tmp_path, session_class, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    monkeypatch.setattr(llama, "MIN_COMPILED_ROWS", 9)
    write_checkpoint(tmp_path, make_model("qwen2"), fp8=True)
    spec = nanovllm_models.load(tmp_path)
    plain, fast = session_class(spec), session_class(spec, compiled=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in ([PROMPTS[1]], [[5], PROMPTS[0]], [[6], list(range(20))]):
            for found, expected in zip(fast.step(step), plain.step(step), strict=True):
                # The compiled norm rounds differently, which may change the rounding to e4m3.
                assert (found - expected).norm() < 0.1 * expected.norm()
