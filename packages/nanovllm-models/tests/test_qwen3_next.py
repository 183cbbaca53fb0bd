"""Qwen3-Next: chunks of any size, saved states, multi-token prediction, FP8 and invalid configs."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import read_tensors, write_checkpoint, write_twin
from tiny_families import PROMPTS, make_checkpoint, make_model

import nanovllm_models
from nanovllm_core.layers.weights import WeightError
from nanovllm_core.model import PagedSpec, StateSpec
from nanovllm_kernels.gemm.block_fp8 import BlockFP8Weight, dequantize
from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL
from nanovllm_models.errors import ModelError

TOLERANCE = 2e-4


def test_prompts_in_chunks_of_any_size_give_the_same_logits(tmp_path, session_class):
    make_checkpoint(tmp_path, "qwen3_next")
    spec = nanovllm_models.load(tmp_path)
    short, long = PROMPTS
    expected = session_class(spec).step([long])[0]
    for sizes in ([1, 2, 37, 26, 14], [63, 2, 15], [64, 16], [13] * 6 + [2]):
        ours = session_class(spec)
        token = int(ours.step([short])[0][-1].argmax())
        parts, begin = [], 0
        for size in sizes:
            _, part = ours.step([[token], long[begin : begin + size]])
            parts.append(part)
            begin += size
        torch.testing.assert_close(torch.cat(parts), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_logits_from_a_saved_state_equal_those_of_the_whole_prompt(tmp_path, session_class):
    make_checkpoint(tmp_path, "qwen3_next")
    spec = nanovllm_models.load(tmp_path)
    prompt = PROMPTS[1]
    ours = session_class(spec)
    ours.saves[0] = CHECKPOINT_INTERVAL
    expected = ours.step([prompt])[0]
    following = ours.step([[3]])[0]
    ours.rewind(0)
    torch.testing.assert_close(
        ours.step([prompt[CHECKPOINT_INTERVAL:]])[0], expected[CHECKPOINT_INTERVAL:], atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(ours.step([[3]])[0], following, atol=1e-5, rtol=1e-5)
    # Here a step of one token saves the state.
    ours = session_class(spec)
    ours.saves[0] = CHECKPOINT_INTERVAL
    ours.step([prompt[: CHECKPOINT_INTERVAL - 1]])
    ours.step([prompt[CHECKPOINT_INTERVAL - 1 : CHECKPOINT_INTERVAL]])
    ours.step([prompt[CHECKPOINT_INTERVAL:]])
    ours.rewind(0)
    found = ours.step([prompt[CHECKPOINT_INTERVAL:]])[0]
    torch.testing.assert_close(found, expected[CHECKPOINT_INTERVAL:], atol=TOLERANCE, rtol=TOLERANCE)


def test_each_layer_has_the_cache_spec_of_its_kind(tmp_path, session_class):
    make_checkpoint(tmp_path, "qwen3_next")
    specs = session_class(nanovllm_models.load(tmp_path)).model.cache_specs()
    state = StateSpec((4, 16, 8), (4, 2 * 2 * 8 + 4 * 16))
    assert specs == (state, state, state, PagedSpec(2, 16, 4))


def test_a_head_for_multi_token_prediction_is_loaded_on_request_and_changes_nothing(tmp_path, session_class):
    model = make_model("qwen3_next")
    write_checkpoint(tmp_path / "without", model)
    write_checkpoint(tmp_path / "with", model, mtp=True, old_config=True)
    plain, ours = (session_class(nanovllm_models.load(tmp_path / name), uses_mtp=True) for name in ("without", "with"))
    unused = session_class(nanovllm_models.load(tmp_path / "with"))
    expected = plain.step(PROMPTS)
    for found in (ours.step(PROMPTS), unused.step(PROMPTS)):
        assert all(torch.equal(*logits) for logits in zip(found, expected, strict=True))
    assert plain.model.mtp is unused.model.mtp is None
    stored = read_tensors(tmp_path / "with")
    head = ours.model.mtp
    assert torch.equal(head.fc.weight.data, stored["mtp.fc.weight"])
    assert torch.equal(head.pre_fc_norm_hidden.weight, 1 + stored["mtp.pre_fc_norm_hidden.weight"])
    assert torch.equal(head.layers[0].mlp.gate.weight, stored["mtp.layers.0.mlp.gate.weight"])
    file = next(file for file in (tmp_path / "with").glob("*.safetensors") if "mtp.fc.weight" in load_file(file))
    tensors = load_file(file)
    del tensors["mtp.fc.weight"]
    save_file(tensors, file)
    with pytest.raises(WeightError, match="lacks 1 of .*: mtp.fc.weight"):
        session_class(nanovllm_models.load(tmp_path / "with"), uses_mtp=True)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.linear_attn.A_log", "[4]"),
        ("model.layers.1.linear_attn.conv1d.weight", "[96, 1, 4]"),
        ("model.layers.2.linear_attn.in_proj_qkvz.weight", "[160, 32]"),
        ("model.layers.3.self_attn.q_proj.weight", "[128, 32]"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "[1, 32]"),
        ("model.layers.3.mlp.shared_expert.down_proj.weight", "[32, 40]"),
    ],
)
def test_unexpected_tensors_are_refused_and_missing_tensors_are_named(name, shape, tmp_path, session_class):
    make_checkpoint(tmp_path, "qwen3_next")
    tensors = load_file(tmp_path / "model.safetensors")
    extra = name.replace(".layers.", ".layers.1")
    save_file(tensors | {extra: tensors[name].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match="the model has no such weight"):
        session_class(nanovllm_models.load(tmp_path))
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError) as caught:
        session_class(nanovllm_models.load(tmp_path))
    assert f"lacks 1 of {len(tensors) + 1} tensors: {name} {shape}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["full_attention"]},
            "layer_types .* must be linear_attention or full_attention for each of 4",
        ),
        ({"layer_types": ["linear_attention"] * 4}, "full_attention at least once"),
        ({"layer_types": None, "full_attention_interval": 5}, "full_attention_interval .* is 5, but must be at most"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads .* is 3, but must be a multiple"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok .* is 9, but must be at most"),
        ({"hidden_act": "gelu"}, "hidden_act .* must be silu"),
        ({"head_dim": 20, "rope_parameters": None}, "rotary_dim .* is missing: it must be even"),
    ],
)
def test_invalid_configs_are_refused(changes, message, tmp_path):
    make_checkpoint(tmp_path, "qwen3_next")
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text()) | changes
    if "num_local_experts" in fields:
        fields["num_experts"] = fields.pop("num_local_experts")
    file.write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=message):
        nanovllm_models.load(tmp_path)


@pytest.mark.parametrize("shared_width", [40, 24], ids=["shared expert fused", "shared expert separate"])
def test_block_fp8_weights_are_loaded_into_the_rows_of_the_float32_weights(shared_width, tmp_path, session_class):
    changes = {"mlp_only_layers": [1], "num_hidden_layers": 2, "full_attention_interval": 2, "initializer_range": 0.1}
    model = make_model("qwen3_next", head_dim=128, shared_expert_intermediate_size=shared_width, **changes)
    write_checkpoint(tmp_path / "fp8", model, fp8=True, mtp=True, old_config=True)
    write_twin(tmp_path / "fp8", tmp_path / "twin")
    ours, twin = (session_class(nanovllm_models.load(tmp_path / name), uses_mtp=True) for name in ("fp8", "twin"))
    delta, plain_delta = (each.model.model.layers[0].linear_attn for each in (ours, twin))
    full, plain_full = (each.model.model.layers[1] for each in (ours, twin))
    sparse, plain_sparse = (each.model.model.layers[0].mlp for each in (ours, twin))
    head, plain_head = (each.model.mtp.layers[0].self_attn for each in (ours, twin))
    plain_in_proj = plain_delta.in_proj.weight.data
    qkvz, ba = plain_in_proj.split((delta.in_proj.weight.data.shape[0], delta.in_proj_ba.weight.data.shape[0]))
    assert torch.equal(delta.in_proj_ba.weight.data, ba)
    assert (sparse.shared_expert is None) == (shared_width == 40)
    if shared_width == 40:
        experts, plain_experts = sparse.experts.weights, plain_sparse.experts.weights
        down, plain_down = BlockFP8Weight(experts.w2[8], experts.scales2[8]), plain_experts.w2[8]
        assert torch.equal(sparse.gate.shared_gate, plain_sparse.gate.shared_gate)
    else:
        down, plain_down = sparse.shared_expert.down_proj.weight, plain_sparse.shared_expert.down_proj.weight.data
    for weight, expected in (
        (delta.in_proj.weight, qkvz),
        (delta.out_proj.weight, plain_delta.out_proj.weight.data),
        (full.self_attn.qkv_proj.weight, plain_full.self_attn.qkv_proj.weight.data),
        (full.self_attn.o_proj.weight, plain_full.self_attn.o_proj.weight.data),
        (full.mlp.gate_up_proj.weight, plain_full.mlp.gate_up_proj.weight.data),
        (down, plain_down),
        (head.qkv_proj.weight, plain_head.qkv_proj.weight.data),
    ):
        assert isinstance(weight, BlockFP8Weight)
        torch.testing.assert_close(dequantize(weight), expected)
    found, expected = (torch.cat(each.step(PROMPTS)) for each in (ours, twin))
    is_near = torch.nn.functional.cosine_similarity(found, expected, dim=-1) > 0.98
    assert is_near.float().mean() > 0.8


def test_heads_whose_gates_would_share_a_block_are_refused(tmp_path):
    write_checkpoint(tmp_path, make_model("qwen3_next"), fp8=True)
    with pytest.raises(ModelError, match=r"head_dim .* is 16, but must be a multiple of 128"):
        nanovllm_models.load(tmp_path)
