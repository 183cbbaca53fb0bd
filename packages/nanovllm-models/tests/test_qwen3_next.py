"""Qwen3-Next: the same logits and greedy tokens as transformers, through states that are cut and saved anywhere."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_checkpoints import read_tensors, write_checkpoint, write_twin
from torch._dynamo.testing import CompileCounterWithBackend

import nanovllm_models
from nanovllm_core.layers import compiled
from nanovllm_core.layers.weights import WeightError
from nanovllm_core.model import PagedSpec, StateSpec
from nanovllm_kernels.gemm.block_fp8 import BlockFP8Weight, dequantize
from nanovllm_kernels.linear_attention import CHECKPOINT
from nanovllm_models import qwen3_next
from nanovllm_models.errors import ModelError

PROMPTS = [[5, 17, 3, 88, 41, 2, 60], [(7 * i) % 96 for i in range(80)]]
TOLERANCE = 2e-4
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
VARIANTS = {
    "as published": {},
    "every second layer, tied, biases": {
        "full_attention_interval": 2,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 8,
    },
    "layers by type, two dense, weights as they come": {
        "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
        "mlp_only_layers": [0, 3],
        "norm_topk_prob": False,
        "linear_conv_kernel_dim": 2,
    },
    "every second layer has experts": {"decoder_sparse_step": 2, "linear_num_value_heads": 6, "num_key_value_heads": 1},
    "rotated by half": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5},
        "rms_norm_eps": 1e-2,
    },
}


def make_model(**fields: object) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**(SMALL | fields))).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
    return model


def make_checkpoint(path: Path, **fields: object) -> transformers.PreTrainedModel:
    model = make_model(**fields)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_same_logits_and_tokens_as_transformers(fields, tmp_path, session):
    theirs = make_checkpoint(tmp_path, **fields)
    ours = session(nanovllm_models.load(tmp_path))
    sequences = [list(prompt) for prompt in PROMPTS]
    new = sequences
    for _ in range(6):
        logits = ours.step(new)
        for sequence, fresh, found in zip(sequences, new, logits, strict=True):
            with torch.no_grad():
                expected = theirs(torch.tensor([sequence])).logits[0, -len(fresh) :]
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
            assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()
        new = [[int(found[-1].argmax())] for found in logits]
        sequences = [sequence + fresh for sequence, fresh in zip(sequences, new, strict=True)]


def test_prompts_in_chunks_of_odd_sizes_beside_others(tmp_path, session):
    make_checkpoint(tmp_path)
    spec = nanovllm_models.load(tmp_path)
    short, long = PROMPTS
    expected = session(spec).step([long])[0]
    for sizes in ([1, 2, 37, 26, 14], [63, 2, 15], [64, 16], [13] * 6 + [2]):
        ours = session(spec)
        token = int(ours.step([short])[0][-1].argmax())
        parts, begin = [], 0
        for size in sizes:
            # Of one token the decode comes first, of several the chunk, as the engine orders them.
            _, part = ours.step([[token], long[begin : begin + size]])
            parts.append(part)
            begin += size
        torch.testing.assert_close(torch.cat(parts), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_from_a_saved_state_on_as_if_all_had_been_computed(tmp_path, session):
    make_checkpoint(tmp_path)
    spec = nanovllm_models.load(tmp_path)
    prompt = PROMPTS[1]
    ours = session(spec)
    ours.saves[0] = CHECKPOINT
    expected = ours.step([prompt])[0]
    following = ours.step([[3]])[0]
    ours.rewind(0)
    torch.testing.assert_close(ours.step([prompt[CHECKPOINT:]])[0], expected[CHECKPOINT:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.step([[3]])[0], following, atol=1e-5, rtol=1e-5)
    # Saved by a step of one token.
    ours = session(spec)
    ours.saves[0] = CHECKPOINT
    ours.step([prompt[: CHECKPOINT - 1]])
    ours.step([prompt[CHECKPOINT - 1 : CHECKPOINT]])
    ours.step([prompt[CHECKPOINT:]])
    ours.rewind(0)
    found = ours.step([prompt[CHECKPOINT:]])[0]
    torch.testing.assert_close(found, expected[CHECKPOINT:], atol=TOLERANCE, rtol=TOLERANCE)


def test_what_each_layer_keeps(tmp_path, session):
    make_checkpoint(tmp_path)
    specs = session(nanovllm_models.load(tmp_path)).model.cache_specs()
    state = StateSpec((4, 16, 8), (4, 2 * 2 * 8 + 4 * 16))
    assert specs == (state, state, state, PagedSpec(2, 16, 4))


def test_a_head_for_multi_token_prediction_is_loaded_and_changes_nothing(tmp_path, session):
    model = make_model()
    write_checkpoint(tmp_path / "without", model)
    write_checkpoint(tmp_path / "with", model, mtp=True, old_config=True)
    plain, ours = (session(nanovllm_models.load(tmp_path / name)) for name in ("without", "with"))
    for found, expected in zip(ours.step(PROMPTS), plain.step(PROMPTS), strict=True):
        assert torch.equal(found, expected)
    assert plain.model.mtp is None
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
        session(nanovllm_models.load(tmp_path / "with"))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.linear_attn.A_log", "[4]"),
        ("model.layers.1.linear_attn.conv1d.weight", "[96, 1, 4]"),
        ("model.layers.2.linear_attn.in_proj_qkvz.weight", "[160, 32]"),
        ("model.layers.3.self_attn.q_proj.weight", "[128, 32]"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "[1, 32]"),
    ],
)
def test_tensors_that_are_wrong_are_named(name, shape, tmp_path, session):
    make_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = name.replace(".layers.", ".layers.1")
    save_file(tensors | {extra: tensors[name].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match="the model has no such weight"):
        session(nanovllm_models.load(tmp_path))
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError) as caught:
        session(nanovllm_models.load(tmp_path))
    assert f"lacks 1 of {len(tensors) + 1} tensors: {name} {shape}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["full_attention"]},
            "layer_types .* must be linear_attention or full_attention for each of 4",
        ),
        ({"layer_types": ["linear_attention"] * 4}, "the latter once or more"),
        ({"layer_types": None, "full_attention_interval": 5}, "full_attention_interval .* is 5, but must be at most"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads .* is 3, but must be a multiple"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok .* is 9, but must be at most"),
        ({"hidden_act": "gelu"}, "hidden_act .* must be silu"),
    ],
)
def test_configs_that_are_wrong_are_refused(changes, message, tmp_path):
    make_checkpoint(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text()) | changes
    if "num_local_experts" in fields:
        fields["num_experts"] = fields.pop("num_local_experts")
    file.write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=message):
        nanovllm_models.load(tmp_path)


def test_what_is_compiled_is_compiled_once_for_each_kind_of_neighbours(tmp_path, session, monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled, "BACKEND", counter)
    monkeypatch.setattr(qwen3_next, "LEAST_ROWS", 9)
    make_checkpoint(tmp_path, num_hidden_layers=6, full_attention_interval=3)
    spec = nanovllm_models.load(tmp_path)
    plain, fast = session(spec), session(spec, compiled=True)
    for index, step in enumerate(([PROMPTS[1]], [[5], PROMPTS[0]], [[6], [7]], [[1], list(range(20))])):
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            for found, expected in zip(fast.step(step), plain.step(step), strict=True):
                torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert counter.frame_count == 3


def test_bfloat16_is_near_float32(tmp_path, session):
    make_checkpoint(tmp_path)
    spec = nanovllm_models.load(tmp_path)
    exact, coarse = session(spec).step(PROMPTS), session(spec, torch.bfloat16).step(PROMPTS)
    # Few tokens go to other experts; of these nothing can be said.
    near = [torch.nn.functional.cosine_similarity(a, b, dim=-1) > 0.98 for a, b in zip(coarse, exact, strict=True)]
    assert torch.cat(near).float().mean() > 0.8


def test_dummy_weights_are_drawn_from_the_seed(tmp_path, session):
    make_checkpoint(tmp_path)
    first, second = (
        session(nanovllm_models.load(tmp_path, load_format="dummy", seed=seed)).step(PROMPTS)[0] for seed in (1, 2)
    )
    assert first.isfinite().all()
    assert not torch.equal(first, second)


def test_block_fp8_weights_get_to_where_the_float32_twins_are(tmp_path, session):
    model = make_model(head_dim=128, mlp_only_layers=[1], num_hidden_layers=2, full_attention_interval=2)
    write_checkpoint(tmp_path / "fp8", model, fp8=True, mtp=True, old_config=True)
    write_twin(tmp_path / "fp8", tmp_path / "twin")
    ours, twin = (session(nanovllm_models.load(tmp_path / name)) for name in ("fp8", "twin"))
    delta, plain_delta = (each.model.model.layers[0].linear_attn for each in (ours, twin))
    full, plain_full = (each.model.model.layers[1] for each in (ours, twin))
    shared, plain_shared = (each.model.model.layers[0].mlp.shared_expert for each in (ours, twin))
    head, plain_head = (each.model.mtp.layers[0].self_attn for each in (ours, twin))
    joint = plain_delta.in_proj.weight.data
    qkvz, ba = joint.split((delta.in_proj.weight.data.shape[0], delta.in_proj_ba.weight.data.shape[0]))
    assert torch.equal(delta.in_proj_ba.weight.data, ba)
    for linear, expected in (
        (delta.in_proj, qkvz),
        (delta.out_proj, plain_delta.out_proj.weight.data),
        (full.self_attn.qkv_proj, plain_full.self_attn.qkv_proj.weight.data),
        (full.self_attn.o_proj, plain_full.self_attn.o_proj.weight.data),
        (full.mlp.gate_up_proj, plain_full.mlp.gate_up_proj.weight.data),
        (shared.down_proj, plain_shared.down_proj.weight.data),
        (head.qkv_proj, plain_head.qkv_proj.weight.data),
    ):
        assert isinstance(linear.weight, BlockFP8Weight)
        torch.testing.assert_close(dequantize(linear.weight), expected)
    found, expected = (torch.cat(each.step(PROMPTS)) for each in (ours, twin))
    near = torch.nn.functional.cosine_similarity(found, expected, dim=-1) > 0.98
    assert near.float().mean() > 0.8


def test_heads_whose_gates_would_share_a_block_are_refused(tmp_path):
    write_checkpoint(tmp_path, make_model(), fp8=True)
    with pytest.raises(ModelError, match=r"head_dim .* is 16, but must be a multiple of 128"):
        nanovllm_models.load(tmp_path)
