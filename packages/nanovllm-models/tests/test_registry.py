"""`load`: errors, dummy weights, and default values of fields."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import save_file

import nanovllm_models
from nanovllm_core.layers.weights import WeightError
from nanovllm_models import ModelError, llama, qwen2, qwen3

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def refusal(path, **options) -> str:
    with pytest.raises(ModelError) as caught:
        nanovllm_models.load(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_path_that_is_no_directory_is_refused(tmp_path):
    assert "is not a directory" in refusal(tmp_path / "absent")
    file = tmp_path / "model.safetensors"
    file.touch()
    assert "is not a directory" in refusal(file)


def test_a_directory_without_a_config_is_refused(tmp_path):
    assert "has no config.json" in refusal(tmp_path)


@pytest.mark.parametrize(("content", "message"), [("{", "is not valid JSON"), ("[]", "must hold a JSON object")])
def test_a_broken_config_is_refused(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    assert message in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "names no architecture (supported: LlamaForCausalLM"),
        (
            {"architectures": ["BertModel"]},
            "architecture BertModel of .* is not supported (supported: LlamaForCausalLM",
        ),
        ({"architectures": "LlamaForCausalLM"}, 'architectures of .* is "LlamaForCausalLM", but must be a list'),
        ({"hidden_act": "gelu"}, 'hidden_act of .* is "gelu", but must be silu'),
        ({"hidden_size": "32"}, 'hidden_size of .* is "32", but must be an integer above 0'),
        ({"hidden_size": 33}, "hidden_size of .* is 33, but must be a multiple of num_attention_heads, 4"),
        ({"num_key_value_heads": 3}, "num_key_value_heads of .* is 3, but must be a divisor"),
        ({"num_hidden_layers": True}, "num_hidden_layers of .* is true, but must be an integer above 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps of .* is -1.0, but must be a number above 0"),
        ({"mlp_bias": 1}, "mlp_bias of .* is 1, but must be true or false"),
        ({"eos_token_id": "</s>"}, 'eos_token_id of .* is "</s>", but must be a token id'),
        ({"torch_dtype": "int8"}, 'torch_dtype of .* is "int8", but must be one of float32, bfloat16, float16'),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            'rope_type of rope_scaling of .* is "longrope", but',
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 'type of rope_scaling of .* is "linear", but'),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor of rope_parameters of .* is missing"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor of rope_scaling of .* is 4, but must be above low_freq_factor, 4",
        ),
        ({"rope_theta": 10**400}, "rope_theta of .* is 1.{,100}, but must be a number above 0"),
        (
            {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 4}},
            "rope_theta of .* is 1.0, but must be above",
        ),
        ({"hidden_size": 28}, "head_dim of .* is missing: it must be even"),
        ({"head_dim": 7}, "head_dim of .* is 7, but must be even"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor of .* is 0.5, but must be 1"),
        ({"quantization_config": FP8 | {"quant_method": "x" * 500}}, "quant_method of .* is .{,100}, but must be fp8"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, 'fmt of quantization_config of .* is "e5m2", but must be one'),
        ({"quantization_config": FP8 | {"weight_block_size": [64, 128]}}, "weight_block_size of .* must be [128, 128]"),
        ({"quantization_config": FP8 | {"weight_block_size": None}}, "weight_block_size of .* is missing"),
        ({"quantization_config": FP8 | {"activation_scheme": "static"}}, 'activation_scheme of .* is "static", but'),
        (
            {"quantization_config": FP8 | {"modules_to_not_convert": ["layers.*.gate"]}},
            "modules_to_not_convert of .* must be a list of modules' names without patterns",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 1}, "use_sliding_w"),
    ],
)
def test_the_error_for_an_unsupported_config_names_the_field(write_config, changes, message):
    pattern = re.escape(message).replace(r"\.\*", ".*").replace(r"\.\{,100\}", ".{,100}")
    assert re.search(pattern, refusal(write_config(**changes), load_format="dummy"))


def test_a_directory_without_safetensors_is_refused(write_config):
    assert "has no model.safetensors" in refusal(write_config())


def test_a_shard_that_is_missing_is_named(write_config):
    path = write_config()
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"a": torch.ones(1)}, path / "model-1.safetensors")
    message = refusal(path)
    assert "names model-2.safetensors, which does not exist" in message
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": ["a"]}))
    assert "weight_map" in refusal(path)


def test_a_file_that_is_no_safetensors_is_refused_when_read(write_config, session_class):
    path = write_config()
    (path / "model.safetensors").write_bytes(b"not what it says")
    spec = nanovllm_models.load(path)
    with pytest.raises(ModelError, match=r"can't read .*model\.safetensors"):
        session_class(spec)


def test_weights_of_another_model_are_refused_when_read(write_config, session_class):
    path = write_config()
    save_file({"model.norm.weight": torch.ones(8)}, path / "model.safetensors")
    with pytest.raises(WeightError, match=r"model\.norm\.weight has shape \[8\], but the model expects \[32\]"):
        session_class(nanovllm_models.load(path))


def test_a_draft_model_that_can_not_be_built_is_named(write_config, session_class):
    path = write_config()
    save_file({"model.norm.weight": torch.ones(8)}, path / "model.safetensors")
    draft = nanovllm_models.load(path, draft=nanovllm_models.ModelDirectory(path, "small")).draft
    with pytest.raises(
        ModelError, match=r"the draft model small can't be built: .*model\.norm\.weight has shape \[8\]"
    ):
        session_class(draft)


def test_a_weight_file_that_can_not_be_read_is_named(write_config):
    path = write_config()
    save_file({"model.norm.weight": torch.ones(32)}, path / "model.safetensors")
    (path / "unused.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"can't read .*unused\.safetensors"):
        nanovllm_models.load(path)


def test_dummy_weights_are_drawn_from_the_seed(write_config, session_class):
    path = write_config(tie_word_embeddings=True)

    def logits(seed: int) -> torch.Tensor:
        return session_class(nanovllm_models.load(path, load_format="dummy", seed=seed)).step([[1, 2, 3]])[0]

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))
    assert logits(1).isfinite().all()
    assert logits(1).shape == (3, 96)


@pytest.mark.parametrize(
    ("module", "config_class", "uncompared_fields"),
    [
        (llama, "LlamaConfig", set()),
        (qwen2, "Qwen2Config", {"attention_bias", "mlp_bias", "head_dim"}),
        (qwen3, "Qwen3Config", {"mlp_bias"}),
    ],
)
def test_fields_left_out_have_the_defaults_of_transformers(write_config, module, config_class, uncompared_fields):
    import transformers

    from nanovllm_models.fields import read_fields

    path = write_config()
    (path / "config.json").write_text("{}")
    ours, theirs = module.parse_config(read_fields(path / "config.json")), getattr(transformers, config_class)()
    own_names = {"max_position", "rotary", "qk_norm", "o_proj_bias", "quantization"}
    names = set(ours.__slots__) - own_names - uncompared_fields
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rotary.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("max_position_embeddings", "factor", "max_position"),
    [(40960, 4.0, 131072), (40960, 1.1, 40960), (65536, 2, 65536)],
)
def test_yarn_extends_the_maximum_length(write_config, max_position_embeddings, factor, max_position):
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 32768}
    path = write_config(max_position_embeddings=max_position_embeddings, rope_scaling=scaling)
    assert nanovllm_models.load(path, load_format="dummy").max_position == max_position


def test_the_fingerprint_changes_with_the_config_and_the_weights(write_config):
    path = write_config()
    save_file({"x": torch.zeros(2)}, path / "model.safetensors")
    fingerprint = nanovllm_models.load(path).fingerprint
    assert fingerprint == nanovllm_models.load(path, served_name="other").fingerprint
    # Copies on other hosts have other modification times.
    os.utime(path / "model.safetensors", ns=(1, 1))
    assert fingerprint == nanovllm_models.load(path).fingerprint
    save_file({"x": torch.ones(2)}, path / "model.safetensors")
    with_new_weights = nanovllm_models.load(path).fingerprint
    (path / "config.json").write_text((path / "config.json").read_text() + " ")
    with_new_config = nanovllm_models.load(path).fingerprint
    random_weights = {nanovllm_models.load(path, load_format="dummy", seed=seed).fingerprint for seed in (0, 1)}
    assert len({fingerprint, with_new_weights, with_new_config, *random_weights}) == 5
