"""Parity with transformers on tiny random checkpoints, float32: the same logits, and so the same greedy tokens."""

import json
import pickle
from pathlib import Path

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend

import nanovllm_models
from nanovllm_core.layers import compiled
from nanovllm_models import llama

PROMPTS = [[5, 17, 3, 88, 41, 2, 60], list(range(40))]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
TOLERANCE = 1e-4


FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def make_checkpoint(
    path: Path, max_shard_size: str = "1GB", family: str = "llama", **fields: object
) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    make_config, make_model = FAMILIES[family]
    config = make_config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.2,
        **fields,
    )
    model = make_model(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


VARIANTS = {
    "gqa": {"num_key_value_heads": 2},
    "mha, tied": {"tie_word_embeddings": True},
    "mqa, wide heads": {"num_key_value_heads": 1, "head_dim": 16},
    "llama3 scaling": {"num_key_value_heads": 2, "rope_parameters": LLAMA3},
    "yarn": {"num_key_value_heads": 2, "rope_parameters": YARN},
    "biases": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "sharded": {"num_key_value_heads": 2, "max_shard_size": "8KB"},
    "qwen2": {"family": "qwen2", "num_key_value_heads": 2},
    "qwen2, tied, windows in no layer": {
        "family": "qwen2",
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "max_window_layers": 3,
    },
    "qwen3": {"family": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "qwen3, tied, biases": {
        "family": "qwen3",
        "num_key_value_heads": 4,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "theta and eps": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_same_logits_and_tokens_as_transformers(fields, tmp_path, session):
    theirs = make_checkpoint(tmp_path, **fields)
    ours = session(nanovllm_models.load(tmp_path))
    sequences = [list(prompt) for prompt in PROMPTS]
    new = sequences
    for _ in range(10):
        logits = ours.step(new)
        for sequence, fresh, found in zip(sequences, new, logits, strict=True):
            with torch.no_grad():
                expected = theirs(torch.tensor([sequence])).logits[0, -len(fresh) :]
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
            assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()
        new = [[int(found[-1].argmax())] for found in logits]
        sequences = [sequence + fresh for sequence, fresh in zip(sequences, new, strict=True)]


@pytest.mark.parametrize("name", ["mha, tied", "biases", "qwen3"])
def test_what_is_compiled_is_compiled_once_for_all_layers_and_steps(name, tmp_path, session, monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled, "BACKEND", counter)
    monkeypatch.setattr(llama, "LEAST_ROWS", 9)
    make_checkpoint(tmp_path, **VARIANTS[name])
    spec = nanovllm_models.load(tmp_path)
    plain, fast = session(spec), session(spec, compiled=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in ([PROMPTS[1]], [[5], PROMPTS[0]], [[6], [7]], [[1], list(range(20))]):
            for found, expected in zip(fast.step(step), plain.step(step), strict=True):
                torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert counter.frame_count == 1


def test_chunked_prefill_gives_the_same_logits(tmp_path, session):
    make_checkpoint(tmp_path, num_key_value_heads=2)
    spec = nanovllm_models.load(tmp_path)
    whole = session(spec).step([PROMPTS[1]])[0]
    chunked = session(spec)
    parts = [chunked.step([PROMPTS[1][begin : begin + 13]])[0] for begin in range(0, 40, 13)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)


def test_the_config_as_transformers_4_wrote_it_means_the_same(tmp_path, session):
    make_checkpoint(tmp_path, num_key_value_heads=2, rope_parameters=LLAMA3)
    expected = session(nanovllm_models.load(tmp_path)).step(PROMPTS)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    rope = fields.pop("rope_parameters")
    fields["torch_dtype"] = fields.pop("dtype")
    fields["rope_theta"] = rope.pop("rope_theta")
    file.write_text(json.dumps(fields | {"rope_scaling": rope}))
    found = session(nanovllm_models.load(tmp_path)).step(PROMPTS)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_tied_checkpoint_may_carry_its_head_and_frequencies(tmp_path, session):
    theirs = make_checkpoint(tmp_path, tie_word_embeddings=True)
    expected = session(nanovllm_models.load(tmp_path)).step(PROMPTS)
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    from safetensors.torch import save_file

    save_file(tensors, tmp_path / "model.safetensors")
    found = session(nanovllm_models.load(tmp_path)).step(PROMPTS)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_spec_says_what_the_engine_must_know_and_travels_by_pickle(tmp_path, session):
    make_checkpoint(tmp_path, eos_token_id=[7, 9])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
    spec = nanovllm_models.load(tmp_path, served_name="tiny")
    assert (spec.name, spec.vocab_size, spec.max_position) == ("tiny", 96, 128)
    assert spec.eos_token_ids == (7, 9, 11)
    assert spec.dtype == torch.float32
    assert nanovllm_models.load(tmp_path).name == tmp_path.name
    expected, found = (session(each).step(PROMPTS)[0] for each in (spec, pickle.loads(pickle.dumps(spec))))
    assert torch.equal(found, expected)


def test_bfloat16_is_near_float32(tmp_path, session):
    make_checkpoint(tmp_path, num_key_value_heads=2, tie_word_embeddings=True)
    spec = nanovllm_models.load(tmp_path)
    exact = session(spec).step(PROMPTS)
    coarse = session(spec, torch.bfloat16).step(PROMPTS)
    for a, b in zip(coarse, exact, strict=True):
        assert a.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(a.float(), b, dim=-1).min() > 0.99
